"""Tests specific to the losses; `test_conformance` checks every op."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from fastgpt.kernels import cross_entropy, linear_cross_entropy, runtime
from fastgpt.kernels.cross_entropy.chunks import chunk_on_gpu, rounds, tokens_at_a_time
from fastgpt.kernels.cross_entropy.linear import linear_cross_entropy_ref
from fastgpt.kernels.cross_entropy.op import cross_entropy_ref
from fastgpt.kernels.cross_entropy.spec import BWD, CROSS_ENTROPY, FWD, LINEAR_CROSS_ENTROPY
from tests.kernels import conformance
from tests.parity import LAYOUTS, awkward, forward_backward, guarded, launches

SCALE = "_cross_entropy_scale_kernel"
SPECS = {spec.name: conformance.careful(spec) for spec in (CROSS_ENTROPY, LINEAR_CROSS_ENTROPY)}
WITHOUT_KERNELS = {name: replace(x, launches=lambda problem: ()) for name, x in SPECS.items()}
LOSSES = {
    "apart": ("cross_entropy", {}),
    "in-place": ("cross_entropy", {"inplace_grad": True}),
    "head": ("linear_cross_entropy", {"chunk_tokens": 5}),
}
every_loss = pytest.mark.parametrize(("name", "options"), LOSSES.values(), ids=LOSSES)
in_place = pytest.mark.parametrize("inplace", [False, True], ids=["apart", "in-place"])
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture
def plain(monkeypatch):
    """Turns Triton's interpreter off, so that CPU tensors take the plain PyTorch path."""
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    monkeypatch.setattr(runtime, "_fake_device", None)


@pytest.fixture(params=["kernels"] if torch.cuda.is_available() else ["kernels", "plain"])
def kernels(request):
    """Runs a test with and without kernels; returns the names of those that must be launched."""
    if request.param == "plain":
        request.getfixturevalue("plain")
        return ()
    return (FWD,)


def make(name, device, dtype=torch.float32, **problem):
    """Makes inputs of a loss by name; logits of 6 rows by default."""
    problem = {"M": 6, "C": 24, "V": 40, **problem}
    return conformance.make_inputs(SPECS[name], problem, device, dtype)


def head(device, **problem):
    """Makes x, weight, targets and a bias for 12 tokens, some of them ignored."""
    chosen = {"M": (3, 4), "V": 70, "ignored": True, "bias": True, **problem}
    return make("linear_cross_entropy", device, **chosen).values()


def step(name, tensors, **options):
    """Returns [loss, gradients of floating inputs]."""
    return forward_backward(partial(SPECS[name].op, **options), tensors)


linear_step = partial(step, "linear_cross_entropy")


