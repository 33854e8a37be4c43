"""Arguments that single ops refuse; `test_conformance` has wrong dtypes, devices and sizes.

In a message `...` stands for any text.
"""

import math
import re
from functools import partial

import pytest
import torch

from fastgpt.kernels import (
    attention,
    attention_blocked,
    attention_packed,
    bias_act,
    cross_entropy,
    decode_attention,
    layer_norm,
    linear_cross_entropy,
    rotary,
)
from fastgpt.kernels.attention.plain import attention_ref
from tests.parity import launches

q, k, k3 = (torch.zeros(2, 6, heads, 8) for heads in (4, 2, 3))
ids, wide = torch.zeros(2, 6, dtype=torch.int32), torch.zeros(1, 2, 1, 257)
SEPARATE = {
    "q: expected a number of heads that 3 divides, got 4...": (q, k3, k3),
    "k: expected (2, Tk, K, 8)...": (q, k[:1], k),
    "v: expected ..., the same in k and v...": (q, k, k[:, :5]),
    "v: expected ... got (2, 6, 2, 4)...": (q, k, k[..., :4]),
    "k: expected torch.float32 on cpu as q, got torch.bfloat16 on cpu": (q, k.bfloat16(), k),
}
OF_ATTENTION = {
    "scale: expected a finite number, got nan": {"scale": math.nan},
    "window: expected 1 or more, got 0": {"window": 0},
    "dropout_p: expected 0 <= p < 1, got 1.0": {"dropout_p": 1.0},
    "dropout_seed: expected torch.int64, got torch.int32": {"dropout_seed": ids[0, :1]},
    "dropout_seed: expected signed 64 bits, got 9223372036854775808": {"dropout_seed": 2**63},
    "doc_ids: expected (2, 6), got (2, 5)": {"doc_ids": ids[:, :5]},
    "doc_ids: expected torch.int32 or torch.int64, got torch.float32": {"doc_ids": ids.float()},
    "doc_ids: expected cpu as q, got meta": {"doc_ids": ids.to("meta")},
}
documents = partial(attention, doc_ids=ids[:, :3])
ATTENTION = {
    "q: expected a head dimension from 1 to 256, got 257": (attention, wide, wide, wide),
    "q: expected at most 3 tokens (doc_ids), got 6": (documents, q, k[:, :3], k[:, :3]),
    "qkv: expected (B, T, 2 + 2 K, D) for 2 heads, got (2, 6, 4)": (attention_packed, q[..., 0], 2),
    "qkv: expected (B, T, 2 + 2 K, D) for 2 heads, got (2, 6, 3, 8)": (attention_packed, k3, 2),
    "qkv: expected (B, T, 4 + 2 K, D) for 4 heads, got (2, 6, 4, 8)": (attention_packed, q, 4),
    "q: expected at most 5 tokens as in k, got 6": (attention_blocked, q, k[:, :5], k[:, :5]),
}

