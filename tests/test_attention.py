import math

import pytest
import torch
from torch import Tensor

from fastgpt.kernels.attention.blocked import attention_blocked
from fastgpt.kernels.attention.op import attention_mask, attention_ref
from fastgpt.ops import sdpa
from tests.parity import assert_parity, awkward

FUSED = {"blocked": attention_blocked, "sdpa": sdpa}
ALL = {"ref": attention_ref, **FUSED}
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
]


def sees(i, j, Tq, Tk, causal, window, doc_ids) -> bool:
    """The contract for query i and key j of one sequence, in words of one place at a time."""
    place = i + Tk - Tq  # the last query stands beside the last key
    if (causal or window is not None) and j > place:
        return False
    if window is not None and place - j >= window:
        return False
    return doc_ids is None or bool(doc_ids[place] == doc_ids[j])


def one_by_one(q, k, v, *, causal=True, scale=None, window=None, doc_ids=None) -> Tensor:
    """Attention of one query of one head at a time, over a list of the keys that it sees."""
    (B, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    rows = []
    for b, i, h in torch.cartesian_prod(*map(torch.arange, (B, Tq, H))).tolist():
        docs = None if doc_ids is None else doc_ids[b]
        seen = [j for j in range(Tk) if sees(i, j, Tq, Tk, causal, window, docs)]
        kv = h // (H // K)
        scores = (k[b, seen, kv] @ q[b, i, h]) * (1 / math.sqrt(D) if scale is None else scale)
        rows.append(scores.softmax(0) @ v[b, seen, kv])  # over no keys: 0
    return torch.stack(rows).view(B, Tq, H, D)


def dense(q, k, v, *, window=None, doc_ids=None, weight_factor=1.0) -> Tensor:
    """Causal self-attention as four plain operations in the dtype of the inputs."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(groups, 2) for x in (k, v))))
    T = q.shape[2]
    far = torch.ones(T, T).tril(0 if window is None else -window).bool()
    hidden = torch.ones(T, T).triu(1).bool() | (far if window is not None else False)
    if doc_ids is not None:
        hidden = hidden | (doc_ids[:, None, :, None] != doc_ids[:, None, None, :])
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1) * weight_factor
    return (weights @ v).transpose(1, 2)


def packed(op):
    """`op` of one (B, T, H + 2 K, D) tensor, read through strided views as the model does."""

    def of_qkv(qkv: Tensor, K: int, **options) -> Tensor:
        return op(*qkv.split((qkv.shape[2] - 2 * K, K, K), dim=2), **options)

    return of_qkv


def docs(*lengths: int) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


# --- the reference --------------------------------------------------------------------------------

MASKS = {
    "causal": {},
    "not-causal": {"causal": False},
    "scale": {"scale": 0.7},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-implies-causal": {"window": 4, "causal": False},
    "window-beyond-the-end": {"window": 100},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("Tq", "Tk"), [(7, 7), (1, 1), (1, 7), (3, 7), (7, 3)],
    ids=["square", "one", "last-query", "tail", "more-queries-than-keys"],
)  # fmt: skip
def test_attention_ref_matches_one_by_one(Tq, Tk, options):
    inputs = {"q": awkward(2, Tq, 4, 5), "k": awkward(2, Tk, 2, 5), "v": awkward(2, Tk, 2, 5)}
    assert_parity(attention_ref, one_by_one, inputs, **options)


@pytest.mark.parametrize(("H", "K"), [(2, 2), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_attention_ref_groups_heads(H, K):
    inputs = {"q": awkward(2, 7, H, 5), "k": awkward(2, 7, K, 5), "v": awkward(2, 7, K, 5)}
    assert_parity(attention_ref, one_by_one, inputs)


@pytest.mark.parametrize("Tq", [9, 4])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}], ids=str)
def test_attention_ref_keeps_documents_apart(Tq, options):
    doc_ids = torch.stack((docs(4, 1, 4), docs(2, 7)))
    inputs = {"q": awkward(2, Tq, 2, 5), "k": awkward(2, 9, 2, 5), "v": awkward(2, 9, 2, 5)}
    assert_parity(attention_ref, one_by_one, inputs, doc_ids=doc_ids, **options)


def test_attention_ref_in_bf16_is_close_to_fp64():
    inputs = {name: awkward(2, 12, 4, 8, dtype=torch.bfloat16) for name in "qkv"}
    assert_parity(attention_ref, one_by_one, inputs)


def test_a_query_that_sees_nothing_gives_zero_output_and_gradient():
    q, k, v = (awkward(1, T, 2, 4).requires_grad_() for T in (6, 2, 2))
    out = attention_ref(q, k, v)  # the first four queries stand before the first key
    assert (out[:, :4] == 0).all()
    assert (out[:, 4:] != 0).all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), awkward(*out.shape))
    assert (dq[:, :4] == 0).all()
    assert all(d.isfinite().all() and (d != 0).any() for d in (dq, dk, dv))

    # and their upstream gradient, however large, reaches no one
    upstream = torch.zeros_like(out)
    upstream[:, :4] = 1e30
    gradients = torch.autograd.grad(attention_ref(q, k, v), (q, k, v), upstream)
    assert all((d == 0).all() for d in gradients)


def test_attention_mask_is_none_only_where_everything_is_seen():
    assert attention_mask(3, 5, causal=False) is None
    assert attention_mask(3, 5, causal=False, doc_ids=torch.zeros(1, 5)) is not None


# --- the fast ones --------------------------------------------------------------------------------

# Around the block sizes: 64 rows up to T = 512, 128 beyond.
LENGTHS = [1, 3, 63, 64, 65, 127, 200, 513, 600]
HEADS_AND_WINDOWS = {
    "mha": (2, 2, None),
    "gqa-window-50": (4, 2, 50),
    "mqa-window-130": (3, 1, 130),
    "window-1": (2, 2, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HEADS_AND_WINDOWS.values(), ids=HEADS_AND_WINDOWS)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", FUSED)
def test_attention_matches_reference(name, T, case, dtype):
    H, K, window = case
    inputs = {"qkv": awkward(2 if T < 100 else 1, T, H + 2 * K, 8, dtype=dtype)}
    assert_parity(packed(FUSED[name]), packed(dense), inputs, K=K, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_ref_matches_the_dense_form(dtype):
    inputs = {"qkv": awkward(1, 200, 8, 8, dtype=dtype)}
    assert_parity(packed(attention_ref), packed(dense), inputs, K=2, window=50)


@pytest.mark.parametrize("name", FUSED)
def test_attention_matches_reference_on_separate_tensors(name):
    inputs = {"q": awkward(3, 70, 4, 16), "k": awkward(3, 70, 2, 16), "v": awkward(3, 70, 2, 16)}
    assert_parity(FUSED[name], dense, inputs)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("lengths", [(64, 1, 65), (3, 597)], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_attention_keeps_documents_apart(name, lengths, window):
    """Documents that end where a block of queries does, beside it, and in another row elsewhere."""
    doc_ids = torch.stack((docs(*lengths), docs(*reversed(lengths))))
    T = sum(lengths)
    inputs = {"q": awkward(2, T, 4, 8), "k": awkward(2, T, 2, 8), "v": awkward(2, T, 2, 8)}
    assert_parity(FUSED[name], dense, inputs, doc_ids=doc_ids, window=window)


def test_attention_blocked_takes_a_scale():
    inputs = {name: awkward(1, 70, 2, 8) for name in "qkv"}
    assert_parity(attention_blocked, one_by_one, inputs, scale=0.7)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_blocked_passes_gradcheck(window):
    q, k, v = (awkward(1, 66, 1, 2, dtype=torch.float64).requires_grad_() for _ in "qkv")
    assert torch.autograd.gradcheck(
        lambda *qkv: attention_blocked(*qkv, window=window), (q, k, v), fast_mode=True
    )


@pytest.mark.parametrize("name", ALL)
def test_large_scores_do_not_overflow(name):
    q, k, v = (awkward(1, 70, 1, 8).requires_grad_() for _ in "qkv")
    out = ALL[name](q * 300, k * 300, v)
    assert out.isfinite().all()
    assert all(d.isfinite().all() for d in torch.autograd.grad(out.sum(), (q, k, v)))


Q, KV = (2, 4, 6, 8), (2, 5, 3, 8)


@pytest.mark.parametrize(
    ("k", "v", "dtype", "message"),
    [
        ((2, 5, 4, 8), (2, 5, 4, 8), torch.float32, "q: expected a number of heads that 4 divides"),
        ((1, 5, 3, 8), KV, torch.float32, r"k: expected \(2, Tk, K, 8\)"),
        (KV, (2, 6, 3, 8), torch.float32, "v: expected .* the same Tk, K"),
        (KV, (2, 5, 3, 4), torch.float32, r"v: expected .* got \(2, 5, 3, 4\)"),
        (KV, KV, torch.bfloat16, "k: expected torch.float32 on cpu as q, got torch.bfloat16"),
    ],
    ids=["heads", "batch", "lengths", "head-dim", "dtype"],
)
@pytest.mark.parametrize("name", ["ref", "blocked"])
def test_attention_rejects(name, k, v, dtype, message):
    with pytest.raises(ValueError, match=message):
        ALL[name](torch.ones(Q), torch.ones(k, dtype=dtype), torch.ones(v, dtype=dtype))


def test_attention_blocked_rejects_other_lengths():
    with pytest.raises(ValueError, match="k: expected 4 tokens as in q, got 5"):
        attention_blocked(torch.ones(Q), torch.ones(KV), torch.ones(KV))


# --- dropout --------------------------------------------------------------------------------------


def dropped_weights(op, q: Tensor, k: Tensor, p: float, seed: int, **options) -> Tensor:
    """The attention weights (B, H, T, T) after dropout: what comes out where v is the identity.

    So q and k are as wide as they are long.
    """
    eye = torch.eye(q.shape[1], dtype=q.dtype)[None, :, None].expand_as(k)
    torch.manual_seed(seed)
    return op(q, k, eye, dropout_p=p, **options).transpose(1, 2)


@pytest.mark.parametrize("name", ALL)
def test_dropped_weights_are_zero_or_scaled_up(name):
    p, T = 0.25, 130
    q, k = awkward(1, T, 2, T) / 8, awkward(1, T, 2, T) / 8
    plain, dropped = (dropped_weights(ALL[name], q, k, drop, seed=3) for drop in (0.0, p))
    visible = torch.ones(T, T).tril().bool().expand_as(plain)
    assert (dropped[~visible] == 0).all()
    kept = (dropped != 0)[visible]
    torch.testing.assert_close(
        dropped[visible][kept], plain[visible][kept] / (1 - p), rtol=1e-4, atol=1e-6
    )
    draws = kept.numel()
    assert abs(kept.float().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / draws)
    assert len({tuple(row.tolist()) for row in (dropped[0, 0, 100:] != 0)}) == T - 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_dropout_of_attention_blocked_matches_the_same_mask(dtype, window):
    T, p = 130, 0.3
    inputs = {name: awkward(1, T, 2, T, dtype=dtype) / 4 for name in "qkv"}
    options = {"window": window}
    dropped = dropped_weights(attention_blocked, inputs["q"], inputs["k"], p, seed=5, **options)
    # The scale is that of the probability rounded to a multiple of 2**-16.
    factor = (dropped != 0) * (65536 / (65536 - round(p * 65536)))

    def op(q, k, v):
        torch.manual_seed(5)
        return attention_blocked(q, k, v, dropout_p=p, window=window)

    def ref(q, k, v):
        return dense(q, k, v, window=window, weight_factor=factor.to(q.dtype))

    assert_parity(op, ref, inputs)


def test_dropout_of_attention_blocked_passes_gradcheck():
    def op(q, k, v):
        torch.manual_seed(0)
        return attention_blocked(q, k, v, dropout_p=0.4)

    q, k, v = (awkward(1, 66, 1, 2, dtype=torch.float64).requires_grad_() for _ in "qkv")
    assert torch.autograd.gradcheck(op, (q, k, v), fast_mode=True)


# --- the rule itself ------------------------------------------------------------------------------


def backward_only(x: Tensor, factor: float) -> Tensor:
    """`x`, whose gradient alone is multiplied by `factor`."""
    return x + (factor - 1) * (x - x.detach())


MUTATIONS = {
    "output": lambda op, q, k, v: (y := op(q, k, v)) + 0.01 * y.detach(),
    "gradient of q": lambda op, q, k, v: op(backward_only(q, 1.01), k, v),
    "gradient of k": lambda op, q, k, v: op(q, backward_only(k, 1.01), v),
    "gradient of v": lambda op, q, k, v: op(q, k, backward_only(v, 1.01)),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mutated", MUTATIONS)
def test_parity_catches_an_error_of_one_percent(name, mutated):
    inputs = {name: awkward(2, 65, 2, 8) for name in "qkv"}
    with pytest.raises(AssertionError, match=mutated) as caught:
        assert_parity(lambda *qkv: MUTATIONS[mutated](ALL[name], *qkv), dense, inputs)
    others = [line for line in str(caught.value).splitlines() if mutated not in line]
    assert others == []


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 64, 1, 7)], ids=["first", "last"])
def test_parity_catches_one_wrong_element(place):
    def op(q, k, v):
        y = attention_ref(q, k, v)
        error = torch.zeros_like(y)
        error[place] = 0.01 * y.detach()[place]
        return y + error

    with pytest.raises(AssertionError, match=r"output 0.*largest error"):
        assert_parity(op, dense, {name: awkward(2, 65, 2, 8) for name in "qkv"})


def test_parity_catches_nan_and_a_wrong_dtype():
    inputs = {"x": awkward(4, 5, dtype=torch.bfloat16)}
    with pytest.raises(AssertionError, match="gradient of x"):
        assert_parity(lambda x: (x - x.detach()).sqrt(), torch.sin, inputs)
    with pytest.raises(AssertionError, match="float32"):
        assert_parity(lambda x: x.sin().float(), torch.sin, inputs)


def test_parity_forgives_what_rounding_does():
    inputs = {"x": awkward(40, 50, dtype=torch.bfloat16)}
    assert_parity(lambda x: x.float().sin().bfloat16(), torch.sin, inputs)