@pytest.mark.parametrize("name", SPECS)
def test_reference_is_pytorchs_own(name):
    for problem in SPECS[name].problems.values():
        if problem["V"] <= 1030:  # more columns reach no other branch of it
            conformance.the_reference_is_pytorchs_own(SPECS[name], problem, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_parity_where_no_kernel_runs(name, dtype, plain):
    for problem in SPECS[name].problems.values():
        if problem["V"] <= 70:
            conformance.parity(WITHOUT_KERNELS[name], problem, "cpu", dtype)


@pytest.mark.parametrize("check", conformance.checks(LINEAR_CROSS_ENTROPY))
def test_the_head_conforms_where_no_kernel_runs(check, plain):
    check(WITHOUT_KERNELS["linear_cross_entropy"], LINEAR_CROSS_ENTROPY.first, "cpu")


@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
@conformance.examples(max_examples=20)
def test_any_shape(name, data, device):
    def one_of(*values):
        return data.draw(st.sampled_from(values))

    V, number = data.draw(st.integers(2, 600)), st.integers(1, 40)
    # With few tokens and smooth targets, a width of 1 or logits far beyond the cap a whole gradient
    # may cancel. Its error is then that of the terms, which the rule does not see: it asks for
    # digits of the result.
    few = V < 64
    problem = {
        "M": data.draw(conformance.sizes(1, 2, 5)),
        "V": V,
        "ignored": True,
        "valid_vocab": V if few else data.draw(st.integers(64, V)),
        "reduction": one_of("mean", "sum", "none"),
        "label_smoothing": 0.0 if few else one_of(0.0, 0.3, 1.0),
        "z_loss": one_of(0.0, 1e-3, 0.5),
        "softcap": data.draw(st.none() | st.floats(10, 50)),
        "ignore_index": one_of(-100, 1),
    }
    if name == "cross_entropy":
        problem["inplace_grad"] = one_of(False, True)
    else:
        problem |= {
            "C": data.draw(st.integers(8, 40)),
            "chunk_tokens": data.draw(st.none() | number),
        }
        problem["bias"] = one_of(False, True)
    conformance.parity(SPECS[name], problem, device, data.draw(conformance.ANY_DTYPE))


@in_place
@pytest.mark.parametrize(
    ("factor", "shift", "options"),
    [(1.0, 1e4, {"label_smoothing": 0.1}), (0.01, 0.0, {"softcap": 100.0})],
    ids=["far-from-0", "far-below-the-cap"],
)
def test_no_digits_are_lost(factor, shift, options, inplace, device):
    """One fp32 log-sum-exp loses those of logits near 10,000, exponentials those of a tanh."""
    inputs = make("cross_entropy", device, V=300, ignored=True)
    inputs["logits"] = inputs["logits"] * factor + shift
    op = partial(SPECS["cross_entropy"].op, inplace_grad=inplace)
    conformance.assert_kernel_parity(op, cross_entropy_ref, inputs, (FWD,), **options)


@every_loss
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_targets_of_any_alignment_and_stride(name, options, dtype, kernels, device):
    inputs = make(name, device, ignored=True)
    want = step(name, inputs.values(), **options)
    targets = inputs["targets"].to(dtype)
    shifted = torch.cat((targets.new_zeros(1), targets))[1:]
    for moved in (shifted, targets.repeat_interleave(2)[::2]):
        with launches(*kernels), guarded():
            got = step(name, {**inputs, "targets": moved}.values(), **options)
        assert all(map(torch.equal, got, want))


@every_loss
@pytest.mark.parametrize("bad", [-1, 37, 2**31, -(2**40)])
def test_impossible_targets_are_nan_and_read_nothing(name, options, bad, kernels, device):
    inputs, options = make(name, device, valid_vocab=37), {**options, "valid_vocab": 37}
    want = step(name, inputs.values(), reduction="none", **options)
    inputs["targets"][2] = bad
    with launches(*kernels), guarded():
        got = step(name, inputs.values(), reduction="none", **options)
    others = torch.arange(6, device=device) != 2
    for a, b in zip(got[:2], want[:2], strict=True):  # losses, and the gradient by rows
        assert torch.equal(a[others], b[others])
        assert a[2].isnan().any()
    of_columns = got[1][2] if name == "cross_entropy" else got[2]
    assert of_columns[:37].isnan().all()
    assert (of_columns[37:] == 0).all()
    loss, gradient, *_ = step(name, inputs.values(), **options)
    assert loss.isnan()
    assert torch.equal(gradient.isnan(), got[1].isnan())


@every_loss
@reductions
def test_nothing_but_ignored_targets(name, options, reduction, kernels, device):
    inputs = make(name, device)
    inputs["targets"].fill_(-100)
    if name == "cross_entropy" and (kernels or options):
        inputs["logits"][2] = math.nan  # not even read
    with launches(*kernels), guarded():
        loss, *gradients = step(name, inputs.values(), reduction=reduction, **options)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


@in_place
def test_what_is_not_finite_stays_in_its_row(inplace, device):
    logits, targets = make("cross_entropy", device, V=300).values()
    options = {"reduction": "none", "inplace_grad": inplace}
    want = step("cross_entropy", [logits, targets], **options)
    logits[1, 7], logits[2, 8], logits[4] = math.inf, math.nan, -math.inf
    got = step("cross_entropy", [logits, targets], **options)
    bad = torch.tensor([False, True, True, False, True, False], device=device)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[~bad], b[~bad])
    assert got[0][bad].isnan().all()


