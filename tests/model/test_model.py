import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.config.config import OpsConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.kernels import attention_ref
from fastgpt.model.generation import generate
from fastgpt.model.gpt import GPT, LearnedPositions
from fastgpt.ops import tables
from fastgpt.ops.protocols import Ops
from tests.model.plain import plain_logits
from tests.models import OPTIONS, TINY, build, draw_tokens, initial, on_cpu, sharp


def loss_and_gradients(net, model: GPT, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Computes loss and gradients of a model, or of its compiled form."""
    torch.manual_seed(3)  # the same dropout for each
    loss = net(tokens, targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_and_loss_match_a_plain_computation(options):
    state, tokens, targets = build(**options).state_dict(), draw_tokens(T=11), draw_tokens(T=11)
    targets[0, 3:6] = -100
    wanted, expected = targets != -100, None
    for attention in ("torch", "sdpa", "blocked"):
        model = build(attention=attention, **options)
        model.load_state_dict(state)
        expected = plain_logits(model, tokens) if expected is None else expected
        torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)
        log_p = expected.log_softmax(-1)[wanted]
        expected_loss = -log_p.gather(-1, targets[wanted][:, None]).mean()
        loss = model(tokens, targets)
        assert (loss.shape, loss.dtype) == ((), torch.float32)
        torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual_dtype", [None, torch.bfloat16])
def test_the_residual_stream_is_bf16_where_that_is_asked_for(residual_dtype):
    model = build()
    model.residual_dtype = residual_dtype
    dtypes = set()
    for block in model.h:
        block.register_forward_hook(lambda *args: dtypes.add(args[-1][1].stream.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(draw_tokens())
    assert dtypes == {residual_dtype or torch.float32}


@pytest.mark.parametrize("loss", ["torch", "chunked"])
@pytest.mark.parametrize("options", [
    {}, {"tied": False, "bias": ("qkv", "mlp", "head"), "softcap": 3.0},
    {"architecture": "bigram", "activation": "relu"},
], ids=str)  # fmt: skip
def test_z_loss_is_of_training_alone(options, loss):
    model, (tokens, targets) = build(chosen=on_cpu(loss=loss), **options), draw_tokens(4).chunk(2)
    targets[0, 3:6] = -100
    model.z_loss = 0.01
    for training, factor in ((True, 0.01), (False, 0.0)):
        got = model.train(training)(tokens, targets)
        logits = model(tokens)
        plain = F.cross_entropy(logits.mT, targets)
        expected = plain + factor * logits.logsumexp(-1)[targets != -100].square().mean()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(x, list(model.parameters())) for x in (got, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def with_dropout_as_zero() -> tuple[Ops, list[float]]:
    """Returns ops whose dropout zeroes everything, and the list of probabilities attention gets."""
    seen = []

    def attention(q, k, v, *, dropout_p, **options):
        seen.append(dropout_p)
        return attention_ref(q, k, v, **options)

    return replace(on_cpu(loss="torch"), attention=attention, dropout=lambda x, p: x * 0), seen


PLACES = {
    "embedding": ["wte", "wpe"],
    "attention": [],
    "residual": ["h.0.attn.c_proj", "h.1.attn.c_proj"],
    "feed_forward": ["h.0.mlp.c_proj", "h.1.mlp.c_proj"],
}


@pytest.mark.parametrize("place", PLACES)
def test_dropout_acts_at_its_place_alone(place):
    zeroing, given_to_attention = with_dropout_as_zero()
    model = build(chosen=zeroing, tied=False, dropout=0.25, dropout_places=(place,))
    tokens = draw_tokens()
    model.eval()
    whole = model(tokens)
    assert given_to_attention == [0.0, 0.0]
    model.train()
    dropped = model(tokens)
    assert given_to_attention[2:] == ([0.25, 0.25] if place == "attention" else [0.0, 0.0])
    if place != "attention":
        assert (dropped - whole).abs().max() > 1e-2
    for name in PLACES[place]:
        for parameter in model.get_submodule(name).parameters():
            parameter.data.zero_()
    torch.testing.assert_close(dropped, model.eval()(tokens))
    assert replace(TINY, dropout=0.3).dropout_at(place) == 0.3  # by default at all places


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


@pytest.mark.parametrize("tied", [True, False])
def test_padding_is_invisible(tied):
    padded, exact = build(vocab_multiple=64, tied=tied), build(vocab_multiple=1, tied=tied)
    assert padded.wte.weight.shape == (64, 32)
    assert padded.num_params() == exact.num_params()
    state = padded.state_dict()
    shapes, expected = ({k: v.shape for k, v in s.items()} for s in (state, exact.state_dict()))
    assert shapes == expected
    assert shapes["wte.weight"] == (50, 32)

    exact.load_state_dict(state)
    tokens, targets = draw_tokens(), draw_tokens()
    assert padded(tokens).shape == (2, 16, 50)
    torch.testing.assert_close(padded(tokens), exact(tokens))
    torch.testing.assert_close(padded(tokens, targets), exact(tokens, targets))

    again = build(vocab_multiple=48, tied=tied)
    again.load_state_dict(state)  # which stays as it is
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


# nanoGPT leaves its positions out of 10.65 and 0.80 million; the lecture's first steps are by hand
PARAMETERS = {
    "gpt2-124m": 124_439_808, "gpt2-355m": 354_823_168, "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200, "shakespeare-char": 10_646_784 + 256 * 384,
    "shakespeare-cpu": 795_904 + 64 * 128, "lecture-bigram": 4_225, "lecture-head": 7_553,
    "lecture-multihead": 7_553, "lecture-feedforward": 8_609, "lecture-residual": 41_921,
    "lecture-layernorm": 42_369, "lecture-gpt": 2_715_713, "lecture-gpt-full": 10_788_929,
    "lecture-gpt-small": 209_729, "pubmed": 8_704_068,
    "tinystories-char": 2 * 82 * 128 + 256 * 128 + 6 * (12 * 128**2 + 2 * 128) + 128,
}  # fmt: skip
TOKENS = {"tinystories-char": 82, "pubmed": 28_996}  # others have GPT-2's, or 65 characters


def test_recipes_have_the_published_number_of_parameters():
    for recipe, expected in PARAMETERS.items():
        config = RECIPES[recipe][1].model
        with torch.device("meta"):
            model = initial(config, vocab_size=config.vocab_size or TOKENS.get(recipe, 65))
        assert model.num_params() == expected, recipe
    assert replace(TINY, activation="swiglu", dim=800).ffn_width == 2176  # 2133.3 rounded up


DOCUMENTS = {"document_mask": True, "eot_id": 7}


@pytest.mark.parametrize(("options", "attention"), [
    ({}, "sdpa"), (OPTIONS["original"], "torch"), (OPTIONS["modern"] | DOCUMENTS, "blocked"),
], ids=["gpt2", "original", "documents"])  # fmt: skip
def test_compiles_fullgraph_and_only_once(options, attention):
    chosen = tables.select(OpsConfig(attention=attention), "cpu")
    model = build(chosen=chosen, num_layers=1, dropout=0.1, **options)
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


@pytest.mark.parametrize("attention", ["torch", "sdpa", "blocked"])
@pytest.mark.parametrize("options", [{}, {"position": "rotary"}, {"window": 30}], ids=str)
def test_packed_documents_give_what_each_gives_alone(attention, options):
    config = {"num_kv_heads": 2, "context": 150, "eot_id": 49, "document_mask": True}
    model = sharp(**config | {"position": "none", "chosen": on_cpu(attention=attention)} | options)
    # more than two of the blocks of 64 queries; the first row begins within a document
    rows = [[torch.randint(49, (n,)) for n in row] for row in ([40, 24, 1, 85], [63, 1, 2, 84])]
    for document in (*rows[0][1:], *rows[1]):
        document[0] = 49
    tokens = torch.stack([torch.cat(row) for row in rows])
    targets = tokens.roll(3, 1)
    packed = model(tokens)
    loss = model(tokens, targets)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    alone = torch.stack([torch.cat([model(d[None])[0] for d in row]) for row in rows])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    by_document = F.cross_entropy(alone.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(by_document.item(), rel=1e-5)
    expected = torch.autograd.grad(by_document, [*model.parameters()])
    for (name, _), got, wanted in zip(model.named_parameters(), gradients, expected):
        error = (got - wanted).norm() / wanted.norm()
        assert error < 1e-4, f"{name}: {error}"
