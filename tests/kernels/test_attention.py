"""Tests specific to attention; `test_conformance` checks every op."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import (
    attention,
    attention_blocked,
    attention_dropout_mask,
    attention_packed,
    scaled_dot_product_attention,
)
from fastgpt.kernels.attention import forward
from fastgpt.kernels.attention.config import rows, shipped, table_path
from fastgpt.kernels.attention.dropout import philox
from fastgpt.kernels.attention.plain import attention_mask, attention_ref
from fastgpt.kernels.attention.spec import ATTENTION, DKV, DQ, FWD, eager
from fastgpt.kernels.runtime import family
from fastgpt.ops.torch_ops import sdpa
from tests.kernels import conformance
from tests.kernels.conformance import DTYPES, assert_kernel_parity
from tests.parity import assert_parity, awkward, forward_backward, guarded, launches

KERNELS = (FWD, DQ, DKV)
ON_A_CPU = {"blocked": attention_blocked, "sdpa": sdpa}
PLAIN = {"ref": attention_ref, **ON_A_CPU}
on_a_cpu = pytest.mark.parametrize("name", ON_A_CPU)


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


@pytest.mark.parametrize("masks", MASKS)
def test_reference_is_the_contract_one_place_at_a_time(masks):
    lengths = [(9, 9), (4, 9)] if "doc" in masks else [(7, 7), (1, 1), (1, 7), (3, 7), (7, 3)]
    for (Tq, Tk), (H, K) in zip(lengths, [(4, 2), (3, 1), (2, 2), (6, 2), (2, 1)]):
        inputs = make(2, Tq, H, 5, Tk=Tk, K=K)
        assert_parity(attention_ref, one_by_one, inputs, **MASKS[masks])


def test_mask_is_none_only_where_everything_is_seen():
    assert attention_mask(3, 5, causal=False) is None
    assert attention_mask(3, 5, causal=False, doc_ids=torch.zeros(1, 5)) is not None


# --- the kernels ----------------------------------------------------------------------------------


@conformance.examples(max_examples=8)
@given(
    B=st.integers(1, 2), T=st.integers(1, 80), Tk=st.integers(1, 80), K=st.integers(1, 2),
    group=st.integers(1, 2), D=st.integers(1, 40), causal=st.booleans(),
    window=st.none() | st.integers(1, 120), longest=st.none() | st.integers(1, 120),
    p=st.sampled_from([0.0, 0.2, 0.9]), dtype=conformance.ANY_DTYPE,
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
    """They copy its value; their gradients of q and k are 0 up to rounding, if compiled."""
    inputs = make(1, T, 2, 16, dtype=dtype, device=device)
    assert_kernel_parity(attention, attention_ref, inputs, KERNELS, **options)

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


def test_the_kernels_write_the_gradient_of_a_packed_tensor_itself(device):
    qkv = awkward(2, 40, 6, 16, device=device)
    with guarded() as buffers:
        _, gradient = forward_backward(lambda qkv: attention_packed(qkv, 2), [qkv])
    assert gradient.data_ptr() in {x.data_ptr() for x in buffers}  # no concatenation made it


def test_heads_that_do_not_fit_the_cache_take_turns_in_groups(device, monkeypatch):
    heads, inputs = 2, list(make(1, 70, 5, 16, device=device).values())
    expected = forward_backward(attention, inputs)
    monkeypatch.setattr(forward, "L2_BYTES", heads * 2 * 70 * 16 * 4)
    assert forward.together_in_cache(inputs[1], 1, 5) == heads
    assert all(map(torch.equal, forward_backward(attention, inputs), expected))


def test_autocast_casts_inputs_of_different_dtypes(device):
    q, k, v = make(1, 9, 2, 8, device=device).values()
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(attention(q, k.bfloat16(), v), attention(q, k, v))


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_and_a_second_backward_draw_the_same_mask_again(use_reentrant, device):
    op = partial(attention, dropout_p=0.5)
    inputs, results = list(make(1, 20, 2, 8, device=device).values()), []
    for run in (op, lambda *x: checkpoint(op, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(4)
        leaves = [x.detach().requires_grad_() for x in inputs]
        total = run(*leaves).square().sum()
        for _ in range(2 if run is op else 1):
            total.backward(retain_graph=run is op)
            results.append([x.grad for x in leaves])
            for x in leaves:
                x.grad = None
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


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
    """Known answers of Philox4x32-7: Random123's kat_vectors, counter and key all 0, and all 1."""
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


def test_a_gpu_of_a_tuned_family_uses_its_table_and_another_is_warned_of_once():
    assert table_path(103) == table_path(100) != table_path(121)
    assert [family(arch) for arch in (90, "103", 121)] == [90, 100, 120]
    rows.cache_clear()
    with pytest.warns(UserWarning, match="sm_77") as said:
        assert rows(77) == rows(77) != []
    assert len(said) == 1


# --- where no kernel runs: what is fast on a CPU --------------------------------------------------

# Around the block sizes: 64 rows up to T = 512, 128 beyond. H, K, window
LENGTHS = [1, 63, 64, 65, 200, 513]
HEADS_AND_WINDOWS = [(2, 2, None), (4, 2, 50), (3, 1, 130), (2, 2, 2), (2, 2, 1)]


@pytest.mark.parametrize(("H", "K", "window"), HEADS_AND_WINDOWS)
@pytest.mark.parametrize("T", LENGTHS)
@on_a_cpu
def test_on_a_cpu_it_is_the_same(name, T, H, K, window):
    dtype = torch.float32 if T % 2 else torch.bfloat16
    inputs = make(2 if T < 100 else 1, T, H, 8, K=K, dtype=dtype)
    assert_parity(ON_A_CPU[name], attention_ref, inputs, eager=eager, terms=T, window=window)