@every_loss
@pytest.mark.parametrize(("reduction", "smoothing"), [("sum", 0.0), ("none", 0.6)])
@pytest.mark.parametrize("low", [-math.inf, -3e38])
@pytest.mark.parametrize("columns", [slice(3, 6), slice(None)], ids=["some", "all"])
def test_lowest_logits(columns, low, smoothing, reduction, name, options, kernels, device):
    inputs = make(name, device, bias=True)
    if name == "cross_entropy":
        inputs["logits"][:, columns] = low
    else:
        inputs["weight"][columns], inputs["bias"][columns] = 0.0, low
    inputs["targets"][:4] = torch.tensor([3, 0, 4, 7])  # the first and third are low
    asked = {"label_smoothing": smoothing, "reduction": reduction}
    true = [t.double() if t.is_floating_point() else t for t in inputs.values()]
    want = forward_backward(partial(SPECS[name].eager, **asked), true)
    got = step(name, inputs.values(), **asked, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


@reductions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradient_takes_the_place_of_the_logits(reduction, dtype, kernels, device):
    inputs = make("cross_entropy", device, dtype, M=(3, 4), V=70, ignored=True)
    logits, targets = conformance.plain(inputs)
    upstream = torch.full((3, 4) if reduction == "none" else (), 1.25, device=device)
    apart = partial(cross_entropy, reduction=reduction)
    want = forward_backward(apart, [logits, targets], [upstream])
    early = reduction != "none" and dtype != torch.float16
    leaf = logits.clone().requires_grad_()
    loss = apart(leaf, targets, inplace_grad=True)
    with launches(*(kernels and (SCALE if early else BWD,))), guarded() as allocated:
        (gradient,) = torch.autograd.grad(loss, leaf, upstream)
    if kernels:
        assert allocated == []
    assert gradient.data_ptr() == leaf.data_ptr()
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close([loss, gradient], want, rtol=tolerance, atol=1e-7)


def test_rows_in_place_may_be_far_apart(device):
    logits, targets = make("cross_entropy", device, torch.bfloat16, M=3).values()
    upstream = [torch.ones((), device=device)]
    want = forward_backward(cross_entropy, [logits, targets], upstream)
    far = [conformance.far_apart(logits), targets]
    with launches(FWD, SCALE):
        got = forward_backward(partial(cross_entropy, inplace_grad=True), far, upstream)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=0.01, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_in_place_raises(reduction, kernels, device):
    logits, targets = make("cross_entropy", device).values()
    y = logits.requires_grad_() * 1
    loss = cross_entropy(y, targets, reduction=reduction, inplace_grad=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_grad: no second backward"):
        loss.backward()


@pytest.mark.parametrize("who", ["another", "the loss"])
def test_who_saved_logits_that_changed_is_told(who, device):
    logits, targets = make("cross_entropy", device).values()
    y = logits.requires_grad_() * 1
    loss = y.square().sum()
    ours = cross_entropy(y, targets, inplace_grad=True)
    if who == "the loss":
        loss = ours
        with torch.no_grad():
            y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_stay_where_no_gradient_is_wanted(device):
    logits, targets = make("cross_entropy", device).values()
    before = logits.clone()
    loss = cross_entropy(logits, targets, inplace_grad=True)
    with torch.no_grad():
        again = cross_entropy(logits.requires_grad_(), targets, inplace_grad=True)
    assert torch.equal(logits, before)
    assert torch.equal(loss, again)


@pytest.mark.parametrize("M", [4, (2, 3, 5)], ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS)[:-1])
def test_logits_that_would_be_copied_are_refused(layout, M, device):
    logits, targets = make("cross_entropy", device, M=M).values()
    leaf = LAYOUTS[layout](logits).requires_grad_()
    with launches(), pytest.raises(ValueError, match="logits: with inplace_grad expected rows"):
        cross_entropy(leaf, targets, inplace_grad=True)


@reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_weights_in_fp32(dtype, reduction, kernels, device):
    """Under autocast, fp32 weights get gradients from products in `dtype`, summed in fp32."""
    tensors = list(head(device, M=(3, 32), C=40))
    options = {"reduction": reduction, "chunk_tokens": 40}
    reference = partial(linear_cross_entropy_ref, **options)
    true = [t.double() if t.is_floating_point() else t for t in tensors]
    upstream = awkward(*((3, 32) if reduction == "none" else ()), device=device)
    truth = forward_backward(reference, true, [upstream.double()])
    with torch.autocast(device, dtype):
        with launches(*kernels), guarded():
            got = forward_backward(partial(linear_cross_entropy, **options), tensors, [upstream])
        eager = forward_backward(reference, tensors, [upstream])
    for a, b, c in zip(got, eager, truth, strict=True):
        assert a.dtype == torch.float32
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-6 * c.norm()


def test_the_weights_gradient_adds_up_in_fp32(kernels, device):
    """The weight's gradient is summed in fp32: bf16 would drop chunks beside a larger one."""
    x = torch.ones(16, 4, device=device, dtype=torch.bfloat16)
    x[0] = 512.0
    weight = torch.zeros(8, 4, device=device)
    targets = torch.zeros(16, dtype=torch.int64, device=device)
    loss = partial(linear_cross_entropy, reduction="sum", chunk_tokens=1)
    with launches(*kernels):
        dweight = forward_backward(loss, [x, weight, targets], [torch.ones((), device=device)])[2]
    # the softmax of 8 zeros is 1/8 each, less 1 for the target: exact in bf16
    want = torch.full((8, 4), (512 + 15) / 8, device=device)
    want[0] = -(512 + 15) * 7 / 8
    torch.testing.assert_close(dweight, want, rtol=1e-6, atol=0)


def test_fp16_gradients_of_many_tokens_do_not_vanish(device, plain):
    """1 / 16384 of a probability of 1 / 1000 is fp16's least number: the factor comes last."""
    M, V = 16_384, 1000
    x = torch.full((M, 1), 0.01, dtype=torch.float16, device=device)
    weight = torch.zeros(V, 1, device=device)
    targets = torch.zeros(M, dtype=torch.int64, device=device)
    upstream = [torch.ones((), device=device)]
    dweight = forward_backward(linear_cross_entropy, [x, weight, targets], upstream)[2]
    want = torch.full((V - 1, 1), 0.01 / V, device=device)
    torch.testing.assert_close(dweight[1:], want, rtol=3e-3, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(layout, kernels, device):
    x, weight, *others = head(device)
    moved = {"x": layout(x), "weight": layout(weight)}
    want = linear_step([*conformance.plain(moved), *others], chunk_tokens=5)
    with launches(*kernels), guarded():
        got = linear_step([*moved.values(), *others], chunk_tokens=5)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_logits_of_all_tokens_never_exist(kernels, device):
    tensors = head(device, M=60, C=8, V=100)
    with guarded() as allocated:
        linear_step(tensors, chunk_tokens=10)
    assert [t.shape for t in allocated if t.numel() >= 10 * 100] == [(10, 100)]


@pytest.mark.parametrize("wanted", [True, False], ids=["no-grad", "nothing-requires-grad"])
def test_without_gradients_only_losses_are_computed(wanted, kernels, device):
    tensors = list(head(device))
    want = linear_step(tensors)[0]
    leaves = [t.requires_grad_(wanted and t.is_floating_point()) for t in tensors]
    with torch.set_grad_enabled(not wanted), guarded() as allocated, launches(*kernels):
        got = linear_cross_entropy(*leaves)
    assert torch.equal(got, want)
    assert not got.requires_grad
    gradients = {t.shape for t in tensors[:2]}
    assert all(t.shape not in gradients for t in allocated)


@reductions
def test_a_second_backward_is_the_same(reduction, kernels, device):
    x, weight, targets, bias = head(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk_tokens=5)
    upstream = awkward(*loss.shape, device=device)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    kept = [g.clone() for g in first]
    for _ in range(2):
        again = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
        assert all(map(torch.equal, first, kept))
        torch.testing.assert_close(again, first, rtol=1e-5, atol=1e-7)


def test_compiled_under_autocast_of_several_dtypes_and_without_gradients(kernels, device):
    x, weight, targets, bias = head(device)
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for tensors in ([x, weight, targets, bias], [x.half(), weight, targets, bias.bfloat16()]):
        with torch.autocast(device, torch.bfloat16):
            got, want = (forward_backward(op, tensors) for op in (compiled, linear_cross_entropy))
            assert [t.dtype for t in got] == [t.dtype for t in want]
            assert all(map(torch.equal, got, want))
            with torch.no_grad():
                assert torch.equal(compiled(*tensors), want[0])


V, C = 50_304, 768


@pytest.mark.parametrize(
    ("M", "asked", "columns", "tokens"),
    [(4096, 0, V, 256), (300, 0, V, 256), (4096, 77, V, 77), (4096, 0, 10**9, 1)],
)
def test_chunks_on_a_cpu_follow_from_a_budget(M, asked, columns, tokens):
    x, weight = (torch.empty(1, C).expand(rows, C) for rows in (M, columns))
    assert tokens_at_a_time(x, weight, asked) == tokens


@pytest.mark.parametrize(
    ("M", "most", "processors", "tokens"),
    [
        (65_536, 16_862, 132, 16_768),  # H100, bf16
        (16_384, 16_862, 132, 16_384),
        (65_536, 5760, 132, 5632),  # 132 tiles of x's gradient, where 4096 tokens have 96
        (5000, 5760, 132, 5120),
        (100, 5760, 132, 128),
    ],
)
def test_chunks_on_a_gpu_fill_its_multiprocessors(M, most, processors, tokens):
    assert chunk_on_gpu(M, V, C, most, processors) == tokens


@pytest.mark.parametrize(("columns", "tokens"), [(V, 16_384), (10**9, 1)])
def test_chunks_on_a_gpu_take_a_share_of_its_memory(columns, tokens):
    with runtime.recording(90), FakeTensorMode():  # as if on an H100
        x = torch.empty(16_384, C, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(columns, C, device="cuda")
        assert tokens_at_a_time(x, weight, 0) == tokens


def test_rounds_count_the_waves_of_three_products():
    # 4 x 1, 4 x 2 and 1 x 2 tiles of 128 x 256 on 4 multiprocessors; then half as many rows
    assert rounds(512, 512, 256, 512, processors=4) == 1 * 512 + 2 * 256 + 1 * 512
    assert rounds(768, 512, 256, 512, processors=4) == 1536 + 1 * 512 + 1 * 256 + 1 * 256
