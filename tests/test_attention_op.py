"""Fused attention as an op of PyTorch's: compiled, recomputed, under autocast; what it refuses."""

import sys
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import attention, attention_dropout_mask, attention_packed
from fastgpt.kernels.attention.config import TUNING, rows, shipped
from fastgpt.kernels.attention.op import attention_ref
from tests.parity import awkward
from tests.proof import launches, printed_by

KERNELS = ("_attention_fwd_kernel", "_attention_bwd_dq_kernel", "_attention_bwd_dkv_kernel")
DOCS = torch.tensor([[0] * 9 + [4] * 11, [1] * 20])


def make(B=2, T=20, H=2, K=1, D=8, dtype=torch.float32):
    return [awkward(B, T, n, D, dtype=dtype).requires_grad_() for n in (H, K, K)]


def outputs_and_gradients(op, inputs, **options):
    out = op(*inputs, **options)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


# --- torch.compile --------------------------------------------------------------------------------

OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 5},
    "documents": {"doc_ids": DOCS},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 11},
}


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_fullgraph_to_the_same_bits(dynamic):
    torch.compiler.reset()
    inputs = make()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for name, options in OPTIONS.items():
        with launches(*KERNELS):
            got = outputs_and_gradients(compiled, inputs, **options)
        expected = outputs_and_gradients(attention, inputs, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name


def test_compiles_with_inductor_among_other_operations():
    torch.compiler.reset()

    def block(x, weight):
        qkv = (x @ weight).unflatten(-1, (4, 8))
        return attention_packed(qkv, 2).flatten(2).tanh()

    inputs = [awkward(2, 20, 6).requires_grad_(), awkward(6, 32).requires_grad_()]
    with launches(*KERNELS):
        got = outputs_and_gradients(torch.compile(block, fullgraph=True), inputs)
    for a, b in zip(got, outputs_and_gradients(block, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def packed(q, k, v):
    return attention_packed(torch.cat((q, k, v), 2), q.shape[2])


@pytest.mark.parametrize("op", [attention, packed])
def test_a_dynamic_graph_serves_every_batch_and_length(op):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for B, T in ((2, 20), (3, 33), (4, 16), (2, 7)):
        inputs = make(B, T, H=3)  # no two sizes alike: dynamo would take them for one
        got = outputs_and_gradients(compiled, inputs)
        expected = outputs_and_gradients(op, inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 4


@pytest.mark.parametrize(
    ("dtype", "requires_grad"), [(torch.float32, True), (torch.float16, False)], ids=str
)
def test_opcheck(dtype, requires_grad):
    q, k, v = (x.detach().transpose(1, 2).contiguous() for x in make(B=1, T=5, dtype=dtype))
    q, k, v = (x.transpose(1, 2).requires_grad_(requires_grad) for x in (q, k, v))
    seed = torch.tensor([5])
    settings = (None, True, 6, 0.1)
    ops = torch.ops.fastgpt
    opcheck(ops.attention.default, (q, k, v, None, None, seed, *settings))
    qkv = torch.cat((q, k, v), 2).detach().requires_grad_(requires_grad)
    opcheck(ops.attention_packed.default, (qkv, 2, None, None, None, 0.3, False, None, 0.0))
    with torch.no_grad():
        out, lse = ops.attention(q, k, v, None, None, seed, *settings)
        plain = [x.detach() for x in (out, q, k, v, out, lse)]
        opcheck(ops.attention_bwd.default, (*plain, None, None, seed, *settings))
        opcheck(
            ops.attention_packed_bwd.default,
            (plain[0], qkv.detach(), *plain[4:], None, None, seed, *settings),
        )


def test_fake_tensors_have_the_real_strides():
    real = attention(*make())
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 20, n, 8) for n in (2, 1, 1))
        fake = attention(q, k, v)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# --- autograd -------------------------------------------------------------------------------------


def test_a_gradient_of_a_gradient_raises():
    q, k, v = make()
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_backward_may_run_twice_over_a_kept_graph():
    q, k, v = make()
    out = attention(q, k, v, dropout_p=0.3)
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradient_of_one_input_alone(wanted):
    inputs = dict(zip("qkv", make(), strict=True))
    expected = torch.autograd.grad(attention_ref(**inputs).square().sum(), inputs[wanted])
    alone = {name: x.detach().requires_grad_(name == wanted) for name, x in inputs.items()}
    got = torch.autograd.grad(attention(**alone).square().sum(), alone[wanted])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_draws_the_same_mask_again(use_reentrant):
    def op(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    results = []
    for run in (op, lambda *x: checkpoint(op, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        inputs = make()
        torch.manual_seed(4)
        out = run(*inputs)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- dropout's mask -------------------------------------------------------------------------------


def test_the_mask_is_drawn_from_torchs_generator():
    q, k, v = (x.detach() for x in make())
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], attention(q, k, v, dropout_p=0.5))  # the next draw
    seed = torch.tensor([4])
    assert torch.equal(
        attention(q, k, v, dropout_p=0.5, dropout_seed=seed),
        attention(q, k, v, dropout_p=0.5, dropout_seed=4),
    )


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
    from fastgpt.kernels.attention import dropout as attention_dropout

    zeros = attention_dropout.philox([torch.zeros(1, dtype=torch.int64)] * 4, [0, 0])
    assert [int(x) for x in zeros] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    ones = attention_dropout.philox([torch.tensor([0xFFFFFFFF])] * 4, [0xFFFFFFFF] * 2)
    assert [int(x) for x in ones] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


# --- dtypes and devices ---------------------------------------------------------------------------


def test_autocast_casts_q_k_and_v():
    q, k, v = make()
    with torch.autocast("cpu", dtype=torch.bfloat16), launches(*KERNELS):
        out = attention(q, k.bfloat16(), v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.dtype is torch.bfloat16
    assert [d.dtype for d in grads] == [torch.float32] * 3
    torch.testing.assert_close(out.float(), attention_ref(q, k, v), rtol=0.02, atol=0.02)


def test_without_kernels_the_plain_form_runs(monkeypatch):
    module = sys.modules["fastgpt.kernels.attention.op"]
    monkeypatch.setattr(module, "runs_kernels", lambda device: False)
    inputs = make()
    options = {"dropout_p": 0.4, "dropout_seed": 9, "doc_ids": DOCS, "scale": -0.2}
    qkv = torch.cat(inputs, 2)
    with launches():
        plain = attention(*inputs, **options)
        packed = attention_packed(qkv, 2, **options)
    assert torch.equal(plain, packed)
    monkeypatch.undo()
    torch.testing.assert_close(attention(*inputs, **options), plain, rtol=1e-5, atol=1e-5)


# --- what it refuses ------------------------------------------------------------------------------

q0, k0, k3 = (torch.zeros(2, 6, heads, 8) for heads in (4, 2, 3))
q64, k64 = q0.double(), k0.double()
REFUSED = {
    "q: expected (B, Tq, H, D), got (6, 4, 8)": (q0[0], k0, k0, {}),
    "q: expected a number of heads that 3 divides, got 4": (q0, k3, k3, {}),
    "k: expected torch.float32 on cpu": (q0, k0.half(), k0, {}),
    "v: expected (2, Tk, K, 8)": (q0, k0, k0[:, :5], {}),
    "q: expected fp32, fp16 or bf16, got torch.float64": (q64, k64, k64, {}),
    "q: expected a head dimension from 1 to 256, got 257": (*[torch.zeros(1, 2, 1, 257)] * 3, {}),
    "scale: expected a finite number, got nan": (q0, k0, k0, {"scale": float("nan")}),
    "window: expected 1 or more, got 0": (q0, k0, k0, {"window": 0}),
    "dropout_p: expected 0 <= p < 1, got 1.0": (q0, k0, k0, {"dropout_p": 1.0}),
    "dropout_seed: expected torch.int64, got torch.int32": (
        q0, k0, k0, {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int32)}),
    "dropout_seed: expected 64 bits with a sign, got 9223372036854775808": (
        q0, k0, k0, {"dropout_p": 0.1, "dropout_seed": 2**63}),
    "doc_ids: expected (2, 6), got (2, 5)": (q0, k0, k0, {"doc_ids": torch.zeros(2, 5).int()}),
    "doc_ids: expected torch.int32 or torch.int64, got torch.float32": (
        q0, k0, k0, {"doc_ids": torch.zeros(2, 6)}),
    "doc_ids: expected at most 3 queries, got 6": (
        q0, k0[:, :3], k0[:, :3], {"doc_ids": torch.zeros(2, 3).int()}),
    "doc_ids: expected cpu as q, got meta": (
        q0, k0, k0, {"doc_ids": torch.zeros(2, 6, device="meta").int()}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named_before_anything_runs(message):
    q, k, v, options = REFUSED[message]
    with launches(), pytest.raises(ValueError) as caught:  # noqa: PT011 - compared whole below
        attention(q, k, v, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("shape", "heads"), [((2, 6, 32), 2), ((2, 6, 5, 8), 2), ((2, 6, 4, 8), 4)]
)
def test_a_packed_tensor_that_does_not_fit_is_named(shape, heads):
    with launches(), pytest.raises(ValueError, match="qkv: expected"):
        attention_packed(torch.zeros(shape), heads)


# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_arch_has_a_configuration_for_every_call(arch):
    for step in ("fwd", "dq", "dkv"):
        for bits in (16, 32):
            for D in (16, 32, 64, 128, 256):
                for plain in (True, False):
                    got = shipped(arch, step, bits, D, plain)
                    names = {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"}
                    assert set(got) - {"maxnreg"} == names
                    # a draw of dropout's mask covers 16 x 16 weights
                    assert got["BLOCK_M"] % 16 == got["BLOCK_N"] % 16 == 0


SPECIALISATIONS = """
import torch
from fastgpt.kernels.proof.compile import specialised
from fastgpt.kernels.attention.launch import Options, attention_bwd, attention_fwd
from fastgpt.kernels.runtime import recording

seen = {}
seed = torch.empty(1, dtype=torch.int64, device="meta")
options = Options(None, None, seed, None, True, None, 0.1)
for B, T in ((1, 1), (1, 2), (2, 1), (3, 15), (4, 16), (16, 1000), (70_000, 1024)):
    qkv = torch.empty(B, T, 36, 64, dtype=torch.bfloat16, device="meta").split(12, 2)
    with recording(90) as launches:
        out, lse = attention_fwd(*qkv, options)
        attention_bwd(out, *qkv, out, lse, options, qkv)
    for launch in launches:
        seen.setdefault(launch.kernel.__name__, set()).add(repr(specialised(launch)))
print({name: len(forms) for name, forms in sorted(seen.items())})
"""


def test_batch_and_length_compile_nothing_anew():
    assert printed_by(SPECIALISATIONS) == repr(dict.fromkeys(sorted(KERNELS), 1)) + "\n"


def test_unknown_hardware_is_safe_and_said_once():
    rows.cache_clear()
    with pytest.warns(UserWarning, match=r"never tuned for sm_77.*sm_80, sm_90") as said:
        first = rows(77)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows(77) is first
    assert (TUNING / "default.json").exists()