q1, n, table = q[:, :1], torch.ones(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
OF_DECODING = {
    "starts: expected (2, 1), got (2,)": {"starts": n},
    "block_table: expected (2, max_pages), got (2,)...": {"block_table": n.int()},
    "block_table: expected (2, 3), got (3, 3)...": {"block_table": table.new_zeros(3, 3)},
    "block_table: expected torch.int32, got torch.int64": {"block_table": table.long()},
    "scale: expected a finite number, got inf": {"scale": math.inf},
}
paged = partial(decode_attention, block_table=table)
DECODING = {
    "q: expected a head dimension from 1 to 256, got 257": (wide[:, :1], wide, wide, n[:1]),
    "k_cache: expected (2, Tk, K, 8) for q (2, 1, 4, 8), the same in k_cache and v_cache, got "
    "(1, 6, 2, 8)": (q1, k[:1], k, n),
    "v_cache: expected (2, Tk, K, 8)...": (q1, k, k[:, :5], n),
    "q: expected a number of heads that 3 divides, got 4": (q1, k3, k3, n),
}

X, HEAD, T = torch.ones(2, 8), torch.ones(8, 8), torch.zeros(2, dtype=torch.int64)
OF_LOSSES = {
    "valid_vocab: expected 1 to 8 columns, got 9": {"valid_vocab": 9},
    "valid_vocab: expected 1 to 8 columns, got 0": {"valid_vocab": 0},
    "label_smoothing: expected 0 to 1, got 1.5": {"label_smoothing": 1.5},
    "z_loss: expected 0 or more, got -1.0": {"z_loss": -1.0},
    "softcap: expected a number above 0 or None, got 0.0": {"softcap": 0.0},
    "reduction: expected one of mean, ... got 'avg'": {"reduction": "avg"},
}
no_tokens = partial(linear_cross_entropy, chunk_tokens=0)
LOSSES = {
    "logits: expected ... V >= 1, got (2, 0)": (cross_entropy, X[:, :0], T),
    "x: ... C >= 1, got (2, 0)": (linear_cross_entropy, X[:, :0], X[:, :0], T),
    "weight: expected (V, 8), got (2, 4)": (linear_cross_entropy, X, X[:, :4], T),
    "bias: ... got torch.int64": (linear_cross_entropy, X, X, T, T),
    "targets: expected (2,), got (1,)": (linear_cross_entropy, X, X, T[:1]),
    "chunk_tokens: expected 1 or more, or None, got 0": (no_tokens, X, X, T),
}

NORMS = {
    "x: ... got (2, 0)": (X[:, :0], None),
    "x: ... N from 1 to 16384, got (1, 16385)": (torch.ones(1, 16_385), None),
    "bias: expected (8,), got (1, 8)": (X, None, torch.ones(1, 8)),
    "eps: expected 0 or more, got -1.0": (X, None, None, -1.0),
}
ACTIVATIONS = {
    "kind: expected one of gelu_tanh, ...swiglu, got 'gelu'": (X, None, "gelu"),
    "x: ... got (2, 0)": (X[:, :0], None, "relu"),
    "x: expected (..., 2F) for swiglu, got (2, 7)": (X[:, :7], None, "swiglu"),
    "bias: expected (8,), got (4,)": (X, torch.ones(4), "swiglu"),
}

Q, C = torch.ones(2, 5, 3, 8), torch.ones(5, 4)
ROTARY = {
    "q: expected (B, T, heads, D), got (5, 3, 8)": (Q[0], Q, C, C),
    "k: expected (B, T, heads, D), got (2, 5, 0, 8)": (Q, Q[:, :, :0], C, C),
    "q: expected an even head dimension ..., got 7": (Q[..., :7], Q[..., :7], C, C),
    "q: expected an even head dimension from 2 to 256, got 258": (torch.ones(1, 1, 1, 258),) * 4,
    "k: expected (2, 5, 3, 8), got (2, 4, 3, 8)": (Q, Q[:, :4], C, C),
    "k: expected torch.float32, got torch.float16": (Q, Q.half(), C, C),
    "cos: expected (5, 4), got (5, 2)": (Q, Q, C[:, :2], C),
    "sin: expected (5, 4), got (6, 4)": (Q, Q, C, torch.ones(6, 4)),
    "sin: expected torch.float32, got torch.float16": (Q, Q, C, C.half()),
    "cos: expected cpu as q, got meta": (Q, Q, C.to("meta"), C),
    "sin: expected a tensor that requires...": (Q, Q, C, C.clone().requires_grad_()),
}

REFUSED = [
    *((message, op, *given) for op in (attention, attention_ref, attention_blocked)
      for message, given in SEPARATE.items()),
    *((message, partial(attention, **options), q, k, k)
      for message, options in OF_ATTENTION.items()),
    *((message, *given) for message, given in (ATTENTION | LOSSES).items()),
    *((message, partial(decode_attention, **options), q1, k, k, n)
      for message, options in OF_DECODING.items()),
    *((message, decode_attention, *given) for message, given in DECODING.items()),
    ("k_cache: expected (pages, page, K, 8)...", paged, q1, k[0], k, n),
    *((message, partial(loss, **options), *given)
      for loss, given in ((cross_entropy, (X, T)), (linear_cross_entropy, (X, HEAD, T)))
      for message, options in OF_LOSSES.items()),
    *((message, op, *given)
      for op, table in ((layer_norm, NORMS), (bias_act, ACTIVATIONS), (rotary, ROTARY))
      for message, given in table.items()),
]  # fmt: skip


def name(refused):
    message, op, *_ = refused
    return f"{getattr(op, 'func', op).__name__} {message}"


@pytest.mark.parametrize("refused", REFUSED, ids=name)
def test_bad_arguments_are_named_before_anything_runs(refused):
    message, op, *given = refused
    with launches(), pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
        op(*given)
    pattern = ".*".join(map(re.escape, message.split("...")))
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)
