"""The chunked head and loss; on a CPU its kernels run in Triton's interpreter, and plainly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import cross_entropy, linear_cross_entropy, runtime
from fastgpt.kernels.cross_entropy.chunks import tokens_at_a_time
from fastgpt.kernels.cross_entropy.linear import linear_cross_entropy_ref
from tests.parity import assert_parity, awkward
from tests.proof import assert_kernel_parity, assert_mutations_are_caught, guarded, launches

ROOT = Path(__file__).parents[1]
FWD = "_cross_entropy_fwd_kernel"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
EVERY = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
CHUNKS = {"whole": None, "even": 4, "rest": 5, "one": 1}

both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(params=["kernels"] if torch.cuda.is_available() else ["kernels", "plain"])
def kernels(request, monkeypatch):
    """The kernels that run: none where the interpreter is turned off, which a CPU alone can."""
    if request.param == "plain":
        monkeypatch.setattr(runtime, "INTERPRETING", False)
        return ()
    return (FWD,)


def make(M=12, C=24, V=70, valid=None, dtype=torch.float32, device="cpu", bias=True):
    """Inputs of (3, M/3) tokens, every third of which is ignored, in the order of the arguments."""
    x = awkward(3, M // 3, C, dtype=dtype, device=device)
    weight = (awkward(V, C) / C**0.5).to(device, dtype)
    targets = torch.randint(valid or V, (3, M // 3), device=device)
    targets.view(-1)[1::3] = -100
    inputs = {"x": x, "weight": weight, "targets": targets}
    return {**inputs, "bias": awkward(V, dtype=dtype, device=device)} if bias else inputs


def positional(op):
    """`op` with the bias as its fourth argument, as `make` gives it."""
    return lambda x, weight, targets, bias=None, **options: op(
        x, weight, targets, bias=bias, **options
    )


OP, REF = positional(linear_cross_entropy), positional(linear_cross_entropy_ref)


def step(op, x, weight, targets, bias=None, upstream=None, **options):
    """(loss, gradients of x, weight and bias)."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    loss = op(leaves[0], leaves[1], targets, *leaves[2:], **options)
    upstream = torch.full_like(loss, 1.25) if upstream is None else upstream
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream)


# --- errors ---------------------------------------------------------------------------------------


@both_dtypes
@reductions
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_matches_reference(chunk, bias, reduction, dtype, kernels, device):
    inputs = make(dtype=dtype, device=device, bias=bias)
    options = {"chunk_tokens": chunk, "reduction": reduction}
    assert_kernel_parity(OP, REF, inputs, kernels=kernels, **options)


@both_dtypes
@reductions
@pytest.mark.parametrize("options", [EVERY, {"valid_vocab": 61}], ids=["every-option", "padded"])
def test_options_match_reference(options, reduction, dtype, kernels, device):
    inputs = make(valid=61, dtype=dtype, device=device)
    options = {**options, "chunk_tokens": 5, "reduction": reduction}
    assert_kernel_parity(OP, REF, inputs, kernels=kernels, **options)


@given(data=st.data())
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_matches_reference_at_any_shape(data, device):
    sizes = st.integers(1, 40)
    M, C, V = 3 * data.draw(st.integers(1, 8)), data.draw(sizes), data.draw(st.integers(2, 300))
    valid = data.draw(st.none() | st.integers(2, V))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    inputs = make(M, C, V, valid, dtype, device, bias=data.draw(st.booleans()))
    options = {
        "valid_vocab": valid,
        "chunk_tokens": data.draw(st.none() | sizes),
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.3])),
        "z_loss": data.draw(st.sampled_from([0.0, 1e-3])),
        "softcap": data.draw(st.none() | st.floats(0.5, 50)),
    }
    assert_kernel_parity(OP, REF, inputs, kernels=(FWD,), **options)


def test_parity_catches_one_percent(kernels, device):
    x, weight, targets, bias = make(device=device).values()
    assert_mutations_are_caught(
        lambda x, weight, bias: OP(x, weight, targets, bias, chunk_tokens=5),
        lambda x, weight, bias: REF(x, weight, targets, bias),
        {"x": x, "weight": weight, "bias": bias},
    )


@reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_weights_in_fp32(dtype, reduction, kernels, device):
    """Products in `dtype`, the sums that make the weight's gradient in fp32."""
    inputs = make(M=96, C=40, device=device)

    def under_autocast(f):
        def of(*tensors, **options):
            if tensors[0].dtype == torch.float64:  # the truth
                return f(*tensors, **options)
            with torch.autocast(device, dtype):
                return f(*tensors, **options)

        return of

    x, weight, targets, bias = inputs.values()
    with launches(*kernels), guarded():
        loss, dx, dweight, dbias = step(
            under_autocast(OP), x, weight, targets, bias, reduction=reduction, chunk_tokens=40
        )
    assert {t.dtype for t in (loss, dx, dweight, dbias)} == {torch.float32}
    truth = step(REF, *(t.double() if t.is_floating_point() else t for t in inputs.values()),
                 reduction=reduction)  # fmt: skip
    torchs = step(under_autocast(REF), *inputs.values(), reduction=reduction)
    for got, eager, true in zip((loss, dx, dweight, dbias), torchs, truth, strict=True):
        error, torch_error = ((a - true).norm() / true.norm() for a in (got, eager))
        assert error <= 1.5 * torch_error + 1e-6


def test_the_weights_gradient_adds_up_in_fp32(kernels, device):
    """16 chunks of which the first's gradient is far larger: bf16 would drop all the others."""
    x = torch.ones(16, 1, 4, device=device, dtype=torch.bfloat16)
    x[0] = 512.0
    weight = torch.zeros(8, 4, device=device, dtype=torch.bfloat16).float()
    targets = torch.zeros(16, 1, dtype=torch.int64, device=device)
    with launches(*kernels):
        _, _, dweight = step(OP, x, weight, targets, reduction="sum", chunk_tokens=1)
    # the softmax of 8 zeros is 1/8 each, less 1 for the target: exact in bf16
    want = torch.full((8, 4), (512 + 15) / 8, device=device)
    want[0] = -(512 + 15) * 7 / 8
    torch.testing.assert_close(dweight, want * 1.25, rtol=1e-6, atol=0)


# --- targets --------------------------------------------------------------------------------------


@reductions
def test_nothing_but_ignored_targets(reduction, kernels, device):
    x, weight, targets, bias = make(device=device).values()
    targets.fill_(-100)
    with launches(*kernels), guarded():
        loss, *grads = step(OP, x, weight, targets, bias, reduction=reduction, chunk_tokens=5)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    assert all((g == 0).all() for g in grads)


@reductions
def test_no_tokens(reduction, kernels, device):
    x = torch.empty(3, 0, 24, device=device)
    weight, bias = awkward(70, 24, device=device), awkward(70, device=device)
    targets = torch.empty(3, 0, dtype=torch.int64, device=device)
    loss, *grads = step(OP, x, weight, targets, bias, reduction=reduction)
    assert torch.equal(loss.isnan(), torch.full_like(loss, reduction == "mean").bool())
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("bad", [-1, 61, 2**40])
def test_impossible_targets_are_nan(bad, kernels, device):
    x, weight, targets, _ = make(valid=61, device=device).values()
    targets[1, 3] = bad
    with launches(*kernels), guarded():
        loss, dx, dweight = step(
            OP, x, weight, targets, reduction="none", valid_vocab=61, chunk_tokens=5
        )
    where = torch.zeros(3, 4, dtype=torch.bool, device=device)
    where[1, 3] = True
    assert torch.equal(loss.isnan(), where)
    assert torch.equal(dx.isnan().any(-1), where)
    assert dweight[:61].isnan().all()
    assert (dweight[61:] == 0).all()
    assert OP(x, weight, targets, valid_vocab=61).isnan()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_targets_of_any_alignment(dtype, kernels, device):
    x, weight, targets, bias = make(device=device).values()
    want = step(OP, x, weight, targets, bias, chunk_tokens=5)
    shifted = torch.cat((targets.new_zeros(1), targets.flatten())).to(dtype)[1:].view(3, 4)
    with launches(*kernels), guarded():
        got = step(OP, x, weight, shifted, bias, chunk_tokens=5)
    assert all(map(torch.equal, got, want))


# --- memory ---------------------------------------------------------------------------------------


