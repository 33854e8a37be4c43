"""Every op on a GPU, at realistic sizes; the checks are made from its `Spec`.

`tests/kernels/test_conformance.py` runs on CUDA as well; this file has the checks that need a GPU.
Without one the tests are skipped with the reason.
"""

import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from bench.measure import Checker
from bench.ops import cases
from fastgpt import kernels
from fastgpt.kernels.attention.spec import DKV, DQ, FWD, options
from fastgpt.kernels.attention.spec import problem as attention
from fastgpt.kernels.decode_attention.spec import DECODE_ATTENTION
from fastgpt.kernels.decode_attention.spec import problem as decode
from fastgpt.kernels.rotary.spec import shape as rotary
from fastgpt.kernels.specs import SPECS
from tests.conftest import SIMULATED
from tests.kernels.conformance import DTYPES, apart, careful, make_inputs, parity, run
from tests.kernels.cuda.proof import assert_nothing_waits, captured, fitting
from tests.parity import awkward, launches, several
from tests.processes import ended

pytestmark = pytest.mark.gpu
KERNELS = [name for name, spec in SPECS.items() if spec.sizes["cuda"]]
every_op = pytest.mark.parametrize("name", KERNELS)


def step_of(name, problem, dtype=torch.bfloat16):
    """Returns (contiguous inputs, a function that computes their outputs and gradients)."""
    spec = SPECS[name]

    def make(*sizes, below=0):
        if below:
            return torch.randint(below, sizes, device="cuda")
        return awkward(*sizes, dtype=dtype, device="cuda")

    made = spec.inputs(problem, make)
    # a copy is aligned, also of a single row: an unaligned tensor needs another form of a kernel
    inputs = [x.clone(memory_format=torch.contiguous_format) for x in made.values()]
    for x in inputs:
        x.requires_grad_(spec.differentiable and x.is_floating_point())
    op, over = spec.call(spec.op, problem, "cuda"), problem.get("inplace_grad")
    upstream = []

    def step():
        # an op may write over an input, which must not be a leaf
        outputs = several(op(*(x * 1 if over else x for x in inputs)))
        if not spec.differentiable:
            return outputs
        if not upstream:
            upstream.extend(awkward(*y.shape, dtype=y.dtype, device="cuda") for y in outputs)
        wanted = [x for x in inputs if x.requires_grad]
        return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]

    return inputs, step


def small(name):
    """Returns problems that reach each branch of an op."""
    return [SPECS[name].problems[label] for label in SPECS[name].structural]


def typical(name):
    return fitting(next(iter(SPECS[name].sizes["cuda"].values())))


