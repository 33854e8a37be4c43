"""Cross-entropy; on a CPU the kernels run in Triton's interpreter, on CUDA as they are."""

import json
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fastgpt.kernels import cross_entropy, runtime
from fastgpt.kernels.cross_entropy.op import cross_entropy_ref
from tests.parity import assert_parity, awkward
from tests.proof import (
    LAYOUTS,
    assert_compiles_once,
    assert_kernel_parity,
    assert_mutations_are_caught,
    guarded,
    launches,
    printed_by,
)

FWD, BWD = "_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel"
SCALE = "_cross_entropy_scale_kernel"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
EVERY = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
OPTIONS = {
    "plain": {},
    "label-smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "every-option": EVERY,
}

both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
all_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def make(*shape, valid=None, dtype=torch.float32, device="cpu", ignored=True):
    """Logits of `shape` and targets, of which every third is ignored."""
    logits = awkward(*shape, dtype=dtype, device=device)
    targets = torch.randint(valid or shape[-1], shape[:-1], device=device)
    if ignored:
        targets.view(-1)[1::3] = -100
    return {"logits": logits, "targets": targets}


def over_the_logits(logits, targets, **options):
    """With `inplace_grad`, of a copy: what the caller has is needed again."""
    return cross_entropy(logits.clone(), targets, **options, inplace_grad=True)


def step(op, logits, targets, upstream=None, **options):
    """(loss, gradient of the logits)."""
    leaf = logits.detach().requires_grad_()
    loss = op(leaf, targets, **options)
    if upstream is None:
        upstream = torch.full_like(loss, 1.25)
    return loss.detach(), *torch.autograd.grad(loss, leaf, upstream)


# --- the reference --------------------------------------------------------------------------------


@reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_reference_is_torchs_own_in_fp64(reduction, smoothing, ignore_index):
    logits, targets = make(4, 5, 12, dtype=torch.float64).values()
    targets = torch.where(targets == -100, ignore_index, targets)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    upstream = awkward(4, 5).double() if reduction == "none" else torch.tensor(1.5).double()

    def torchs(logits, targets, **options):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
        return loss.view(targets.shape) if reduction == "none" else loss

    got = step(cross_entropy_ref, logits, targets, upstream, **options)
    want = step(torchs, logits, targets, upstream, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_reference_of_what_torch_has_not():
    logits, targets = make(20, 12, valid=9, dtype=torch.float64).values()
    cut, kept = logits[:, :9], targets != -100
    squared = cut.logsumexp(-1).square()[kept].mean()
    capped = 2.0 * (cut / 2.0).tanh()
    plain = F.cross_entropy(cut, targets)
    for options, want in (
        ({}, plain),
        ({"z_loss": 0.3}, plain + 0.3 * squared),
        ({"softcap": 2.0}, F.cross_entropy(capped, targets)),
    ):
        got = cross_entropy_ref(logits, targets, valid_vocab=9, **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# --- errors ---------------------------------------------------------------------------------------

SHAPES = {
    "one-element-left-over": (3, 5, 33),
    "one-lane-left-over": (7, 1025),
    "bytes": (9, 256),
    "rows-in-parts": (2, 8200),
    "rows-in-parts-of-another-size": (2, 2, 16_500),
}


@both_dtypes
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cross_entropy_matches_reference(shape, reduction, dtype, device):
    inputs = make(*shape, dtype=dtype, device=device)
    assert_kernel_parity(
        cross_entropy, cross_entropy_ref, inputs, kernels=(FWD, BWD), reduction=reduction
    )


@both_dtypes
@reductions
@all_options
def test_options_match_reference(options, reduction, dtype, device):
    valid = {"mean": 1000, "sum": None, "none": 1030}[reduction]
    inputs = make(5, 1030, valid=valid, dtype=dtype, device=device)
    options = {**options, "valid_vocab": valid, "reduction": reduction}
    assert_kernel_parity(cross_entropy, cross_entropy_ref, inputs, kernels=(FWD, BWD), **options)
    early = reduction != "none" and dtype != torch.float16
    kernels = (FWD, SCALE) if early else (FWD, BWD)
    assert_kernel_parity(over_the_logits, cross_entropy_ref, inputs, kernels=kernels, **options)


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_cross_entropy_matches_reference_at_any_shape(data, device):
    V = data.draw(st.integers(2, 600))
    valid = data.draw(st.none() | st.integers(2, V))
    shape = (*data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)), V)
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    inputs = make(*shape, valid=valid, dtype=dtype, device=device)
    options = {
        "valid_vocab": valid,
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        "z_loss": data.draw(st.sampled_from([0.0, 1e-3, 0.5])),
        "softcap": data.draw(st.none() | st.floats(0.5, 50)),
        "ignore_index": data.draw(st.sampled_from([-100, 1])),
    }
    op = data.draw(st.sampled_from([cross_entropy, over_the_logits]))
    if options["ignore_index"] == 1:
        inputs["targets"].clamp_(min=0)
        inputs["targets"].view(-1)[0] = 0  # one that counts
    assert_kernel_parity(op, cross_entropy_ref, inputs, kernels=(FWD,), **options)


