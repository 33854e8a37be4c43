"""Models of transformers with our kernels, interpreted, beside the same models without them."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
import transformers
from torch import Tensor

from fastgpt import kernels
from fastgpt.autotune import choose
from fastgpt.errors import UserError
from fastgpt.hf import forwards, patch, unpatch
from fastgpt.kernels import runtime
from tests.convert import models
from tests.convert.models import V
from tests.parity import launches

ATTENTION, BACKWARD = "_attention_fwd_kernel", "_attention_bwd_dq_kernel"
NORM, ACTIVATION, LOSS = "_norm_fwd_kernel", "_bias_act_fwd_kernel", "_cross_entropy_fwd_kernel"
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
each_family = pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    """Skips the trials, which are slow when interpreted; one test has them."""
    monkeypatch.setattr(choose, "faults", lambda *_: [])


def theirs(family: str, **options):
    small = {"n_layer": 1, "n_head": 2} if family == "gpt2" else SMALL
    return models.theirs(family, **small | options)


def pair(family: str, **options):
    model = theirs(family, **options)
    patched = copy.deepcopy(model)
    patch(patched, force=True)
    return model, patched, torch.randint(V, (2, 6))


def assert_close(a: Tensor, b: Tensor) -> None:
    """Asserts that a and b differ by at most 1e-5 of the largest number in b."""
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters()}


def assert_same_training(model, patched, **given) -> None:
    """Asserts equal losses and gradients in training, where the patched model has no logits."""
    a, b = (x.train()(**given) for x in (model, patched))
    assert a.logits is not None
    assert b.logits is None
    assert_close(b.loss, a.loss)
    expected = gradients(model, a.loss)
    for name, gradient in gradients(patched, b.loss).items():
        assert_close(gradient, expected[name])


@each_family
def test_logits_loss_and_gradients_are_the_models_own(family):
    model, patched, ids = pair(family)
    upstream, expected = torch.randn(2, 6, V), model(ids).logits
    with launches(ATTENTION, NORM, ACTIVATION, BACKWARD):
        logits = patched(ids).logits
        found = gradients(patched, (logits * upstream).sum())
    assert_close(logits, expected)
    for name, gradient in gradients(model, (expected * upstream).sum()).items():
        assert_close(found[name], gradient)
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    with launches(LOSS):
        assert_same_training(model, patched, input_ids=ids, labels=labels)
    assert patched.eval()(ids, labels=labels).logits is not None


@pytest.mark.parametrize("options", [
    {"num_items_in_batch": torch.tensor(5), "ignore_index": 3},
    {"num_items_in_batch": 7, "shift_labels": torch.arange(12).view(2, 6)},
], ids=["ignore_index", "shift_labels"])  # fmt: skip
def test_options_of_the_loss_keep_their_meaning(options):
    model, patched, ids = pair("llama")
    assert_same_training(model, patched, input_ids=ids, labels=ids, **options)


def test_a_head_that_is_not_plain_keeps_the_models_own_loss():
    model, patched, ids = pair("gpt2")
    for options in ({"logits_to_keep": 6}, {"return_dict": False}):
        a, b = (x.train()(ids, labels=ids, **options) for x in (model, patched))
        assert_close(b[0], a[0])
        assert_close(b[1], a[1])
    patched.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    doubled = F.cross_entropy(2 * model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(patched(ids, labels=ids).loss, doubled)


@each_family
def test_padding_is_masked(family):
    model, patched, ids = pair(family)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    for side in (mask, mask.flip(1)):
        expected, found = (x(ids, attention_mask=side).logits for x in (model, patched))
        assert (expected - model(ids).logits).abs().max() > 1e-2  # the mask matters
        assert_close(found, expected)


@each_family
def test_greedy_text_is_the_same_with_a_cache(family):
    model, patched, ids = pair(family)
    mask = torch.ones(2, 6, dtype=torch.long)
    if family == "qwen3":
        mask[1, :3] = 0  # the others meet the kernels of attention
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with launches(NORM, *(ATTENTION,) * (family != "qwen3")):
        found = patched.generate(ids, **given)
    assert torch.equal(found, model.generate(ids, **given))


def test_dropout_of_attention_is_ours_with_the_generators_seed():
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    torch.manual_seed(5)
    with launches(ATTENTION):
        out, _ = forwards.attend(SimpleNamespace(), q, k, v, None, dropout=0.5)
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, (1,))
    kept = kernels.attention_dropout_mask((2, 4, 9, 9), 0.5, seed, "cpu")
    heads_last = (x.transpose(1, 2) for x in (q, k, v))
    assert_close(out, kernels.attention_ref(*heads_last, dropout_p=0.5, dropout_mask=kept))


def test_under_autocast_outputs_keep_their_dtypes():
    *both, ids = pair("llama")
    with torch.autocast("cpu", torch.bfloat16):
        a, b = (x(ids, output_hidden_states=True) for x in both)
    for x, y in zip((a.logits, *a.hidden_states), (b.logits, *b.hidden_states), strict=True):
        assert x.dtype == y.dtype
        assert (x - y).abs().max() <= 0.05 * x.abs().max()


def attributes(model) -> list[dict]:
    return [dict(vars(module)) for module in model.modules()]


@each_family
def test_unpatch_gives_the_model_back(family):
    model, ids = theirs(family), torch.randint(V, (2, 6))
    before, config, logits = attributes(model), model.config.to_dict(), model(ids).logits
    for _ in range(2):
        patch(model, force=True)
        assert not torch.equal(model(ids).logits, logits)
        unpatch(model)
        assert attributes(model) == before
        assert model.config.to_dict() == config
        assert model.config._attn_implementation == "sdpa"
        with launches():
            assert torch.equal(model(ids).logits, logits)
    base = model.base_model
    report = patch(base, force=True)
    assert list(report.patched) == ["attention", "norm", "activation"]
    assert "computes none" in report.skipped["loss"]


def test_what_cannot_be_done_is_an_error(monkeypatch):
    model = theirs("gpt2")

    def refused(said, function, *args, **options):
        with pytest.raises(UserError, match=said):
            function(*args, **options)

    refused("GPT2LMHeadModel is not patched", unpatch, model)
    refused("cannot patch a Linear", patch, torch.nn.Linear(2, 2))
    refused("batch is 0", patch, model, batch=0)
    assert not patch(model).patched  # interpreted kernels are not timed
    assert patch(model, force=True).patched
    refused("patched already", patch, model)
    model.transformer.ln_f.forward = model.transformer.ln_f.forward.__func__
    refused("the forward of a LayerNorm was replaced", unpatch, model)
    monkeypatch.delattr(transformers.PreTrainedModel, "set_attn_implementation")
    refused(r"transformers is 5.*: expected 4\.54", patch, theirs("gpt2"))


def test_only_what_is_correct_and_faster_is_patched(monkeypatch):
    results = {
        "attention": {"chosen": "triton", "complaints": [], "milliseconds": {"triton": 1.5}},
        "norm": {"chosen": "torch", "complaints": ["output 0 is off"], "milliseconds": {}},
        "activation": {"chosen": "torch", "complaints": [], "milliseconds": {"torch": 1.0}},
        "loss": {"chosen": "chunked", "complaints": [], "milliseconds": {"chunked": 2.0}},
    }
    monkeypatch.setattr("fastgpt.hf.patching.INTERPRETING", False)
    monkeypatch.setattr(choose, "remembered_or_tried", lambda *_: results)
    model, ids = theirs("gpt2"), torch.randint(V, (2, 6))
    report = patch(model)
    assert report.patched == {"attention": "triton 1.5 ms", "loss": "chunked 2 ms"}
    assert report.skipped == {"norm": "output 0 is off", "activation": "torch 1 ms"}
    runtime.LAUNCHES.clear()
    model.train()(ids, labels=ids)
    assert runtime.LAUNCHES.keys() >= {ATTENTION, LOSS}
    assert not runtime.LAUNCHES.keys() & {NORM, ACTIVATION}


def test_force_still_checks_that_kernels_are_correct(monkeypatch):
    monkeypatch.undo()
    with launches(ATTENTION, BACKWARD, NORM, ACTIVATION, LOSS):
        report = patch(theirs("qwen3"), force=True, length=8)
    assert list(report.patched) == ["attention", "norm", "activation", "loss"]
    monkeypatch.setattr(kernels, "attention", lambda q, k, v, **_: 1.01 * v)
    monkeypatch.setitem(choose.TRIALS, "norm", choose.TRIALS["activation"])
    monkeypatch.setattr("fastgpt.autotune.trials.bias_act", lambda x, bias, kind: 1.01 * x)
    report = patch(theirs("gpt2"), force=True, length=8)
    assert list(report.patched) == ["attention", "loss"]
    assert report.skipped["norm"].startswith("output 0")


def test_what_the_kernels_cannot_do_is_left_and_the_reason_is_told(monkeypatch):
    model = theirs("llama", hidden_act="gelu", attn_implementation="eager")
    skipped = patch(model, force=True).skipped
    assert skipped.keys() == {"attention", "activation"}
    assert "eager" in skipped["attention"]
    assert "float64" in patch(theirs("llama").double(), force=True).skipped["loss"]
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    report = patch(model := theirs("llama"), force=True)
    assert not report.patched
    assert "run on CUDA, not on cpu" in report.skipped["norm"]
    with launches():
        model(torch.randint(V, (2, 6)))