CASES = cases("cuda", tuple(KERNELS), dtype=("bf16", "fp16", "fp32"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_keep_the_rule_beside_pytorchs_own(case):
    case = replace(case, shape=fitting(case.shape))
    with launches(*case.spec.launches(case.shape)):
        wrong, _ = Checker(case, "cuda").complaints(case.implementations()["ours"]("cuda"))
    assert wrong == []


# Tiles of every head dimension at lengths that fill a GPU, and the masks that change a tile.
ATTENTION = {
    "odd-length": attention(3, 1000, 12, 64),
    "d128-grouped": attention(2, 2048, 16, 128, K=4),
    "d256": attention(1, 1024, 8, 256),
    "d32": attention(4, 1024, 8, 32),
    "d16": attention(4, 1024, 8, 16),
    "d80": attention(2, 512, 8, 80),
    "d96": attention(2, 512, 8, 96),
}
MASKS = {"window": 256}, {"window": 100, "docs": 300}, {"docs": 300, "causal": False}
ATTENTION |= {f"{name}-full": {**s, "causal": False} for name, s in ATTENTION.items()}
ATTENTION |= {f"d{D} {m}": attention(4, 1024, 6, D, K=2, **m) for D in (64, 128) for m in MASKS}
DECODE = {
    "gpt2-one-sequence": decode(16_384, 12, 64, (16_384,)),
    "gpt2-batch": decode(1024, 12, 64, (1024, 1000, 1, 513, 7, 64, 65, 0)),
    "grouped-128": decode(8192, 32, 128, (8192, 5000), K=8),
    "grouped-128-paged": decode(8192, 32, 128, (8192, 5000), K=8, page=16),
    "four-new-paged": decode(4096, 32, 128, (4096, 77, 1024), Tq=4, K=4, page=64),
    "d256": decode(2048, 8, 256, (2048, 99), Tq=2, K=1),
    "d80": decode(2048, 8, 80, (2048, 99), page=16),
}
ROTARY = [(2, 4096, 16, 4, 128), (1, 1001, 25, 5, 64), (3, 65, 3, 1, 80), (2, 200, 8, 8, 256)]
PADDED = {"M": 512, "V": 50_304, "valid_vocab": 50_257, "ignored": True}
LOSSES = [
    ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}),
    ("cross_entropy", {"inplace_grad": True}),
    ("linear_cross_entropy", {"C": 64}),
    ("linear_cross_entropy", {"C": 64, "chunk_tokens": 200}),
]
REAL = [
    *(("attention", label, s) for label, s in ATTENTION.items()),
    *(("decode_attention", label, s) for label, s in DECODE.items()),
    *(("rotary", str(sizes), rotary(*sizes)) for sizes in ROTARY),
    *((name, "narrow", {"M": 100_001, "N": 64}) for name in SPECS if name.endswith("_norm")),
    *(
        (name, f"{options} {reduction}", {**PADDED, **options, "reduction": reduction})
        for name, options in LOSSES
        for reduction in ("mean", "none")
    ),
]
IDS = [f"{name} {label}" for name, label, _ in REAL]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "label", "problem"), REAL, ids=IDS)
def test_errors_at_real_sizes(name, label, problem, dtype):
    parity(careful(SPECS[name]), fitting(problem), "cuda", DTYPES[dtype])


@every_op
def test_a_thousand_steps_give_the_same_bits(name):
    _, step = step_of(name, typical(name))
    first = step()
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(3 if SIMULATED else 1000):
        for a, b in zip(first, step(), strict=True):
            differs |= (a != b).any()
    assert not differs


@every_op
def test_nothing_waits_for_the_device(name):
    for problem in (typical(name), *small(name)):
        assert_nothing_waits(step_of(name, problem)[1], *SPECS[name].launches(problem))


@every_op
def test_a_captured_graph_replays_with_new_inputs(name):
    inputs, step = step_of(name, typical(name))
    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for x in inputs:
                if x.is_floating_point():
                    x.copy_(awkward(*x.shape).to(x))
        graph.replay()
        assert all(map(torch.equal, results, step()))


@every_op
def test_kernels_run_on_the_current_stream_after_work_queued_before(name):
    inputs, step = step_of(name, typical(name))
    step()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            inputs[0].mul_(-1)
        after = step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, after, step()))


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_tensors(name):
    spec, problem = SPECS[name], SPECS[name].first
    inputs = [x.detach().to("cuda:1") for x in step_of(name, problem)[0]]
    op = spec.call(spec.op, problem, "cuda:1")
    got = run(spec, op, inputs)
    with torch.cuda.device(1):
        assert all(map(torch.equal, got, run(spec, op, inputs)))


@every_op
def test_compiled_by_inductor_it_is_the_same(name):
    spec = careful(SPECS[name])
    for problem in small(name):
        torch.compiler.reset()
        for change in spec.changes.growing:
            grown = {**problem, **change}
            inputs, _ = step_of(name, grown)
            with launches(*spec.launches(grown)):
                compiled = torch.compile(spec.call(spec.op, grown, "cuda"), fullgraph=True)
                got = run(spec, compiled, inputs)
            eager = spec.call(partial(apart, spec), grown, "cuda")
            assert all(map(torch.equal, got, run(spec, eager, inputs)))


def test_the_mask_is_that_of_the_cpu():
    mask = kernels.attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1)
    assert torch.equal(
        mask, kernels.attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1, "cuda").cpu()
    )


