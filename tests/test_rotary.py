"""Rotary positions; on a CPU the kernels run in Triton's interpreter, on CUDA as they are."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import rotary, rotary_ref, runtime
from tests.parity import awkward
from tests.proof import (
    LAYOUTS,
    assert_compiles_once,
    assert_kernel_parity,
    assert_mutations_are_caught,
    forward_backward,
    guarded,
    launches,
)

KERNEL = "_rotary_kernel"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
PACKED = {
    "slices": lambda qkv, H, K: (qkv[:, :, :H], qkv[:, :, H : H + K]),
    "split": lambda qkv, H, K: qkv.split((H, K, qkv.shape[2] - H - K), dim=2)[:2],
    "keys-first": lambda qkv, H, K: (qkv[:, :, K : K + H], qkv[:, :, :K]),
    "apart": lambda qkv, H, K: (qkv[:, :, :H], qkv[:, :, -K:]),
}

both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
both_conventions = pytest.mark.parametrize(
    "interleaved", [False, True], ids=["halves", "interleaved"]
)
all_packings = pytest.mark.parametrize("packing", PACKED.values(), ids=PACKED)


def make(B, T, H, K, D, *, dtype=torch.float32, device="cpu"):
    """q and k."""
    shapes = {"q": (B, T, H, D), "k": (B, T, K, D)}
    return {name: awkward(*s, dtype=dtype, device=device) for name, s in shapes.items()}


def angles(T, D, device="cpu"):
    """(cos, sin) of angles that look alike nowhere, between rows of NaN."""
    at = awkward(T, D // 2)
    return tuple(awkward(*at.shape, device=device).copy_(x) for x in (at.cos(), at.sin()))


def turning(cos, sin, f=rotary, **options):
    """`f` of q and k with these angles, for which there is no gradient."""
    return lambda q, k: f(q, k, cos, sin, **options)


def packed(B, T, H, K, D, device="cpu"):
    """A projection of H query heads and K key and value heads."""
    return awkward(B, T, H + 2 * K, D, device=device).contiguous()


def through(packing, H, K, cos, sin, **options):
    """Of the projection: q and k turned, beside the rest of it, which is taken afterwards."""

    def of(source):
        qkv = source * 1  # no leaf
        q, k = rotary(*packing(qkv, H, K), cos, sin, **options)
        return q, k, qkv.narrow(2, H + K, K) if packing is not PACKED["apart"] else qkv[:, :, H:-K]

    return of


# --- the reference --------------------------------------------------------------------------------


@both_conventions
def test_reference_is_a_complex_product(interleaved):
    q, k = (x.double() for x in make(2, 5, 3, 2, 8).values())
    cos, sin = angles(5, 8)
    turn = torch.complex(cos, sin).to(torch.complex128)[:, None]

    def want(x):
        pairs = x.unflatten(-1, (4, 2) if interleaved else (2, 4))
        pairs = pairs if interleaved else pairs.mT
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return (turned if interleaved else turned.mT).flatten(-2)

    for got, x in zip(rotary_ref(q, k, cos, sin, interleaved=interleaved), (q, k), strict=True):
        torch.testing.assert_close(got, want(x), rtol=1e-12, atol=1e-12)


# --- errors ---------------------------------------------------------------------------------------

SHAPES = {
    "one-of-each": (1, 1, 1, 1, 2),
    "odd-numbers": (3, 5, 3, 3, 10),
    "grouped": (2, 7, 6, 2, 16),
    "tokens-in-parts": (2, 21, 5, 1, 64),
    "heads-of-80": (1, 9, 2, 2, 80),
    "heads-of-256": (1, 3, 1, 1, 256),
}


@both_conventions
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rotary_matches_reference(shape, dtype, interleaved, device):
    inputs = make(*shape, dtype=dtype, device=device)
    where = angles(shape[1], shape[-1], device)
    op, ref = (turning(*where, f, interleaved=interleaved) for f in (rotary, rotary_ref))
    assert_kernel_parity(op, ref, inputs, kernels=(KERNEL,))


@both_conventions
def test_bf16_in_and_out(interleaved, device):
    """Of many elements: the interpreter cuts fp32 off where it should round it to bf16."""
    inputs = make(2, 9, 3, 2, 32, dtype=torch.bfloat16, device=device)
    where = angles(9, 32, device)
    op, ref = (turning(*where, f, interleaved=interleaved) for f in (rotary, rotary_ref))
    assert_kernel_parity(op, ref, inputs, kernels=(KERNEL,))


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_rotary_matches_reference_at_any_shape(data, device):
    B, T, H, K = (data.draw(st.integers(1, most)) for most in (3, 24, 6, 6))
    D = 2 * data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    interleaved = data.draw(st.booleans())
    where = angles(T, D, device)
    op, ref = (turning(*where, f, interleaved=interleaved) for f in (rotary, rotary_ref))
    assert_kernel_parity(op, ref, make(B, T, H, K, D, dtype=dtype, device=device),
                         kernels=(KERNEL,))  # fmt: skip


def test_parity_catches_one_percent(device):
    where = angles(5, 16, device)
    op, ref = turning(*where), turning(*where, rotary_ref)
    assert_mutations_are_caught(op, ref, make(2, 5, 3, 2, 16, device=device), outputs=2)


@pytest.mark.parametrize("inplace", [False, True])
def test_one_launch_forward_and_one_backward(inplace, device):
    through_it = through(PACKED["split"], 3, 2, *angles(5, 16, device), inplace=inplace)
    before = runtime.LAUNCHES[KERNEL]
    forward_backward(through_it, [packed(2, 5, 3, 2, 16, device)])
    assert runtime.LAUNCHES[KERNEL] - before == 2


# --- memory ---------------------------------------------------------------------------------------

FOUR = {**LAYOUTS, "heads-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}


@pytest.mark.parametrize("layout", FOUR.values(), ids=FOUR)
def test_strides_do_not_matter(layout, device):
    inputs = [layout(x) for x in make(3, 5, 3, 2, 16, device=device).values()]
    op = turning(*angles(5, 16, device))
    with launches(KERNEL), guarded():
        got = forward_backward(op, inputs)
    for a, b in zip(got, forward_backward(op, [x.contiguous() for x in inputs]), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("layout", [*FOUR, "scalar"])
def test_strides_of_gradients_do_not_matter(layout, device):
    inputs = list(make(3, 5, 3, 2, 16, device=device).values())
    op = turning(*angles(5, 16, device))
    upstream = [awkward(*x.shape, device=device) for x in inputs]
    if layout == "scalar":  # what .sum() sends back
        upstream = [d[0, 0, 0, 0].expand(d.shape) for d in upstream]
    else:
        upstream = [FOUR[layout](d) for d in upstream]
    with launches(KERNEL), guarded():
        got = forward_backward(op, inputs, upstream)
    want = forward_backward(op, inputs, [d.contiguous() for d in upstream])
    assert all(map(torch.equal, got, want))


def test_slices_of_a_projection_are_read_in_place(device):
    q, k = PACKED["split"](packed(2, 5, 3, 2, 16, device), 3, 2)
    with guarded() as allocated:
        outs = rotary(q, k, *angles(5, 16, device))
    assert [x.data_ptr() for x in allocated] == [x.data_ptr() for x in outs]


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 8), (2, 0, 3, 2, 8)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_no_tokens(shape, inplace, device):
    inputs = make(*shape, device=device)
    op = turning(*angles(shape[1], 8, device), inplace=inplace)
    with launches():
        got = forward_backward(lambda q, k: op(q * 1, k * 1), inputs.values())
    assert [x.shape for x in got] == [inputs[name].shape for name in ("q", "k", "q", "k")]


@pytest.mark.parametrize("widest", [0, 1, 2], ids=["batch", "tokens", "heads"])
@pytest.mark.parametrize("inplace", [False, True])
def test_offsets_beyond_int32(widest, inplace, device):
    """Three rows 2**30 and more elements apart: memory is reserved, three pages of it are used."""
    stride, D = (1 << 30) + 8, 16
    shape, strides = [1, 1, 1], [D, D, D]
    shape[widest], strides[widest] = 3, stride
    memory = torch.empty(2 * stride + D, dtype=torch.float16, device=device)
    far = memory.as_strided((*shape, D), (*strides, 1))
    near = awkward(*shape, D, dtype=torch.float16, device=device)
    k = awkward(*shape, D, dtype=torch.float16, device=device)
    where = angles(shape[1], D, device)
    want = rotary(near, k, *where)
    with launches(KERNEL):
        got = rotary(far.copy_(near), k, *where, inplace=inplace)
    assert all(map(torch.equal, got, want))


# --- in place -------------------------------------------------------------------------------------

everywhere = pytest.mark.parametrize("with_kernels", [True, False], ids=["kernel", "plain"])


@pytest.fixture
def on(monkeypatch):
    """Says whether kernels may run."""
    return lambda kernels: kernels or monkeypatch.setattr(runtime, "INTERPRETING", False)


@everywhere
@all_packings
@both_conventions
@pytest.mark.parametrize(("H", "K"), [(3, 2), (2, 2), (1, 1)])
def test_written_over_the_projection(H, K, packing, interleaved, with_kernels, on, device):
    on(with_kernels)
    source, where = packed(2, 21, H, K, 16, device), angles(21, 16, device)
    options = {"interleaved": interleaved}
    want = through(packing, H, K, *where, **options)
    over = through(packing, H, K, *where, **options, inplace=True)
    assert all(map(torch.equal, over(source), want(source)))
    got = forward_backward(over, [source])
    assert all(map(torch.equal, got, forward_backward(want, [source])))


@all_packings
def test_in_place_allocates_nothing_and_keeps_the_rest(packing, device):
    qkv, where = packed(2, 21, 3, 2, 16, device), angles(21, 16, device)
    before = qkv.clone()
    q, k = packing(qkv, 3, 2)
    version = qkv._version
    with launches(KERNEL), guarded() as allocated:
        turned = rotary(q, k, *where, inplace=True)
    assert allocated == [] or device == "cpu"  # cos and sin, which are copied to be contiguous
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(turned, (q, k), strict=True))
    assert qkv._version > version
    for x in packing(before, 3, 2):
        x.copy_(rotary_ref(x, x, *where)[0])
    torch.testing.assert_close(qkv, before)


def test_in_place_of_tensors_that_are_no_views(device):
    inputs, where = make(2, 5, 3, 2, 16, device=device), angles(5, 16, device)

    def over(q, k):
        return rotary(q.clone(), k.clone(), *where, inplace=True)

    assert_kernel_parity(over, turning(*where, rotary_ref), inputs, kernels=(KERNEL,))


def test_one_of_the_two_without_a_gradient(device):
    (q, k), where = make(2, 5, 3, 2, 16, device=device).values(), angles(5, 16, device)
    q.requires_grad_()
    want = rotary(q, k, *where)
    got = rotary(q * 1, k.clone(), *where, inplace=True)
    (dq,), (true,) = (torch.autograd.grad(y[0].square().sum(), q) for y in (got, want))
    assert torch.equal(dq, true)
    assert torch.equal(got[1], want[1])
    assert not got[1].requires_grad


def test_in_place_under_no_grad_and_inference_mode(device):
    where = angles(5, 16, device)
    source = packed(2, 5, 3, 2, 16, device)
    want = rotary(*PACKED["slices"](source, 3, 2), *where)
    for mode in (torch.no_grad, torch.inference_mode):
        leaf = source.clone().requires_grad_()  # a leaf may be written to here, as torch has it
        with mode():
            q, k = rotary(*PACKED["split"](leaf * 1, 3, 2), *where, inplace=True)
            assert torch.equal(q, want[0])
            q, k = rotary(*PACKED["slices"](leaf, 3, 2), *where, inplace=True)
        assert torch.equal(k, want[1])


def test_who_saved_what_is_written_over_is_told(device):
    qkv = packed(2, 5, 3, 2, 16, device).requires_grad_() * 1
    other = qkv.square().sum()
    with torch.no_grad():
        rotary(*PACKED["slices"](qkv, 3, 2), *angles(5, 16, device), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_leaves_are_refused(device):
    qkv = packed(2, 5, 3, 2, 16, device).requires_grad_()
    before, where = qkv.detach().clone(), angles(5, 16, device)
    q, k = qkv[:, :, :3], qkv[:, :, 3:5]
    plain_q, plain_k = make(2, 5, 3, 2, 16, device=device).values()
    leaf = plain_q.clone().requires_grad_()
    leaf_and_view = plain_q.detach()[:].requires_grad_()
    for name, *pair in (
        ("q", q, k), ("k", plain_q, k), ("q", leaf, plain_k), ("q", leaf_and_view, plain_k)
    ):  # fmt: skip
        with launches(), pytest.raises(ValueError, match=f"{name}: with inplace expected a tensor"):
            rotary(*pair, *where, inplace=True)
    assert torch.equal(qkv, before)


OVERLAPS = {
    "the-same": (lambda x: (x, x), True),
    "one-head": (lambda x: (x[:, :, :3], x[:, :, 2:]), True),
    "one-token": (lambda x: (x[:, :2], x[:, 1:3]), True),
    "other-strides": (lambda x: (x, x.transpose(1, 2)), True),
    "expanded": (lambda x: (x[:, :1].expand(2, 4, 4, 8), torch.ones(2, 4, 1, 8)), True),
    "heads": (lambda x: (x[:, :, :3], x[:, :, 3:]), False),
    "heads-first": (lambda x: (x[:, :, 1:], x[:, :, :1]), False),
    "tokens": (lambda x: (x[:, :2], x[:, 2:]), False),
    "batches": (lambda x: (x[:1], x[1:]), False),
    "every-other-head": (lambda x: (x[:, :, ::2], x[:, :, 1::2]), False),
    "every-other-token": (lambda x: (x[:, 1::2], x[:, ::2]), False),
    "transposed": (
        lambda x: (x.view(2, 4, 4, 8).transpose(1, 2)[:, :, :1], x[:, 1:].transpose(1, 2)),
        False,
    ),
}


@pytest.mark.parametrize(("pair", "refused"), OVERLAPS.values(), ids=OVERLAPS)
def test_memory_in_common_is_refused(pair, refused):
    q, k = pair(torch.ones(2, 4, 4, 8))
    cos, sin = angles(q.shape[1], 8)
    if not refused:
        rotary(q, k, cos, sin, inplace=True)
        return
    with launches(), pytest.raises(ValueError, match=r"no element twice|no memory in common"):
        rotary(q, k, cos, sin, inplace=True)


def test_in_place_is_refused_where_calls_are_traced(device):
    inputs, where = make(2, 5, 3, 2, 16, device=device).values(), angles(5, 16, device)
    op = turning(*where, inplace=True)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="inplace: expected False where calls"):
        torch.compile(op, fullgraph=True, backend="eager")(*inputs)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with pytest.raises(ValueError, match="inplace: expected False where calls are traced"), Mode():
        op(*inputs)


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
def test_one_output_may_be_unused(used, device):
    where = angles(5, 16, device)
    x = make(2, 5, 3, 2, 16, device=device)["qk"[used]]
    other = awkward(2, 5, 3, 16, device=device).requires_grad_()

    def of(f):
        def one(x):
            return f(*((x, other) if used == 0 else (other, x)), *where)[used]

        return one

    assert_kernel_parity(of(rotary), of(rotary_ref), {"x": x}, kernels=(KERNEL,))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_second_derivative_raises(inplace, device):
    q = awkward(2, 3, 2, 8, device=device).requires_grad_()
    where = angles(3, 8, device)
    y, _ = rotary(q * 1, q * 1, *where, inplace=inplace)
    (dq,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    dq, _ = torch.ops.fastgpt.rotary_backward(*where, q, None, False)
    with pytest.raises(NotImplementedError, match="no double backward"):
        dq.sum().backward()


def test_dtypes_are_kept_under_autocast(device):
    inputs, where = make(2, 5, 3, 2, 16, device=device).values(), angles(5, 16, device)
    want = forward_backward(turning(*where), inputs)
    with torch.autocast(device, torch.bfloat16), launches(KERNEL):
        got = forward_backward(turning(*where), inputs)
    assert all(map(torch.equal, got, want))


def test_checkpointing_gives_the_same_gradients(device):
    inputs, op = make(2, 5, 3, 2, 16, device=device).values(), turning(*angles(5, 16, device))

    def recomputed(q, k):
        return checkpoint(op, q, k, use_reentrant=False)

    want = forward_backward(op, inputs)
    assert all(map(torch.equal, forward_backward(recomputed, inputs), want))


# --- torch.compile and torch.library --------------------------------------------------------------


@both_conventions
def test_opcheck(interleaved, device):
    q, k = PACKED["split"](packed(2, 5, 3, 2, 16, device).requires_grad_(), 3, 2)
    where = angles(5, 16, device)
    opcheck(torch.ops.fastgpt.rotary.default, (q, k, *where, interleaved))
    d = awkward(2, 5, 3, 16, device=device)
    for given_gradients in ((d, d), (d, None), (None, d)):
        arguments = (*where, *given_gradients, interleaved)
        opcheck(torch.ops.fastgpt.rotary_backward.default, arguments)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_to_one_node_and_never_again(dynamic, device):
    table = angles(20, 16, device)

    def op(q, k):
        return rotary(q, k, *(x[: q.shape[1]] for x in table))

    shapes = ((2, 5), (3, 5), (4, 7), (5, 9))
    # no two sizes of the first call are the same: Dynamo would expect them to remain so
    calls = [make(*shape, 6, 3, 16, device=device).values() for shape in shapes]
    assert_compiles_once(op, calls, kernels=(KERNEL,), dynamic=dynamic)


def test_fake_tensors_need_no_kernel(device):
    with launches(), FakeTensorMode():
        qkv = torch.empty(2, 5, 7, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        cos = torch.empty(5, 8, device=device)
        q, k = rotary(*PACKED["split"](qkv, 3, 2), cos, cos)
        (q.float().sum() + k.float().sum()).backward()
    assert (q.shape, k.shape, q.dtype) == ((2, 5, 3, 16), (2, 5, 2, 16), torch.bfloat16)
    assert (qkv.grad.shape, qkv.grad.dtype) == (qkv.shape, qkv.dtype)


@both_conventions
def test_where_no_kernel_runs_the_reference_does(interleaved, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    inputs, where = make(2, 5, 3, 2, 16).values(), angles(5, 16)
    op, ref = (turning(*where, f, interleaved=interleaved) for f in (rotary, rotary_ref))
    torch.compiler.reset()
    with launches():
        got = forward_backward(torch.compile(op, fullgraph=True, backend="eager"), inputs)
        got_eager = forward_backward(op, inputs)
    want = forward_backward(ref, inputs)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, got_eager, want))


# --- bad arguments --------------------------------------------------------------------------------

X, C = torch.ones(2, 5, 3, 8), torch.ones(5, 4)
BAD = {
    "dimensions": ((X[0], X, C, C), r"q: expected \(B, T, heads, D\), got \(5, 3, 8\)"),
    "no-heads": ((X, X[:, :, :0], C, C), r"k: expected \(B, T, heads, D\), got \(2, 5, 0, 8\)"),
    "odd": ((X[..., :7], X[..., :7], C, C), "q: expected an even head dimension .*, got 7"),
    "wide": ((torch.ones(1, 1, 1, 258),) * 4, "even head dimension from 2 to 256, got 258"),
    "tokens": ((X, X[:, :4], C, C), r"k: expected \(2, 5, K, 8\) as q, got \(2, 4, 3, 8\)"),
    "dtype": ((X.double(), X, C, C), "q: expected fp32, fp16 or bf16, got torch.float64"),
    "other-dtype": ((X, X.half(), C, C), "k: expected torch.float32 as q, got torch.float16"),
    "device": ((X, X.to("meta"), C, C), "k: expected cpu as q, got meta"),
    "partial": (
        (X, X, C[:, :2], C[:, :2]),
        r"cos: expected \(5, 4\), got \(5, 2\) \(turning a part of D is not supported\)",
    ),
    "longer": ((X, X, torch.ones(6, 4), C), r"cos: expected \(5, 4\), got \(6, 4\)$"),
    "sines": ((X, X, C, torch.ones(4)), r"sin: expected \(5, 4\), got \(4,\)$"),
    "half": ((X, X, C, C.half()), "sin: expected fp32, got torch.float16"),
    "angles-device": ((X, X, C.to("meta"), C), "cos: expected cpu as q, got meta"),
    "angles-grad": ((X, X, C, C.clone().requires_grad_()), "sin: expected a tensor that requires"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(args, message):
    with launches(), pytest.raises(ValueError, match=message):
        rotary(*args)