def test_bf16_logits(device):
    inputs = make(6, 700, dtype=torch.bfloat16, device=device)
    for op, kernel in ((cross_entropy, BWD), (over_the_logits, SCALE)):
        assert_kernel_parity(op, cross_entropy_ref, inputs, kernels=(FWD, kernel), **EVERY)


def test_logits_of_ten_thousand_lose_nothing(device):
    """The log-sum-exp as one fp32 number would be off by 5e-4, and so would every probability."""
    inputs = make(6, 300, device=device)
    inputs["logits"] = inputs["logits"] + 1e4
    for op in (cross_entropy, over_the_logits):
        assert_kernel_parity(op, cross_entropy_ref, inputs, kernels=(FWD,), label_smoothing=0.1)


def test_a_cap_far_above_the_logits_changes_little(device):
    """tanh near 0 from exponentials alone would be off by 1e-4 of the logit."""
    inputs = make(6, 300, device=device)
    inputs["logits"] = inputs["logits"] * 0.01
    assert_kernel_parity(
        cross_entropy, cross_entropy_ref, inputs, kernels=(FWD, BWD), softcap=100.0
    )


@pytest.mark.parametrize("op", [cross_entropy, over_the_logits], ids=["apart", "in-place"])
def test_parity_catches_one_percent(op, device):
    logits, targets = make(9, 40, device=device).values()
    assert_mutations_are_caught(
        lambda logits: op(logits, targets),
        lambda logits: cross_entropy_ref(logits, targets),
        {"logits": logits},
    )


# --- targets --------------------------------------------------------------------------------------

both_ops = pytest.mark.parametrize(
    "op", [cross_entropy, over_the_logits], ids=["apart", "in-place"]
)


@both_ops
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_targets_of_any_alignment_and_stride(op, dtype, device):
    logits, targets = make(6, 40, device=device).values()
    want = step(op, logits, targets)
    shifted = torch.cat((targets.new_zeros(1), targets)).to(dtype)[1:]
    spread = targets.to(dtype).repeat_interleave(2)[::2]
    for given_targets in (shifted, spread):
        with launches(FWD), guarded():
            got = step(op, logits, given_targets)
        assert all(map(torch.equal, got, want))


@both_ops
@pytest.mark.parametrize("bad", [-1, -2, 37, 40, 2**31, 2**40, -(2**40)])
def test_impossible_targets_are_nan_and_read_nothing(op, bad, device):
    logits, targets = make(6, 40, valid=37, device=device, ignored=False).values()
    want = step(op, logits, targets, reduction="none", valid_vocab=37)
    targets[2] = bad
    with launches(FWD), guarded():
        got = step(op, logits, targets, reduction="none", valid_vocab=37)
    others = torch.arange(6, device=device) != 2
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[others], b[others])
    assert got[0][2].isnan()
    assert got[1][2, :37].isnan().all()
    assert (got[1][2, 37:] == 0).all()
    loss, gradient = step(op, logits, targets, valid_vocab=37)
    reference = step(cross_entropy_ref, logits, targets, valid_vocab=37)
    assert loss.isnan()
    assert gradient[2, :37].isnan().all()
    assert gradient[others].isfinite().all()
    assert torch.equal(gradient.isnan(), reference[1].isnan())


@both_ops
@reductions
def test_nothing_but_ignored_targets(op, reduction, device):
    logits, targets = make(6, 40, device=device).values()
    logits[2] = math.nan  # not even read
    with launches(FWD), guarded():
        loss, gradient = step(op, logits, torch.full_like(targets, -100), reduction=reduction)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    assert (gradient == 0).all()