def gpt2():
    return [torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_autocast_does_not_round_the_gradients_of_weights(dtype, bias):
    x, dy = (torch.randn(4, 32, n, device="cuda") for n in (48, 80))
    weight, offset = (torch.randn(size, device="cuda") for size in ((80, 48), (80,)))
    inputs = [t.requires_grad_() for t in ((x, weight, offset) if bias else (x, weight))]
    with torch.autocast("cuda", dtype):
        y = kernels.linear(*inputs)
        plain = F.linear(*inputs)
    assert torch.equal(y, plain)
    assert y.dtype == dtype
    y.backward(dy.to(dtype))
    rounded, upstream = (t.detach().to(dtype).double() for t in (x, dy))
    rows, upstream = rounded.flatten(0, 1), upstream.flatten(0, 1)
    of_x = (upstream @ weight.detach().to(dtype).double()).to(dtype).view_as(x)
    for t, gradient in zip(inputs, (of_x, upstream.T @ rows, upstream.sum(0))):
        assert t.grad.dtype == torch.float32
        bound = 2e-2 if t is x else 1e-4  # of x it is rounded, as ever
        torch.testing.assert_close(t.grad.double(), gradient.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_and_documents_wait_for_nothing(seed):
    inputs = [x.requires_grad_() for x in gpt2()]
    more = options(attention(2, 256, 4, 64, docs=100), "cuda") | {"dropout_seed": seed}

    def step():
        out = kernels.attention(*inputs, dropout_p=0.1, **more)
        return torch.autograd.grad(out, inputs, out.detach())

    assert_nothing_waits(step, FWD, DQ, DKV)


def test_each_replay_draws_its_own_mask():
    inputs = gpt2()
    graph, (out,) = captured(lambda: [kernels.attention(*inputs, dropout_p=0.3)])
    masked = []
    for _ in range(2):
        graph.replay()
        masked.append(out.clone())
    assert not torch.equal(*masked)


def test_a_captured_graph_of_decode_attention_serves_other_lengths():
    s = decode(2048, 8, 64, (2048,) * 3, K=2)
    inputs = make_inputs(DECODE_ATTENTION, s, "cuda", torch.bfloat16).values()
    *_, lengths = inputs
    graph, (out,) = captured(lambda: [kernels.decode_attention(*inputs)])
    for new in ([2048, 1, 0], [5, 700, 2047]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, kernels.decode_attention(*inputs))


@pytest.mark.skipif(SIMULATED, reason="products of GPT-2's head take hours on a simulated GPU")
def test_peak_memory_of_the_head_is_a_chunk_and_the_gradients():
    """GPT-2's head at 16,384 tokens, every third target ignored."""
    V, valid = 50_304, 50_257
    x = awkward(16_384, 768, device="cuda").contiguous().bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(V, 768, device="cuda")).requires_grad_()
    targets = torch.randint(valid, (16_384,), device="cuda")
    targets[1::3] = -100
    for _ in range(2):  # the first call compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = kernels.linear_cross_entropy(x, weight, targets, valid_vocab=valid)
        torch.autograd.grad(loss, (x, weight))
    assert torch.cuda.max_memory_allocated() - before < 0.9e9


SCRIPT = """
import sys
import torch
from fastgpt.kernels.specs import SPECS
from tests.kernels import conformance

spec = SPECS[sys.argv[1]]
for problem in spec.problems.values():
    inputs = conformance.make_inputs(spec, problem, "cuda", torch.float16)
    conformance.run(spec, spec.call(spec.op, problem, "cuda"), conformance.plain(inputs))
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.random])
def test_compute_sanitizer_finds_nothing(name, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit on PATH")
    check = (sanitizer, "--tool", tool, "--error-exitcode", "9")
    # each buffer an allocation of its own: what is read beyond it is seen
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = ended(*check, sys.executable, "-c", SCRIPT, name, timeout=None, **alone)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
