"""Tests specific to attention; `test_conformance` has those of every op."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import attention, attention_blocked, attention_dropout_mask, attention_packed
from fastgpt.kernels.attention import forward
from fastgpt.kernels.attention.config import rows, shipped, table_path
from fastgpt.kernels.attention.dropout import philox
from fastgpt.kernels.attention.plain import attention_mask, attention_ref
from fastgpt.kernels.attention.spec import ATTENTION, DKV, DQ, FWD, eager, variants
from fastgpt.kernels.runtime import family
from fastgpt.ops.torch_ops import sdpa
from tests.kernels import common, conformance
from tests.parity import (
    assert_kernel_parity,
    assert_parity,
    awkward,
    forward_backward,
    guarded,
    launches,
)

KERNELS = (FWD, DQ, DKV)
ON_A_CPU = {"blocked": attention_blocked, "sdpa": sdpa}
PLAIN = {"ref": attention_ref, **ON_A_CPU}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtypes(*names):
    return pytest.mark.parametrize("dtype", [DTYPES[name] for name in names], ids=names)


def make(B, T, H, D, *, Tk=None, K=None, dtype=torch.float32, device="cpu"):
    problem = {"B": B, "T": T, "H": H, "D": D, "Tk": Tk or T, "K": K or H}
    return conformance.make_inputs(ATTENTION, problem, device, dtype)


def docs(*lengths):
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


# --- the reference --------------------------------------------------------------------------------


def sees(i, j, Tq, Tk, causal, window, doc_ids) -> bool:
    """Returns True if query i sees key j of a sequence, by the definition for a single pair."""
    place = i + Tk - Tq  # the last query stands beside the last key
    if (causal or window is not None) and j > place:
        return False
    if window is not None and place - j >= window:
        return False
    return doc_ids is None or bool(doc_ids[place] == doc_ids[j])


def one_by_one(q, k, v, *, causal=True, scale=None, window=None, doc_ids=None) -> Tensor:
    """Computes attention for one query of one head at a time, over a list of keys that it sees."""
    (B, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    rows = []
    for b, i, h in torch.cartesian_prod(*map(torch.arange, (B, Tq, H))).tolist():
        ids = None if doc_ids is None else doc_ids[b]
        seen = [j for j in range(Tk) if sees(i, j, Tq, Tk, causal, window, ids)]
        kv = h // (H // K)
        scores = (k[b, seen, kv] @ q[b, i, h]) * (1 / math.sqrt(D) if scale is None else scale)
        rows.append(scores.softmax(0) @ v[b, seen, kv])  # over no keys: 0
    return torch.stack(rows).view(B, Tq, H, D)


DOCS = torch.stack((docs(4, 1, 4), docs(2, 7)))
MASKS = {
    "causal": {},
    "not-causal": {"causal": False},
    "scale": {"scale": 0.7},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-implies-causal": {"window": 4, "causal": False},
    "window-beyond-the-end": {"window": 100},
    "documents": {"doc_ids": DOCS},
    "documents-window": {"doc_ids": DOCS, "window": 2},
    "documents-not-causal": {"doc_ids": DOCS, "causal": False},
}


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("masks", MASKS)
def test_reference_is_the_contract_one_place_at_a_time(masks, dtype):
    lengths = [(9, 9), (4, 9)] if "doc" in masks else [(7, 7), (1, 1), (1, 7), (3, 7), (7, 3)]
    for (Tq, Tk), (H, K) in zip(lengths, [(4, 2), (3, 1), (2, 2), (6, 2), (2, 1)]):
        inputs = make(2, Tq, H, 5, Tk=Tk, K=K, dtype=dtype)
        assert_parity(attention_ref, one_by_one, inputs, **MASKS[masks])


def test_mask_is_none_only_where_everything_is_seen():
    assert attention_mask(3, 5, causal=False) is None
    assert attention_mask(3, 5, causal=False, doc_ids=torch.zeros(1, 5)) is not None


# --- the kernels ----------------------------------------------------------------------------------


@common.examples(max_examples=8)
@given(
    B=st.integers(1, 2), T=st.integers(1, 80), Tk=st.integers(1, 80), K=st.integers(1, 2),
    group=st.integers(1, 2), D=st.integers(1, 40), causal=st.booleans(),
    window=st.none() | st.integers(1, 120), longest=st.none() | st.integers(1, 120),
    p=st.sampled_from([0.0, 0.2, 0.9]), dtype=common.DTYPES,
)  # fmt: skip
def test_any_shape(B, T, Tk, K, group, D, causal, window, longest, p, dtype, device):
    problem = {
        "B": B, "T": min(T, Tk) if longest else T, "Tk": Tk, "H": K * group, "K": K, "D": D,
        "causal": causal, "window": window, "docs": longest, "dropout_p": p,
    }  # fmt: skip
    conformance.parity(ATTENTION, problem, device, dtype)


@dtypes("fp32", "fp16")
@pytest.mark.parametrize(
    ("T", "options"),
    [(1, {}), (65, {"window": 1}), (65, {"doc_ids": torch.arange(65)[None]})],
    ids=["one-token", "window", "documents"],
)
def test_queries_that_see_one_key(T, options, dtype, device):
    """Queries that see one key copy its value; their gradients of q and k are 0 up to rounding.

    The weight is exactly 1 in the interpreter; compiled, score * scale - maximum is one fused
    operation, and the exponent is the rounding error of the product instead of 0.
    """
    inputs = make(1, T, 2, 16, dtype=dtype, device=device)
    assert_kernel_parity(attention, attention_ref, inputs, kernels=KERNELS, **options)

    def wrong(q, k, v, **options):
        return attention(q, k, v, **options) + 0.01 * (q - q.detach())

    with pytest.raises(AssertionError, match=r"^gradient of q .*: largest error"):
        assert_parity(wrong, attention_ref, inputs, **options)


@pytest.mark.parametrize("op", [attention, attention_ref])
def test_a_query_that_sees_nothing_gives_zero_output_and_gradient(op, device):
    inputs = make(1, 70, 2, 16, Tk=20, device=device).values()
    before = (torch.arange(70, device=device) < 50)[:, None, None]  # the first key
    upstream = torch.where(before, 1e30, 0.0).expand(1, 70, 2, 16)
    with guarded():
        out, *gradients = forward_backward(op, inputs, [upstream])
    assert torch.equal(out == 0, before.expand(out.shape))
    assert all((d == 0).all() for d in gradients)


@pytest.mark.parametrize("op", [attention, *PLAIN.values()])
def test_large_scores_and_equal_rows(op, device):
    q, k, v = make(1, 70, 1, 16, device=device).values()
    for large in ((q * 300, k * 300, v), (q * 1e4, k, v)):
        assert all(x.isfinite().all() for x in forward_backward(op, large))
        torch.testing.assert_close(op(*large), attention_ref(*large), rtol=1e-4, atol=1e-4)
    equal = (torch.ones_like(q), torch.ones_like(k), v)
    torch.testing.assert_close(op(*equal), attention_ref(*equal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_those_who_see_it(value, device):
    q, k, v = make(1, 70, 1, 16, device=device).values()
    v[0, 40, 0, 3] = value
    out = attention(q, k, v)
    assert out[0, 40:, 0, 3].isfinite().sum() == 0
    assert out[0, :, 0, :3].isfinite().all()


@pytest.mark.parametrize(("K", "dropout"), [(2, {}), (1, {"dropout_p": 0.2, "dropout_seed": 3})])
def test_packed_gives_the_bits_of_its_slices(K, dropout, device):
    qkv = awkward(2, 40, 2 + 2 * K, 16, device=device)
    slices = lambda qkv: attention(*qkv.split((2, K, K), dim=2), **dropout)  # noqa: E731
    expected = forward_backward(slices, [qkv])
    with guarded() as buffers:
        got = forward_backward(lambda qkv: attention_packed(qkv, 2, **dropout), [qkv])
    assert all(map(torch.equal, got, expected))
    # the kernels wrote the gradient: no concatenation made it
    assert got[1].data_ptr() in {x.data_ptr() for x in buffers}


def test_heads_that_do_not_fit_the_cache_take_turns_in_groups(device, monkeypatch):
    heads, inputs = 2, list(make(1, 70, 5, 16, device=device).values())
    expected = forward_backward(attention, inputs)
    monkeypatch.setattr(forward, "L2_BYTES", heads * 2 * 70 * 16 * 4)
    assert forward.together_in_cache(inputs[1], 1, 5) == heads
    assert all(map(torch.equal, forward_backward(attention, inputs), expected))


def test_compiles_with_inductor_among_other_operations():
    torch.compiler.reset()

    def block(x, weight):
        qkv = (x @ weight).unflatten(-1, (4, 8))
        return attention_packed(qkv, 2).flatten(2).tanh()

    inputs = [awkward(2, 20, 6), awkward(6, 32)]
    with launches(*KERNELS):
        got = forward_backward(torch.compile(block, fullgraph=True), inputs)
    torch.testing.assert_close(got, forward_backward(block, inputs), rtol=1e-5, atol=1e-5)


def test_autocast_casts_inputs_of_different_dtypes(device):
    q, k, v = make(1, 9, 2, 8, device=device).values()
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(attention(q, k.bfloat16(), v), attention(q, k, v))


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_draws_the_same_mask_again(use_reentrant, device):
    op = partial(attention, dropout_p=0.5)
    inputs, results = list(make(1, 20, 2, 8, device=device).values()), []
    for run in (op, lambda *x: checkpoint(op, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(4)
        leaves = [x.detach().requires_grad_() for x in inputs]
        run(*leaves).square().sum().backward()
        results.append([x.grad for x in leaves])
    assert all(map(torch.equal, *results))


def test_backward_may_run_twice_over_a_kept_graph(device):
    leaves = [x.requires_grad_() for x in make(1, 20, 2, 8, device=device).values()]
    total = attention(*leaves, dropout_p=0.3).sum()
    first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in "ab")
    assert all(map(torch.equal, first, second))


def test_the_mask_is_drawn_from_torchs_generator(device):
    inputs = make(1, 20, 2, 8, device=device).values()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(attention(*inputs, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], attention(*inputs, dropout_p=0.5))  # the next draw
    seeds = (4, torch.tensor([4], device=device))
    assert torch.equal(*(attention(*inputs, dropout_p=0.5, dropout_seed=s) for s in seeds))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_drops_with_its_probability_and_never_repeats(p):
    mask = attention_dropout_mask((2, 3, 128, 128), p, 17)
    error = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.float().mean() - (1 - p)) < 5 * error
    rows_and_columns = [*mask.flatten(0, 2), *mask.transpose(2, 3).flatten(0, 2)]
    assert len({tuple(x.tolist()) for x in rows_and_columns}) == len(rows_and_columns)
    # the four words of one draw, and neighbouring seeds, are independent of each other
    words = [mask[..., i::16, j::16].flatten() for i in (0, 8) for j in (0, 8)]
    others = [
        attention_dropout_mask((2, 3, 128, 128), p, s).flatten() for s in (16, 18, 17 + 2**32)
    ]
    for group in (words, [mask.flatten(), *others]):
        correlation = torch.corrcoef(torch.stack(group).float()).fill_diagonal_(0)
        assert correlation.abs().max() < 5 / group[0].numel() ** 0.5


def test_philox_is_philox():
    """The random numbers of dropout are Philox4x32-7's: they equal the published known answers.

    Known answers of Philox4x32-7: Random123's kat_vectors, counter and key all 0, and all 1.
    """
    zeros = philox([torch.zeros(1, dtype=torch.int64)] * 4, [0, 0])
    assert [int(x) for x in zeros] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    ones = philox([torch.tensor([0xFFFFFFFF])] * 4, [0xFFFFFFFF] * 2)
    assert [int(x) for x in ones] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_arch_has_a_configuration_for_every_call(arch):
    for call in product(("fwd", "dq", "dkv"), (16, 32), (16, 32, 64, 128, 256), (True, False)):
        got = shipped(arch, *call)
        assert got.keys() - {"maxnreg"} == {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"}
        # a draw of dropout's mask covers 16 x 16 weights
        assert got["BLOCK_M"] % 16 == got["BLOCK_N"] % 16 == 0


def test_a_gpu_of_a_tuned_family_uses_its_table():
    assert table_path(103) == table_path(100) != table_path(121)
    assert [family(arch) for arch in (90, "103", 121)] == [90, 100, 120]


@pytest.mark.parametrize("arch", [86, 89, 103, 120])
def test_no_test_fails_where_attention_was_never_tuned(arch):
    rows.cache_clear()
    shipped.cache_clear()
    next(variants(arch))  # it launches; a warning of ours is an error in a test


def test_unknown_hardware_is_safe_and_said_once():
    rows.cache_clear()
    with pytest.warns(UserWarning, match=r"never tuned for sm_77.*sm_80, sm_90") as said:
        assert rows(77) == rows(77) != []
    assert len(said) == 1


# --- the rule of errors itself --------------------------------------------------------------------


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 64, 1, 7)], ids=["first", "last"])
def test_parity_catches_one_wrong_element(place):
    def op(q, k, v):
        y = attention_ref(q, k, v)
        error = torch.zeros_like(y)
        error[place] = 0.01 * y.detach()[place]
        return y + error

    with pytest.raises(AssertionError, match=r"output 0.*largest error"):
        assert_parity(op, eager, make(2, 65, 2, 8))


def test_parity_catches_nan_and_a_wrong_dtype():
    inputs = {"x": awkward(4, 5, dtype=torch.bfloat16)}
    with pytest.raises(AssertionError, match="gradient of x"):
        assert_parity(lambda x: (x - x.detach()).sqrt(), torch.sin, inputs)
    with pytest.raises(AssertionError, match="float32"):
        assert_parity(lambda x: x.sin().float(), torch.sin, inputs)