@both_ops
@reductions
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_no_rows(op, reduction, shape, device):
    logits = torch.empty(shape, device=device)
    targets = torch.empty(shape[:-1], dtype=torch.int64, device=device)
    loss, gradient = step(op, logits, targets, reduction=reduction)
    assert gradient.shape == shape
    assert loss.shape == (targets.shape if reduction == "none" else ())
    assert torch.equal(loss.isnan(), torch.full_like(loss, reduction == "mean").bool())


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(layout, device):
    logits, targets = make(4, 5, 24, device=device).values()
    logits = layout(logits)
    with launches(FWD, BWD), guarded():
        got = step(cross_entropy, logits, targets)
    assert all(map(torch.equal, got, step(cross_entropy, logits.contiguous(), targets)))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "layout", [lambda d: d.mT.contiguous().mT, lambda d: d[0, 0].expand(4, 5)], ids=["t", "sum"]
)
def test_strides_of_gradients_do_not_matter(layout, inplace, device):
    logits, targets = make(4, 5, 24, device=device).values()
    op = over_the_logits if inplace else cross_entropy
    upstream = layout(awkward(4, 5, device=device))
    with launches(BWD), guarded():
        got = step(op, logits, targets, upstream, reduction="none")
    want = step(op, logits, targets, upstream.contiguous(), reduction="none")
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("inplace", [False, True])
def test_offsets_beyond_int32(inplace, device):
    """Three rows 2**30 and more elements apart: memory is reserved, three pages of it are used."""
    stride, V = (1 << 30) + 8, 24
    memory = torch.empty(2 * stride + V, dtype=torch.bfloat16, device=device)
    logits = memory.as_strided((3, V), (stride, 1))
    logits.copy_(awkward(3, V, dtype=torch.bfloat16, device=device))
    targets = torch.tensor([3, 0, 23], device=device)
    want = step(cross_entropy, logits.contiguous(), targets, torch.ones((), device=device))
    leaf = logits.requires_grad_()
    with launches(FWD):
        loss = cross_entropy(leaf, targets, inplace_grad=inplace)
        (gradient,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(loss, want[0])
    torch.testing.assert_close(gradient, want[1], rtol=0.01, atol=0)


# --- the gradient over the logits -----------------------------------------------------------------


@reductions
@both_dtypes
def test_gradient_takes_the_place_of_the_logits(reduction, dtype, device):
    logits, targets = make(3, 4, 70, dtype=dtype, device=device).values()
    logits = logits.contiguous()
    want = step(cross_entropy, logits, targets, reduction=reduction)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, targets, reduction=reduction, inplace_grad=True)
    with guarded() as allocated:
        (gradient,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, 1.25))
    assert allocated == []
    assert gradient.data_ptr() == leaf.data_ptr()
    assert torch.equal(loss, want[0])
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(gradient, want[1], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_raises(reduction, device):
    logits, targets = make(4, 24, device=device).values()
    loss = over_the_logits(logits.requires_grad_(), targets, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_grad: a second backward"):
        loss.backward()


def test_others_who_saved_the_logits_are_told(device):
    logits, targets = make(4, 24, device=device).values()
    y = logits.requires_grad_() * 1
    other = y.square().sum()
    cross_entropy(y, targets, inplace_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_that_changed_after_the_loss_are_noticed(device):
    logits, targets = make(4, 24, device=device).values()
    y = logits.requires_grad_() * 1
    loss = cross_entropy(y, targets, inplace_grad=True)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_stay_where_no_gradient_is_wanted(device):
    logits, targets = make(4, 24, device=device).values()
    before = logits.clone()
    loss = cross_entropy(logits, targets, inplace_grad=True)
    with torch.no_grad():
        again = cross_entropy(logits.requires_grad_(), targets, inplace_grad=True)
    assert torch.equal(logits, before)
    assert torch.equal(loss, again)


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:-1]])
def test_logits_that_would_be_copied_are_refused(layout, device):
    logits, targets = make(4, 5, 24, device=device).values()
    logits = LAYOUTS[layout](logits)
    with launches(), pytest.raises(ValueError, match="logits: with inplace_grad expected rows"):
        cross_entropy(logits.requires_grad_(), targets, inplace_grad=True)


# --- values ---------------------------------------------------------------------------------------


@both_ops
def test_what_is_not_finite_stays_in_its_row(op, device):
    logits, targets = make(6, 300, device=device, ignored=False).values()
    want = step(op, logits, targets, reduction="none")
    logits[1, 7], logits[2, 8], logits[4] = math.inf, math.nan, -math.inf
    got = step(op, logits, targets, reduction="none")
    bad = torch.tensor([False, True, True, False, True, False], device=device)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[~bad], b[~bad])
    assert got[0][bad].isnan().all()


@both_ops
def test_logits_of_minus_infinity_have_no_probability(op, device):
    logits, targets = make(6, 300, device=device, ignored=False).values()
    masked = torch.rand(6, 300, device=device) < 0.9  # whole lanes of it
    logits[masked.scatter(1, targets[:, None], False)] = -math.inf
    got = step(op, logits, targets)
    want = step(cross_entropy_ref, logits, targets)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    assert (got[1][logits.isinf()] == 0).all()


@both_ops
def test_same_input_same_bits(op, device):
    logits, targets = make(50, 200, device=device).values()
    first = step(op, logits, targets, **EVERY)
    for _ in range(3 if device == "cpu" else 1000):
        assert all(map(torch.equal, step(op, logits, targets, **EVERY), first))


# --- autograd, torch.compile, torch.library -------------------------------------------------------


def test_a_second_derivative_raises(device):
    logits, targets = make(3, 8, device=device).values()
    leaf = logits.requires_grad_()
    (dx,) = torch.autograd.grad(cross_entropy(leaf, targets).square(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    stats, options = torch.zeros(2, 3, device=device), ("mean", 8, -100, 0.0, 0.0, None)
    dloss = torch.ones((), device=device, requires_grad=True)
    dx = torch.ops.fastgpt.cross_entropy_backward(dloss, leaf, targets, stats, *options)
    with pytest.raises(NotImplementedError, match="no double backward"):
        dx.sum().backward()


def test_under_autocast_the_loss_is_fp32(device):
    logits, targets = make(5, 24, dtype=torch.bfloat16, device=device).values()
    want = step(cross_entropy, logits, targets)
    with torch.autocast(device, torch.bfloat16), launches(FWD):
        got = step(cross_entropy, logits, targets)
    assert got[0].dtype == torch.float32
    assert all(map(torch.equal, got, want))


@reductions
@pytest.mark.parametrize("options", [OPTIONS["plain"], EVERY], ids=["plain", "every-option"])
def test_opcheck(reduction, options, device):
    logits, targets = make(5, 24, device=device).values()
    flags = (reduction, 20, -100, *(options.get(k, d) for k, d in (
        ("label_smoothing", 0.0), ("z_loss", 0.0), ("softcap", None))))  # fmt: skip
    permuted = logits.mT.contiguous().mT.requires_grad_()
    opcheck(torch.ops.fastgpt.cross_entropy.default, (permuted, targets, *flags))
    dloss = torch.ones(5 if reduction == "none" else (), device=device)
    stats = torch.zeros(2, 5, device=device)
    arguments = (dloss, logits, targets, stats, *flags)
    opcheck(torch.ops.fastgpt.cross_entropy_backward.default, arguments)


@reductions
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_to_one_node_and_never_again(reduction, dynamic, device):
    def op(logits, targets):
        return cross_entropy(logits, targets, reduction=reduction, inplace_grad=True, **EVERY)

    def plain(logits, targets):
        return cross_entropy(logits, targets, reduction=reduction, **EVERY)

    shapes = ((2, 5, 24), (3, 5, 24), (4, 7, 24), (5, 9, 24))
    assert_compiles_once(
        op,
        [make(*shape, device=device).values() for shape in shapes],
        kernels=(FWD, BWD),
        dynamic=dynamic,
        eager=plain,
        run=lambda f, arguments: step(f, *arguments),
    )


def test_fake_tensors_need_no_kernel(device):
    with launches(), FakeTensorMode():
        logits = torch.empty(4, 5, 24, dtype=torch.bfloat16, device=device, requires_grad=True)
        targets = torch.empty(4, 5, dtype=torch.int64, device=device)
        loss = cross_entropy(logits, targets, inplace_grad=True)
        loss.backward()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert (logits.grad.shape, logits.grad.dtype) == (logits.shape, torch.bfloat16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@all_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_no_kernel_runs_the_plain_form_does(reduction, options, dtype, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    inputs = make(7, 60, valid=50, dtype=dtype)
    options = {**options, "valid_vocab": 50, "reduction": reduction}
    torch.compiler.reset()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="eager")
    with launches():
        for op in (cross_entropy, compiled, over_the_logits):
            assert_parity(op, cross_entropy_ref, inputs, **options)


def test_the_plain_form_treats_special_targets_the_same(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    logits, targets = make(8, 40, valid=37).values()
    targets[3], targets[5] = 2**40, 38
    logits[1] = math.nan  # of an ignored target
    with launches():
        got = step(over_the_logits, logits, targets, reduction="sum", valid_vocab=37)
    nan = torch.zeros(8, dtype=torch.bool)
    nan[[3, 5]] = True
    assert got[0].isnan()
    assert torch.equal(got[1].isnan(), nan[:, None] & (torch.arange(40) < 37))
    assert (got[1][1] == 0).all()


# --- bad arguments --------------------------------------------------------------------------------

X, T = torch.ones(2, 8), torch.zeros(2, dtype=torch.int64)
BAD = {
    "dtype": (X.double(), T, {}, "logits: expected fp32, fp16 or bf16, got torch.float64"),
    "scalar": (torch.ones(()), T, {}, r"logits: expected \(\.\.\., V\) with V >= 1, got \(\)"),
    "no-columns": (torch.ones(2, 0), T, {}, r"logits: .* got \(2, 0\)"),
    "targets": (X, T[:1], {}, r"targets: expected \(2,\), got \(1,\)"),
    "targets-dtype": (X, T.float(), {}, "targets: expected int32 or int64, got torch.float32"),
    "device": (X, T.to("meta"), {}, "targets: expected cpu as logits, got meta"),
    "valid_vocab": (X, T, {"valid_vocab": 9}, "valid_vocab: expected 1 to 8 columns, got 9"),
    "no-vocab": (X, T, {"valid_vocab": 0}, "valid_vocab: expected 1 to 8 columns, got 0"),
    "smoothing": (X, T, {"label_smoothing": 1.5}, "label_smoothing: expected 0 to 1, got 1.5"),
    "z_loss": (X, T, {"z_loss": -1.0}, "z_loss: expected 0 or more, got -1.0"),
    "softcap": (X, T, {"softcap": 0.0}, "softcap: expected a number above 0 or None, got 0.0"),
    "reduction": (X, T, {"reduction": "avg"}, "reduction: expected one of mean, .* got 'avg'"),
}


@pytest.mark.parametrize(("logits", "targets", "options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(logits, targets, options, message):
    with launches(), pytest.raises(ValueError, match=message):
        cross_entropy(logits, targets, **options)


# --- ahead of time --------------------------------------------------------------------------------

COMPILED = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastgpt.kernels.proof.compile import collect, specialised
from fastgpt.kernels.cross_entropy.device import *
from fastgpt.kernels.runtime import recording
from fastgpt.kernels.proof.sass import disassemble

accesses = {}
for config in collect(["fastgpt.kernels.cross_entropy.device"], [90]):
    if config.label == "V=50304 bf16 valid=50257 in place":
        signature, constants, attributes, options = specialised(config.launch)
        source = ASTSource(config.launch.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        sass = disassemble(compiled.asm["cubin"])
        accesses[config.kernel] = re.findall(r"((?:LDG|STG)\\.[\\w.]*|BAR\\.SYNC)", sass)

forms = {}
for M in (1, 2, 3, 15, 16, 17, 4096, 65_537):
    for first in (0, 1):
        logits = torch.empty(M, 50_304, dtype=torch.bfloat16, device="meta")
        targets = torch.empty(M + first, dtype=torch.int64, device="meta")[first:]
        scale = torch.empty((), device="meta")
        with recording(90) as launches:
            options = Options(50_257)
            _, stats = cross_entropy_fwd(logits, targets, options)
            cross_entropy_bwd(logits, targets, stats, scale, logits, options)
            cross_entropy_scale_(logits, scale)
        for launch in launches:
            forms.setdefault(launch.kernel.__name__, set()).add(repr(specialised(launch)))
json.dump([accesses, {name: len(seen) for name, seen in forms.items()}], sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(instructions that access memory, forms of each kernel over many numbers of rows)."""
    cache = str(tmp_path_factory.mktemp("triton"))
    return json.loads(printed_by(COMPILED, TRITON_CACHE_DIR=cache))


def test_padded_rows_are_read_and_written_16_bytes_at_a_time(compiled):
    """A mask at column 50,257 lies inside a vector, and would make eight accesses of one."""
    found = [access for access in compiled[0][FWD] if not access.startswith("BAR")]
    vectors = [access for access in found if access.endswith(".128")]
    # loss and gradient, each once over whole blocks (2 vectors a lane) and once over the rest (1)
    assert sorted(a[:3] for a in vectors) == ["LDG"] * 6 + ["STG"] * 3
    # the target, its logit, the scale; the loss, the target's gradient
    assert len(found) - len(vectors) == 5


def test_the_number_of_rows_compiles_nothing_anew(compiled):
    assert compiled[1] == {FWD: 1, BWD: 1, SCALE: 1}
