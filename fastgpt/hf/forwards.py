"""Forwards that run our kernels in modules of transformers.

Each calls the module's own forward, or transformers' own attention, for what the kernels do not
do: so a patched model takes all that it took before.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, V vocabulary
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt import kernels
from fastgpt.kernels.checks import DTYPES, MAX_D
from fastgpt.kernels.norm.op import MAX_N
from fastgpt.kernels.runtime import runs_kernels, without_autocast

Forward = Callable[..., Any]


def runs_on(x: Tensor, *others: Tensor | None) -> bool:
    """Returns True if our kernels take x, and the other tensors are like it in dtype and device."""
    uniform = all(t is None or (t.dtype, t.device) == (x.dtype, x.device) for t in others)
    return uniform and x.dtype in DTYPES and runs_kernels(x.device)


# --- attention ------------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention for transformers' AttentionInterface: ours for causal attention without a mask.

    The rest goes to transformers' own function of the name sdpa: masks (of padding, packed
    sequences, windows shorter than the sequence), a query after a cache, cross-attention.

    Args:
        query: (B, H, T, D).
        key: (B, K, Tk, D).
        value: (B, K, Tk, D).

    Returns:
        tuple[Tensor, Tensor | None]: (B, T, H, D), and the weights, which are None.
    """
    masked = getattr(module, "is_causal", True) if is_causal is None else is_causal
    special = any(options.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    causal = attention_mask is None and masked and query.shape[2] == key.shape[2]
    fits = query.shape[-1] == value.shape[-1] <= MAX_D and 0 <= dropout < 1
    if causal and fits and not special and runs_on(query, key, value):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return kernels.attention(q, k, v, scale=scaling, dropout_p=dropout), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask,
        dropout=dropout, scaling=scaling, is_causal=is_causal, **options,
    )  # fmt: skip


# --- norms and activations ------------------------------------------------------------------------
# Autocast is off around the kernels: a module's output keeps the dtype that it has without them.


def layer_norm(self: Any, input: Tensor) -> Tensor:
    if not runs_on(input, self.weight, self.bias) or input.shape[-1] > MAX_N:
        return type(self).forward(self, input)
    with without_autocast(input):
        return kernels.layer_norm(input, self.weight, self.bias, self.eps)


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not runs_on(hidden_states, self.weight) or hidden_states.shape[-1] > MAX_N:
        return type(self).forward(self, hidden_states)
    with without_autocast(hidden_states):
        return kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)


@cache
def activation(kind: str) -> Forward:
    """Returns the forward of an activation's module."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if not runs_on(input):
            return type(self).forward(self, input)
        with without_autocast(input):
            return kernels.bias_act(input, None, kind)

    return forward


def swiglu(self: Any, x: Tensor) -> Tensor:
    """Forward of the MLP of Llama and Qwen3."""
    if not runs_on(x):
        return type(self).forward(self, x)
    gate_and_up = torch.cat((self.gate_proj(x), self.up_proj(x)), -1)
    with without_autocast(x):
        y = kernels.bias_act(gate_and_up, None, "swiglu")
    return self.down_proj(y)


# --- loss -----------------------------------------------------------------------------------------


@cache
def with_loss(original: Forward) -> Forward:
    """Returns the forward of a model whose loss in training never holds the logits of all tokens.

    Its signature is that of `original`, the class's forward, because transformers looks at it.
    """
    signature = inspect.signature(original)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        del given["self"]
        options = given.pop("kwargs", {}) | given
        labels, logits_to_keep = options.pop("labels", None), options.pop("logits_to_keep", 0)
        if labels is None or not _fusible(self, logits_to_keep, options):
            return original(self, *args, **kwargs)
        from transformers import modeling_outputs

        gpt2 = self.config.model_type == "gpt2"
        kind = "CausalLMOutputWithCrossAttentions" if gpt2 else "CausalLMOutputWithPast"
        outputs = dict(self.base_model(**options))
        loss = _causal_loss(self.lm_head, outputs.pop("last_hidden_state"), labels, **options)
        return getattr(modeling_outputs, kind)(loss=loss, **outputs)

    return forward


def _fusible(self: Any, logits_to_keep: Any, options: dict[str, Any]) -> bool:
    """Returns True in training, if the model's head and loss are what its class comes with."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = self.lm_head
    changed = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    if type(head) is not nn.Linear or changed or not self.training:
        return False
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        return False
    as_object = options.get("return_dict", getattr(self.config, "return_dict", True)) is not False
    own_loss = self.loss_function is ForCausalLMLoss
    return own_loss and as_object and runs_on(head.weight, head.bias)


def _causal_loss(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Computes transformers' ForCausalLMLoss from hidden states (B, T, C): () fp32.

    Each token's label is the next one, unless `shift_labels` (B, T) are given. It is a mean over
    the labels, or the sum divided by `num_items_in_batch`.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    loss = kernels.linear_cross_entropy(
        hidden, head.weight, targets, head.bias, ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch
