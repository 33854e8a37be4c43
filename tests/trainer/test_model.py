import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastgpt import ops
from fastgpt.config import OpsConfig
from fastgpt.errors import UserError
from fastgpt.generate import generate
from fastgpt.model import GPT
from fastgpt.ops import Ops
from fastgpt.positions import LearnedPositions, Rotary
from fastgpt.recipes import RECIPES
from kernels import attention_ref, rotary_ref, runtime
from tests.trainer.models import (
    OPTIONS,
    TINY,
    build,
    draw_tokens,
    each_attention,
    each_option,
    initial,
    on_cpu,
    plain_logits,
)


@each_option
def test_logits_and_loss_match_a_plain_computation(options):
    model, tokens, targets = build(**options), draw_tokens(T=11), draw_tokens(T=11)
    targets[0, 3:6] = -100
    expected = plain_logits(model, tokens)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)
    log_p = expected.log_softmax(-1)
    wanted = targets != -100
    expected_loss = -log_p[wanted, :].gather(-1, targets[wanted][:, None]).mean()
    loss = model(tokens, targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)


@each_attention
@each_option
def test_attention_implementations_agree(options, attention):
    model, tokens, targets = build(**options), draw_tokens(), draw_tokens()
    other = initial(model.config, chosen=on_cpu(attention=attention))
    other.load_state_dict(model.state_dict())
    losses = [net(tokens, targets) for net in (model, other)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, list(net.parameters()))
                 for loss, net in zip(losses, (model, other))]  # fmt: skip
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


@each_attention
@each_option
def test_trains_under_bf16_autocast(options, attention):
    model = build(attention=attention, dropout=0.1, **options)
    tokens, targets = draw_tokens(), draw_tokens()
    model.eval()
    exact = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.1, atol=0.1)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


# --- invariants -----------------------------------------------------------------------------------


@each_attention
@each_option
def test_a_later_token_never_changes_earlier_logits(options, attention):
    model, tokens = build(attention=attention, **options), draw_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    reached = slice(9, 14)  # by two layers with a window of three
    assert (after - before)[:, reached].abs().amax((0, 2)).min() > 1e-3
    torch.testing.assert_close(model(tokens[:, :5]), before[:, :5])


@each_attention
def test_a_token_beyond_the_windows_has_no_effect(attention):
    model = build(attention=attention, window=3, num_layers=2)
    tokens = draw_tokens()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 50
    difference = (model(changed) - model(tokens)).abs().amax((0, 2))
    reach = 4 + 2 * (3 - 1)  # each layer carries it two places on
    assert difference[:4].max() < 1e-5
    assert difference[reach + 1 :].max() < 1e-5
    assert difference[4 : reach + 1].min() > 1e-4


def test_without_positions_earlier_tokens_are_a_set():
    model = build(position="none", num_layers=1)
    tokens = draw_tokens()
    shuffled = torch.cat((tokens[:, torch.randperm(15)], tokens[:, 15:]), 1)
    torch.testing.assert_close(model(shuffled)[:, 15], model(tokens)[:, 15])


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary"])
def test_with_positions_their_order_matters(position):
    model = build(position=position, num_layers=1)
    tokens = draw_tokens()
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert (model(swapped)[:, 15] - model(tokens)[:, 15]).abs().max() > 1e-3


def test_rotary_scores_depend_on_the_distance_alone():
    cos, sin = Rotary(replace(TINY, position="rotary", context=40))(slice(40))
    q, k = torch.randn(2, 1, 1, 3, 8).expand(2, 1, 40, 3, 8).unbind()
    turned_q, turned_k = rotary_ref(q, k, cos, sin)
    scores = torch.einsum("bihd,bjhd->hij", turned_q, turned_k)
    for distance in (0, 1, 7, 30):
        same = scores.diagonal(-distance, 1, 2)
        torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=1e-4, atol=1e-4)
    assert scores[:, 30, 0].sub(scores[:, 0, 0]).abs().min() > 1e-3
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))


def test_softcap_bounds_the_logits():
    model = build(softcap=2.0)
    with torch.no_grad():
        model.wte.weight.mul_(100)
    logits = model(draw_tokens())
    assert 1.9 < logits.abs().max() <= 2.0


def test_grouped_heads_equal_full_heads_with_repeated_weights():
    grouped = build(num_kv_heads=2, num_heads=4)
    full = build(num_heads=4)
    state = grouped.state_dict()
    for i in range(2):
        for kind in ("weight", "bias"):
            name = f"h.{i}.attn.c_attn.{kind}"
            q, k, v = state[name].split((32, 16, 16))
            k, v = (x.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))
            state[name] = torch.cat((q, k, v))
    full.load_state_dict(state)
    tokens = draw_tokens()
    torch.testing.assert_close(full(tokens), grouped(tokens))


def test_tied_head_is_the_embedding():
    tied, untied = build(), build(tied=False)
    state = tied.state_dict()
    assert "lm_head.weight" not in state
    untied.load_state_dict({**state, "lm_head.weight": state["wte.weight"]})
    tokens = draw_tokens()
    torch.testing.assert_close(untied(tokens), tied(tokens))
    assert untied.num_params() - tied.num_params() == 50 * 32


def test_no_bias_leaves_no_bias_behind():
    assert not [name for name, _ in build(bias=False).named_parameters() if "bias" in name]


def test_targets_that_are_all_ignored_give_nan():
    assert build()(draw_tokens(), torch.full((2, 16), -100)).isnan()


@pytest.mark.parametrize("loss", ["torch", "chunked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False, "head_bias": True, "softcap": 3.0},
        {"architecture": "bigram", "activation": "relu"},
    ],
    ids=str,
)
def test_label_smoothing_and_z_loss_are_of_training_alone(options, loss):
    model, (tokens, targets) = build(chosen=on_cpu(loss=loss), **options), draw_tokens(4).chunk(2)
    targets[0, 3:6] = -100
    model.label_smoothing, model.z_loss = 0.2, 0.01
    for training, smoothing, factor in ((True, 0.2, 0.01), (False, 0.0, 0.0)):
        got = model.train(training)(tokens, targets)
        logits = model(tokens)
        lse = logits.logsumexp(-1)
        target = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        losses = lse - (1 - smoothing) * target - smoothing * logits.mean(-1) + factor * lse**2
        expected = losses[targets != -100].mean()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(x, list(model.parameters())) for x in (got, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# --- dropout: each place, in training, and only there ---------------------------------------------


def with_dropout_as_zero() -> tuple[Ops, list[float]]:
    """Ops whose dropout drops everything, and the probabilities that attention was given."""
    seen = []

    def attention(q, k, v, *, scale, window, dropout_p, doc_ids):
        seen.append(dropout_p)
        return attention_ref(q, k, v, scale=scale, window=window, doc_ids=doc_ids)

    plain = ops.select(OpsConfig(loss="torch"), "cpu", compiled=True)
    return replace(plain, attention=attention, dropout=lambda x, p: x * 0), seen


PLACES = {
    "embedding": ["wte", "wpe"],
    "attention": [],
    "residual": ["h.0.attn.c_proj", "h.1.attn.c_proj"],
    "feed_forward": ["h.0.mlp.c_proj", "h.1.mlp.c_proj"],
}


@pytest.mark.parametrize("place", PLACES)
def test_dropout_acts_at_its_place_alone(place):
    zeroing, given_to_attention = with_dropout_as_zero()
    model = build(chosen=zeroing, tied=False, **{f"{place}_dropout": 0.25})
    tokens = draw_tokens()
    model.eval()
    whole = model(tokens)
    assert given_to_attention == [0.0, 0.0]
    model.train()
    dropped = model(tokens)
    assert given_to_attention[2:] == ([0.25, 0.25] if place == "attention" else [0.0, 0.0])
    if place != "attention":
        assert (dropped - whole).abs().max() > 1e-2
    state = model.state_dict()
    for name in PLACES[place]:
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in state:
                state[f"{name}.{kind}"] = torch.zeros_like(state[f"{name}.{kind}"])
    model.load_state_dict(state)
    torch.testing.assert_close(dropped, model.eval()(tokens))


@pytest.mark.parametrize("dropout", ["torch", "lanes"])
def test_dropout_drops_the_share_it_was_asked_for(dropout):
    chosen = on_cpu(dropout=dropout)
    model = initial(chosen=chosen, embedding_dropout=0.25, dim=256, position="none")
    seen = []
    model.h[0].ln_1.register_forward_hook(lambda _, args, out: seen.append(args[0].detach()))
    tokens = draw_tokens(B=8)
    model(tokens)
    kept, whole = seen[0] != 0, model.wte(tokens)
    assert abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(seen[0][kept], whole[kept] / 0.75)


def test_dropout_has_one_default_for_all_places():
    config = replace(TINY, dropout=0.3, attention_dropout=0.0, residual_dropout=0.1)
    assert {place: config.dropout_at(place) for place in PLACES} == {
        "embedding": 0.3, "attention": 0.0, "residual": 0.1, "feed_forward": 0.3,
    }  # fmt: skip


# --- initial weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_init(activation, tied):
    model = initial(num_layers=8, dim=128, activation=activation, tied=tied, vocab_size=512)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # 1/sqrt(2 * 8)
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel()), name
        else:
            assert (weight == (1 if name.endswith("weight") else 0)).all(), name


def test_gpt2_init_starts_at_the_loss_of_a_uniform_guess():
    assert initial()(draw_tokens(), draw_tokens()).item() == pytest.approx(math.log(50), abs=0.05)


def test_torch_init_is_what_pytorchs_modules_draw():
    torch.manual_seed(1)
    model = initial(init="torch", tied=False, vocab_multiple=1)
    torch.manual_seed(1)
    for name, module in model.named_modules():  # in the order in which they were made
        if isinstance(module, nn.Linear):
            bias = module.bias is not None
            fresh = nn.Linear(module.in_features, module.out_features, bias=bias)
        elif isinstance(module, nn.Embedding):
            fresh = nn.Embedding(module.num_embeddings, module.embedding_dim)
        elif isinstance(module, LearnedPositions):
            fresh = nn.Embedding(*module.weight.shape)
        else:
            continue
        for kind, weight in module.named_parameters():
            assert torch.equal(weight, fresh.get_parameter(kind)), f"{name}.{kind}"


# --- the vocabulary's padding ---------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_padding_is_invisible(tied):
    padded, exact = build(vocab_multiple=64, tied=tied), build(vocab_multiple=1, tied=tied)
    assert padded.wte.weight.shape == (64, 32)
    assert padded.num_params() == exact.num_params()
    state = padded.state_dict()
    assert {k: v.shape for k, v in state.items()} == {
        k: v.shape for k, v in exact.state_dict().items()
    }
    assert state["wte.weight"].shape == (50, 32)

    exact.load_state_dict(state)
    tokens, targets = draw_tokens(), draw_tokens()
    assert padded(tokens).shape == (2, 16, 50)
    torch.testing.assert_close(padded(tokens), exact(tokens))
    torch.testing.assert_close(padded(tokens, targets), exact(tokens, targets))

    again = build(vocab_multiple=48, tied=tied)
    again.load_state_dict(exact.state_dict())
    assert again.wte.weight.shape == (96, 32)
    assert (again.wte.weight[50:] == 0).all()
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, state[name]), name


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"softcap": 3.0}], ids=str)
def test_padding_gets_no_gradient(options):
    model = build(**options)
    model(draw_tokens(), draw_tokens()).backward()
    for table in [model.wte] + ([model.lm_head] if model.lm_head else []):
        assert (table.weight.grad[50:] == 0).all()
        assert table.weight.grad[:50].any(1).all() or not model.config.tied
    assert (GPT(model.config, with_dropout_as_zero()[0]).wte.weight[50:] == 0).all()


def test_padding_never_reaches_the_loss():
    model, tokens, targets = build(), draw_tokens(), draw_tokens()
    loss = model(tokens, targets).item()
    with torch.no_grad():
        model.wte.weight[50:] = 100.0
    assert model(tokens, targets).item() == loss


def test_loading_leaves_the_given_state_as_it_was():
    state = build().state_dict()
    build().load_state_dict(state)
    assert state["wte.weight"].shape == (50, 32)


# --- sizes ----------------------------------------------------------------------------------------

# GPT-2's as published; nanoGPT reports 10.65 and 0.80 million for the others, positions left out.
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "shakespeare-char": 10_646_784 + 256 * 384,
    "shakespeare-cpu": 795_904 + 64 * 128,
}


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_recipes_have_the_published_number_of_parameters(recipe):
    config = RECIPES[recipe][1].model
    config = replace(config, vocab_size=config.vocab_size or 65)  # characters of tiny shakespeare
    with torch.device("meta"):
        model = initial(config)
    assert model.num_params() == PARAMETERS[recipe]
    assert model.config.padded_vocab % 64 == 0


def test_default_widths():
    assert TINY.ffn_width == 128
    assert replace(TINY, activation="swiglu", dim=768).ffn_width == 2048
    assert replace(TINY, activation="swiglu", dim=800).ffn_width == 2176  # 2133.3 rounded up


# --- torch.compile --------------------------------------------------------------------------------


def loss_and_gradients(net, model: GPT, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    torch.manual_seed(3)  # the same dropout for each
    loss = net(tokens, targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(
    ("option_set", "attention"),
    [("gpt2", "sdpa"), ("gpt2", "torch"), ("modern", "sdpa"), ("original", "sdpa")],
)
def test_compiles_fullgraph_and_only_once(option_set, attention):
    chosen = ops.select(OpsConfig(attention=attention), "cpu", compiled=True)
    model = build(chosen=chosen, num_layers=1, dropout=0.1, **OPTIONS[option_set])
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")  # no code is built, so this is fast
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    graphs = []
    for _ in range(2):
        tokens, targets = draw_tokens(), draw_tokens()
        model.train()
        got, expected = (loss_and_gradients(f, model, tokens, targets) for f in (compiled, model))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens, targets), model(tokens, targets))
        generate(model, tokens[:, :3], max_new_tokens=3, vocab_size=50)
        graphs.append(backend.frame_count)
    assert graphs == [2, 2]  # training and evaluation, one graph each


def test_ops_for_compiled_models(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    assert ops.select(OpsConfig(), "cpu", compiled=True).names == {
        "attention": "sdpa", "norm": "torch", "loss": "chunked", "rotary": "torch",
        "activation": "torch", "decode": "torch", "dropout": "torch",
    }  # fmt: skip
    assert ops.select(OpsConfig(), "cpu", compiled=False).names == {
        "attention": "blocked", "norm": "torch", "loss": "chunked", "rotary": "torch",
        "activation": "torch", "decode": "torch", "dropout": "lanes",
    }  # fmt: skip


@pytest.mark.parametrize(("op", "name"), [("attention", "blocked"), ("dropout", "lanes")])
@pytest.mark.parametrize(
    ("device", "compiled", "where"), [("cpu", True, "torch.compile"), ("cuda", False, "cuda")]
)
def test_ops_reject_what_cannot_run_there(op, name, device, compiled, where):
    with pytest.raises(UserError, match=f"ops.{op} is {name}: .*, not on {where}"):
        ops.select(OpsConfig(**{op: name}), device, compiled=compiled)