def test_strides_do_not_matter(kernels, device):
    x, weight, targets, bias = make(device=device).values()
    want = step(OP, x.contiguous(), weight, targets, bias, chunk_tokens=5)
    for layout in (lambda t: t.mT.contiguous().mT, lambda t: t.repeat_interleave(2, -1)[..., ::2]):
        with launches(*kernels), guarded():
            got = step(OP, layout(x), layout(weight), targets, bias, chunk_tokens=5)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_logits_of_all_tokens_never_exist(kernels, device):
    x, weight, targets, _ = make(M=60, C=8, V=100, device=device).values()
    with guarded() as allocated:
        step(OP, x, weight, targets, chunk_tokens=10)
    shapes = [tuple(t.shape) for t in allocated]
    assert (10, 100) in shapes
    assert max(t.numel() for t in allocated) == 10 * 100
    assert shapes.count((10, 100)) == 1


@pytest.mark.parametrize(
    ("M", "dtype", "kind", "tokens", "chunks"),
    [
        (16_384, torch.bfloat16, "cuda", 4096, 4),
        (65_536, torch.bfloat16, "cuda", 4096, 16),
        (16_384, torch.float32, "cuda", 2048, 8),
        (5000, torch.bfloat16, "cuda", 2560, 2),  # and not 4096 and 904
        (100, torch.bfloat16, "cuda", 128, 1),
        (4096, torch.float32, "cpu", 256, 16),
        (4096, torch.bfloat16, "cpu", 256, 16),
    ],
)
def test_chunks_follow_from_a_budget(M, dtype, kind, tokens, chunks):
    got = tokens_at_a_time(M, 50_304, dtype, torch.device(kind), 0)
    assert (got, -(-M // got)) == (tokens, chunks)
    assert tokens_at_a_time(M, 50_304, dtype, torch.device(kind), 77) == 77
    assert tokens_at_a_time(M, 10**9, dtype, torch.device(kind), 0) == 1


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted", [("x",), ("weight",), ("bias",), ("x", "bias"), ()], ids="-".join
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_some_inputs(wanted, reduction, kernels, device):
    x, weight, targets, bias = make(device=device).values()
    leaves = {"x": x, "weight": weight, "bias": bias}
    every = {k: t.clone().requires_grad_() for k, t in leaves.items()}
    leaves = {k: t.clone().requires_grad_(k in wanted) for k, t in leaves.items()}
    for some in (leaves, every):
        with launches(*kernels):
            loss = OP(some["x"], some["weight"], targets, some["bias"], reduction=reduction).sum()
        assert loss.requires_grad == any(t.requires_grad for t in some.values())
        if loss.requires_grad:
            loss.backward()
    for k, t in leaves.items():
        assert torch.equal(t.grad, every[k].grad) if k in wanted else t.grad is None


def test_without_gradients_only_losses_are_computed(kernels, device, monkeypatch):
    x, weight, targets, bias = make(device=device).values()
    want = OP(x.requires_grad_(), weight.requires_grad_(), targets, bias)
    with torch.no_grad(), guarded() as allocated, launches(*kernels):
        got = OP(x, weight, targets, bias)
    assert torch.equal(got, want)
    assert all(t.shape not in (x.shape, (12, 24), weight.shape) for t in allocated)


@reductions
def test_a_second_backward_is_the_same(reduction, kernels, device):
    x, weight, targets, bias = make(device=device).values()
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    loss = OP(leaves[0], leaves[1], targets, leaves[2], reduction=reduction, chunk_tokens=5)
    upstream = awkward(*loss.shape, device=device)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    kept = [g.clone() for g in first]
    for _ in range(2):
        again = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
        for a, b, c in zip(again, first, kept, strict=True):
            assert torch.equal(b, c)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_raises(reduction, kernels, device):
    x, weight, targets, _ = make(device=device).values()
    leaf = x.detach().requires_grad_()
    loss = OP(leaf, weight, targets, reduction=reduction).square().sum()
    (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"once_diff|no double backward"):
        dx.sum().backward()


def test_tied_weights_add_up(kernels, device):
    _, weight, targets, _ = make(device=device).values()
    tokens = torch.randint(70, (3, 4), device=device)
    grads = []
    for op in (OP, REF):
        table = weight.detach().clone().requires_grad_()
        with launches(*kernels if op is OP else ()):
            op(torch.tanh(F.embedding(tokens, table)), table, targets, chunk_tokens=5).backward()
        grads.append(table.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_gradients_accumulate(kernels, device):
    """Four micro-steps of a quarter of the loss each, with a GradScaler's factor on top."""
    x, weight, targets, _ = make(M=24, device=device).values()
    grads = []
    for op in (OP, REF):
        leaf = weight.detach().clone().requires_grad_()
        for part in range(4):
            tokens = slice(2 * part, 2 * part + 2)
            loss = op(x[:, tokens], leaf, targets[:, tokens], chunk_tokens=4) / 4
            (loss * 1024).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_fp16_gradients_of_many_tokens_do_not_vanish(device, monkeypatch):
    """1 / 16384 of a probability of 1 / 1000 is the least fp16 has; the mean's factor waits."""
    monkeypatch.setattr(runtime, "INTERPRETING", False)  # for so many rows it is too slow
    M, V = 16_384, 1000
    x = torch.full((M, 1), 0.01, dtype=torch.float16, device=device)
    weight = torch.zeros(V, 1, dtype=torch.float16, device=device).float()
    targets = torch.zeros(M, dtype=torch.int64, device=device)
    _, _, dweight = step(OP, x, weight, targets)
    torch.testing.assert_close(
        dweight[1:], torch.full((V - 1, 1), 1.25 * 0.01 / V, device=device), rtol=3e-3, atol=0
    )


def test_checkpointing_gives_the_same_gradients(kernels, device):
    x, weight, targets, bias = make(device=device).values()

    def recomputed(*tensors):
        return checkpoint(OP, *tensors, use_reentrant=False)

    want = step(OP, x, weight, targets, bias)
    assert all(map(torch.equal, step(recomputed, x, weight, targets, bias), want))


def test_same_input_same_bits(kernels, device):
    x, weight, targets, bias = make(device=device).values()
    first = step(OP, x, weight, targets, bias, chunk_tokens=5)
    for _ in range(3):
        again = step(OP, x, weight, targets, bias, chunk_tokens=5)
        assert all(map(torch.equal, again, first))


RANK = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from fastgpt.kernels.cross_entropy.linear import linear_cross_entropy, linear_cross_entropy_ref

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")


class Head(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        torch.manual_seed(0)
        self.op, self.table = op, torch.nn.Embedding(50, 16)

    def forward(self, tokens, targets):  # tied
        return self.op(self.table(tokens).tanh(), self.table.weight, targets, chunk_tokens=5)


torch.manual_seed(1 + rank)
tokens, targets = torch.randint(50, (2, 3, 2, 8)), torch.randint(50, (2, 3, 2, 8))[1]
tokens = tokens[0]
targets[:, :, : 2 + 3 * rank] = -100
gradients = []
for op in (linear_cross_entropy, linear_cross_entropy_ref):
    head = DistributedDataParallel(Head(op))
    for i in range(3):
        head.require_backward_grad_sync = i == 2
        (head(tokens[i], targets[i]) / 3).backward()
    gradients.append(head.module.table.weight.grad)
torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
seen = [torch.empty_like(gradients[0]) for _ in range(2)]
dist.all_gather(seen, gradients[0])
assert torch.equal(*seen), "ranks differ"
assert gradients[0].abs().sum() > 0
dist.destroy_process_group()
"""


def test_under_ddp_with_accumulation_ranks_agree(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(errors)


# --- torch.compile and torch.library --------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "dynamic"), [("mean", None), ("mean", True), ("none", True)], ids=str
)
def test_compiles_to_one_node_and_never_again(reduction, dynamic, kernels, device):
    """With ignored rows, whose number differs from call to call."""

    def op(x, weight, targets, bias):
        return OP(x, weight, targets, bias, reduction=reduction, chunk_tokens=5, **EVERY)

    nodes = []

    def backend(graph, examples):
        nodes.append([n for n in graph.graph.nodes if "fastgpt" in str(n.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend=backend)
    graphs = []
    for M in (12, 15, 24, 30):
        x, weight, targets, bias = make(M, device=device).values()
        with launches(*kernels):
            got = step(compiled, x, weight, targets, bias)
        for a, b in zip(got, step(op, x, weight, targets, bias), strict=True):
            assert torch.equal(a, b)
        graphs.append(len(nodes))
    assert all(len(found) == 1 for found in nodes)
    # where it is not told, Dynamo learns that a size changes from the first change
    assert graphs[0 if dynamic else 2] == graphs[-1]


def test_compiles_under_autocast_and_without_gradients(kernels, device):
    x, weight, targets, bias = make(device=device).values()
    torch.compiler.reset()
    compiled = torch.compile(OP, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        got, want = (step(op, x, weight, targets, bias) for op in (compiled, OP))
        assert all(map(torch.equal, got, want))
        with torch.no_grad():
            assert torch.equal(compiled(x, weight, targets, bias), want[0])


@reductions
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(reduction, bias, device):
    x, weight, targets = list(make(valid=61, device=device).values())[:3]
    x = x.mT.contiguous().mT.requires_grad_()  # dense, permuted
    b = awkward(70, device=device).requires_grad_() if bias else None
    options = (61, -100, 0.1, 0.01, 3.0)
    early = reduction != "none"
    flags = (early, early, early and bias, torch.float32, 5)
    weight = weight.requires_grad_()
    opcheck(
        torch.ops.fastgpt.linear_cross_entropy.default,
        (x, weight, b, targets, *flags, reduction, False, *options),
    )
    x, weight = x.detach(), weight.detach()
    b = None if b is None else b.detach()
    if reduction == "none":
        arguments = (torch.ones(12, device=device), x, weight, b, targets,
                     True, True, bias, torch.float32, 5, *options)  # fmt: skip
        opcheck(torch.ops.fastgpt.linear_cross_entropy_again.default, arguments)
    else:
        one = torch.ones((), device=device)
        arguments = (one, one, x, weight, one[None], torch.bfloat16, torch.float32, torch.float16)
        opcheck(torch.ops.fastgpt.linear_cross_entropy_scaled.default, arguments)


def test_fake_tensors_need_no_kernel(device):
    with launches(), FakeTensorMode():
        x = torch.empty(4, 5, 24, dtype=torch.bfloat16, device=device, requires_grad=True)
        weight = torch.empty(70, 24, device=device, requires_grad=True)
        targets = torch.empty(4, 5, dtype=torch.int64, device=device)
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert (x.grad.shape, x.grad.dtype) == (x.shape, torch.bfloat16)
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.float32)


def test_it_is_the_cross_entropy_of_the_logits(kernels, device):
    x, weight, targets, bias = make(device=device).values()
    got = step(OP, x, weight, targets, bias, chunk_tokens=5, **EVERY)

    def apart(x, weight, targets, bias, **options):
        return cross_entropy(F.linear(x, weight, bias), targets, **options)

    for a, b in zip(got, step(apart, x, weight, targets, bias, **EVERY), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_where_no_kernel_runs_it_is_the_same_algorithm(monkeypatch):
    inputs = make(M=30)
    with launches(FWD):
        want = step(OP, *inputs.values(), chunk_tokens=7, **EVERY)
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    with launches():
        got = step(OP, *inputs.values(), chunk_tokens=7, **EVERY)
        assert_parity(OP, REF, inputs, chunk_tokens=7, **EVERY)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- bad arguments --------------------------------------------------------------------------------

X, W, T = torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.int64)
BAD = {
    "dtype": (X.double(), W, T, {}, "x: expected fp32, fp16 or bf16, got torch.float64"),
    "scalar": (torch.ones(()), W, T, {}, r"x: expected \(\.\.\., C\) with C >= 1, got \(\)"),
    "weight": (X, W[:, :4], T, {}, r"weight: expected \(V, 8\), got \(5, 4\)"),
    "weight-dtype": (X, W.double(), T, {}, "weight: expected fp32, .* got torch.float64"),
    "weight-device": (X, W.to("meta"), T, {}, "weight: expected cpu as x, got meta"),
    "bias": (X, W, T, {"bias": torch.ones(8)}, r"bias: expected \(5,\), got \(8,\)"),
    "bias-dtype": (X, W, T, {"bias": torch.ones(5).long()}, "bias: .* got torch.int64"),
    "targets": (X, W, T[:1], {}, r"targets: expected \(2,\), got \(1,\)"),
    "targets-dtype": (X, W, T.float(), {}, "targets: expected int32 or int64, got torch.float32"),
    "targets-device": (X, W, T.to("meta"), {}, "targets: expected cpu as x, got meta"),
    "chunk": (X, W, T, {"chunk_tokens": 0}, "chunk_tokens: expected 1 or more, or None, got 0"),
    "valid_vocab": (X, W, T, {"valid_vocab": 6}, "valid_vocab: expected 1 to 5 columns, got 6"),
    "reduction": (X, W, T, {"reduction": "avg"}, "reduction: expected one of mean, .* got 'avg'"),
}


@pytest.mark.parametrize(("x", "weight", "targets", "options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(x, weight, targets, options, message):
    with launches(), pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, weight, targets, **options)
