"""Tests specific to attention over a key/value cache; `test_conformance` checks every op."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.kernels import decode_attention
from fastgpt.kernels.decode_attention import device as launcher
from fastgpt.kernels.decode_attention import spec
from fastgpt.kernels.decode_attention.device import MAX_SPLITS, splits
from fastgpt.kernels.decode_attention.op import decode_attention_ref
from fastgpt.kernels.decode_attention.spec import DECODE_ATTENTION, problem
from tests.kernels import conformance
from tests.parity import guarded, launches

PROBLEMS = DECODE_ATTENTION.problems


def make(s, device="cpu", dtype=torch.float32):
    """Returns (inputs, options) of a problem."""
    inputs = conformance.make_inputs(DECODE_ATTENTION, s, device, dtype)
    return list(inputs.values()), DECODE_ATTENTION.options(s, device)


SMALL = [label for label, s in PROBLEMS.items() if s["T"] <= 70 and s["D"] <= 20]


@pytest.mark.parametrize("label", SMALL)
def test_reference_is_pytorchs_attention_of_each_sequence(label):
    (q, *caches, lengths), options = make(PROBLEMS[label], dtype=torch.float64)
    out = decode_attention_ref(q, *caches, lengths, **options)
    Tq, H = q.shape[1:3]
    for b, length in enumerate(lengths.tolist()):
        k, v = (x[b] for x in caches)
        if "block_table" in options:
            pages = options["block_table"][b, : -(-length // caches[0].shape[1])]
            k, v = (x[pages].flatten(0, 1) for x in caches)
        new = min(Tq, length)
        assert (out[b, : Tq - new] == 0).all()
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        if "starts" in options:
            mask &= torch.arange(length) >= options["starts"][b, Tq - new :, None]
        q1, k1, v1 = (x.transpose(0, 1)[None] for x in (q[b, Tq - new :], k[:length], v[:length]))
        want = F.scaled_dot_product_attention(
            q1, k1, v1, attn_mask=mask, scale=options.get("scale"), enable_gqa=k.shape[1] != H
        )
        torch.testing.assert_close(out[b, Tq - new :], want[0].transpose(0, 1))


@given(data=st.data())
@conformance.examples(max_examples=15)
def test_any_shape(data, device):
    draw = data.draw
    T, K = draw(st.integers(1, 150)), draw(st.integers(1, 2))
    s = problem(
        T, K * draw(st.integers(1, 9)), draw(st.integers(1, 40)),
        draw(st.lists(st.integers(0, T), min_size=1, max_size=3).map(tuple)), K=K,
        Tq=draw(st.integers(1, 6)), page=draw(st.sampled_from([0, 1, 16, 33])),
        starts=draw(st.booleans()),
    )  # fmt: skip
    conformance.parity(DECODE_ATTENTION, s, device, draw(conformance.ANY_DTYPE))


@pytest.mark.parametrize("label", ["four-new-pages-and-starts", "splits", "splits-pages"])
def test_what_lies_beyond_a_sequence_may_be_nan(label, device):
    (q, *caches, lengths), options = make(PROBLEMS[label], device)
    expected = decode_attention(q, *caches, lengths, **options)
    for x in caches:
        x.masked_fill_(spec.unused_places(PROBLEMS[label]).to(device)[..., None, None], torch.nan)
    assert torch.equal(decode_attention(q, *caches, lengths, **options), expected)
    reference = decode_attention_ref(q, *caches, lengths, **options)
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)


def test_integers_may_have_32_bits(device):
    inputs, options = make(PROBLEMS["four-new-starts"], device)
    expected = decode_attention(*inputs, **options)
    got = decode_attention(*inputs[:3], inputs[3].int(), starts=options["starts"].int())
    assert torch.equal(got, expected)


def test_lengths_beyond_the_cache_are_cut(device):
    q, k, v, _ = make(problem(20, 2, 16, (20, 20), K=1), device)[0]
    within, beyond = torch.tensor([[20, 0], [2**40, -(2**40)]], device=device)
    for op in (decode_attention, decode_attention_ref):
        with guarded():
            assert torch.equal(op(q, k, v, beyond), op(q, k, v, within))


def test_empty_splits_are_written_and_read_by_nobody(device, monkeypatch):
    monkeypatch.setattr(launcher, "splits", lambda *_: 8)
    inputs, _ = make(problem(257, 1, 16, (37,), Tq=2), device)
    with launches(spec.SPLIT, spec.COMBINE), guarded() as made:
        out = decode_attention(*inputs)
    assert out.isfinite().all()
    _, parts, lse = made
    empty = lse == -torch.inf
    assert 0 < empty.sum() < empty.numel()
    assert parts[empty].isnan().all()  # poison stayed where a split had no keys
    assert parts[~empty].isfinite().all()


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(n, (torch.float32, torch.float16)[i % 2]) for i, n in enumerate((1, 3, 16, 17, 33, 128))],
    ids=str,
)
def test_any_number_of_splits_gives_the_same(count, dtype, device, monkeypatch):
    monkeypatch.setattr(launcher, "splits", lambda *_: count)
    s = problem(257, 2, 16, (257, 0), K=1, page=16 * (count % 2))
    conformance.parity(DECODE_ATTENTION, s, device, dtype)


def test_splits_fill_the_gpu_and_no_more():
    slots = 264
    for tiles in (1, 12, 40, 132, 200, 264, 300, 768, 10_000):
        for keys in (0, 1, 300, 1024, 16_384, 10**6):
            count = splits(tiles, keys, 128, slots)
            most = max(1, min(MAX_SPLITS, keys // 256))
            assert 1 <= count <= most
            filled = [tiles * n / (slots * -(-tiles * n // slots)) for n in range(1, most + 1)]
            assert filled[count - 1] >= 0.9 * max(filled)
            assert all(x < 0.9 * max(filled) for x in filled[: count - 1])
    assert splits(12, 16_384, 128, slots) in range(20, 23)  # GPT-2's heads, one sequence, an H200
    assert splits(768, 16_384, 128, slots) == 1


def test_a_gradient_is_refused_before_anything_runs(device):
    inputs, _ = make(PROBLEMS["one-place"], device)
    for i, name in enumerate(("q", "k_cache", "v_cache")):
        leaves = [x.detach().requires_grad_(i == n) if n < 3 else x for n, x in enumerate(inputs)]
        with launches(), pytest.raises(ValueError, match=rf"^{name}: .* has no backward$"):
            decode_attention(*leaves)
        with torch.no_grad():
            decode_attention(*leaves)
    q = inputs[0].detach().requires_grad_()
    out = torch.ops.fastgpt.decode_attention_fwd(q, *inputs[1:], None, None, 1.0)
    with pytest.raises(NotImplementedError, match="cannot be differentiated"):
        out.sum().backward()