@pytest.mark.parametrize("options", [{"window": 50}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("lengths", [(64, 1, 65), (3, 511)], ids=str)
@on_a_cpu
def test_on_a_cpu_documents_are_kept_apart(name, lengths, options):
    options = {**options, "doc_ids": torch.stack((docs(*lengths), docs(*reversed(lengths))))}
    T = sum(lengths)
    inputs = make(2, T, 2, 8, K=1)
    assert_parity(ON_A_CPU[name], attention_ref, inputs, eager=eager, terms=T, **options)


@pytest.mark.parametrize("T", [1, 63, 130])
@pytest.mark.parametrize(
    "options", [{}, {"window": 50}, {"doc_ids": docs(100, 100)[None]}], ids=str
)
@on_a_cpu
def test_on_a_cpu_queries_may_be_those_of_the_last_tokens(name, options, T):
    inputs = make(1, T, 4, 8, K=2, Tk=200)
    assert_parity(ON_A_CPU[name], attention_ref, inputs, eager=eager, **options)


def dropped_weights(op, q: Tensor, k: Tensor, p: float, seed: int, **options) -> Tensor:
    """Returns the weights (B, H, T, T) after dropout: the output where v, of D = T, is one."""
    eye = torch.eye(q.shape[1], dtype=q.dtype)[None, :, None].expand_as(k)
    torch.manual_seed(seed)
    return op(q, k, eye, dropout_p=p, **options).transpose(1, 2)


@pytest.mark.parametrize("name", PLAIN)
def test_dropped_weights_are_zero_or_scaled_up(name):
    p, T = 0.25, 130
    q, k = awkward(1, T, 2, T) / 8, awkward(1, T, 2, T) / 8
    whole, dropped = (dropped_weights(PLAIN[name], q, k, drop, seed=3) for drop in (0.0, p))
    visible = torch.ones(T, T).tril().bool().expand_as(whole)
    assert (dropped[~visible] == 0).all()
    kept = (dropped != 0)[visible]
    torch.testing.assert_close(
        dropped[visible][kept], whole[visible][kept] / (1 - p), rtol=1e-4, atol=1e-6
    )
    assert abs(kept.float().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    assert len({tuple(row.tolist()) for row in (dropped[0, 0, 100:] != 0)}) == T - 100


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("window", [None, 20])
def test_dropout_of_blocked_is_that_of_the_mask_it_draws(dtype, window):
    T, p = 130, 0.3
    inputs = {name: x / 4 for name, x in make(1, T, 2, T, dtype=dtype).items()}
    weights = dropped_weights(attention_blocked, inputs["q"], inputs["k"], p, 5, window=window)
    # its scale is that of the probability rounded to a multiple of 2**-16
    rounded = round(p * 65536) / 65536

    def op(q, k, v):
        torch.manual_seed(5)
        return attention_blocked(q, k, v, dropout_p=p, window=window)

    mask = {"dropout_mask": weights != 0, "dropout_p": rounded, "window": window}
    assert_parity(op, partial(attention_ref, **mask), inputs, eager=partial(eager, **mask))


# --- beside PyTorch's, with heads before tokens ---------------------------------------------------

SHAPE = (2, 4, 7, 16)


@pytest.mark.parametrize(
    ("key", "options", "ours"),
    [
        (SHAPE, {"is_causal": True}, True),
        (SHAPE, {"scale": 0.3}, True),
        ((2, 4, 9, 16), {}, True),
        ((2, 2, 7, 16), {"is_causal": True, "enable_gqa": True}, True),
        ((2, 4, 9, 16), {"is_causal": True}, False),  # PyTorch aligns the first keys
        (SHAPE, {"attn_mask": torch.eye(7, dtype=torch.bool)}, False),
        ((1, 4, 7, 16), {"is_causal": True}, False),
        (SHAPE[1:], {"is_causal": True}, False),
    ],
)
def test_results_and_gradients_are_pytorchs(key, options, ours):
    inputs = [awkward(*shape) for shape in (SHAPE[-len(key) :], key, key)]
    with launches(*(KERNELS * ours)):
        found = forward_backward(partial(scaled_dot_product_attention, **options), inputs)
    expected = forward_backward(partial(F.scaled_dot_product_attention, **options), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_dropout_keeps_the_weights_of_the_generators_seed():
    q, k, v = (awkward(*SHAPE) for _ in "qkv")
    torch.manual_seed(2)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(2)
    kept = attention_dropout_mask((2, 4, 7, 7), 0.5, torch.randint(2**63 - 1, (1,)), "cpu")
    weights = (q @ k.mT / 4).softmax(-1) * kept * 2
    torch.testing.assert_close(out, weights @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("T", "Tk", "K"), [(7, 9, 4), (6, 9, 2)])
def test_heads_before_tokens_are_refused_where_that_is_certain(T, Tk, K):
    inputs = [awkward(*shape) for shape in ((2, 4, T, 16), (2, K, Tk, 16), (2, K, Tk, 16))]
    with launches(), pytest.raises(ValueError, match=r"transpose\(1, 2\)"):
        attention(*inputs)
    assert attention(*(x.transpose(1, 2) for x in inputs)).shape == (2, T, 4, 16)
    both = [awkward(*shape) for shape in ((2, 7, 5, 16), (2, 6, 2, 16), (2, 6, 2, 16))]
    with pytest.raises(ValueError, match=r"divides, got 5$"):  # wrong in both layouts
        attention(*both)
