"""Instructions that kernels of others have: directed rounding, saturation, assertions."""

from fractions import Fraction

import numpy as np
import pytest

from executor.ptx import aligned, apply, run
from simgpu.executor.errors import FaultError, UnknownPtxError
from simgpu.executor.launch import Compiled, run_ptx


def floats():
    """Bits of floats of every kind: sums cancel, overflow and are subnormal."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 3000, dtype=np.uint32)
    near = rng.integers(0x3F80_0000, 0x4080_0000, 3000, dtype=np.uint32)
    edges = np.array([0, 2**31, 1, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x0080_0000, 0x3F80_0000], np.uint32)
    return np.concatenate([bits[np.isfinite(bits.view(np.float32))], near, np.repeat(edges, 20)])


def exact(bits):
    return Fraction(float(np.uint32(bits).view(np.float32)))


@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
@pytest.mark.parametrize("operation", ["fma", "add", "sub"])
def test_directed_rounding(operation, mode):
    x = floats()
    operands = [np.roll(x, shift) for shift in range(3 if operation == "fma" else 2)]
    got = apply(f"{operation}.{mode}.f32", np.uint32, *operands).view(np.float32)
    for result, *of in zip(got, *operands):
        a, b, *c = map(exact, of)
        want = a * b + c[0] if c else a + b if operation == "add" else a - b
        down = mode == "rm" or (mode == "rz" and want > 0)
        if np.isinf(result):  # overflow goes to infinity only where that is the direction
            assert abs(want) > exact(0x7F7F_FFFF)
            assert mode != "rz"
            assert down == (result < 0)
            continue
        with np.errstate(over="ignore"):
            beyond = np.nextafter(result, np.float32(np.inf if down else -np.inf))
        inside = Fraction(float(result)) - want
        assert inside <= 0 if down else inside >= 0
        if np.isfinite(beyond):
            assert Fraction(float(beyond)) > want if down else Fraction(float(beyond)) < want


@pytest.mark.parametrize(
    ("operation", "operands", "want"),
    [
        ("add.rm.f32", (1, -1), 0x8000_0000),  # only when it is rounded down
        ("add.rp.f32", (1, -1), 0),
        ("add.rm.f32", (0, 0), 0),
        ("fma.rm.ftz.f32", (1e-45, 1, 1e-45), 0),  # operands and results are flushed
    ],
)
def test_signs_of_zero_and_flushed_numbers(operation, operands, want):
    given = [np.array([x], np.float32).view(np.uint32) for x in operands]
    assert apply(operation, np.uint32, *given).tolist() == [want]


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_saturation(ftz):
    x = np.array([-1, 0, 0.25, 1, 7, np.inf, -np.inf, np.nan, 1e-45], np.float32).view(np.uint32)
    *got, tiny = apply(f"cvt{ftz}.sat.f32.f32", np.uint32, x)
    assert np.array(got).view(np.float32).tolist() == [0, 0, 0.25, 1, 1, 1, 0, 0]
    assert tiny == (0 if ftz else 1)
    assert not np.signbit(np.array(got).view(np.float32)).any()


def test_another_saturation_is_not_known():
    with pytest.raises(UnknownPtxError, match="does not know: cvt"):
        apply("cvt.sat.s8.s32", np.uint32, np.zeros(1, np.uint32))


def test_shared_memory_by_its_long_name():
    x = aligned(32, np.uint32)
    body = """shl.b32 %r20, %r0, 2; st.shared::cta.b32 [%r20], %r0; ld.shared::cta.b32 %r21, [%r20];
        mad.wide.u32 %rd20, %r0, 4, %rd0; st.global.b32 [%rd20], %r21;"""
    run(body, x, shared=128)
    assert x.tolist() == list(range(32))


def test_a_trap_ends_the_kernel():
    run("setp.eq.u32 %p1, %r0, 99; @!%p1 bra $L_end; trap;\n$L_end:")
    with pytest.raises(FaultError, match=r"trap; block 0, thread 7"):
        run("setp.eq.u32 %p1, %r0, 7; @!%p1 bra $L_end; trap;\n$L_end:")


ASSERTION = """
.version 8.7
.target sm_90a
.address_size 64
.extern .func __assertfail (.param .b64 p0, .param .b64 p1, .param .b32 p2) .noreturn;
.global .align 1 .b8 message[8] = {116, 111, 111, 32, 102, 97, 114};
.global .align 1 .b8 file[5] = {97, 46, 112, 121};
.visible .entry kernel(.param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.b32 %r2, [n];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, %r2;
    @%p1 bra $L_good;
    { // callseq 0, 0
    .param .b64 param0;
    .param .b64 param1;
    .param .b32 param2;
    mov.b64 %rd1, message;
    cvta.global.u64 %rd2, %rd1;
    st.param.b64 [param0], %rd2;
    mov.b64 %rd1, file;
    cvta.global.u64 %rd2, %rd1;
    st.param.b64 [param1], %rd2;
    st.param.b32 [param2], 8;
    call.uni
    __assertfail,
    (
    param0,
    param1,
    param2
    );
    } // callseq 0
    trap;
$L_good:
    ret;
}
"""


def test_an_assertion_says_what_failed_and_where():
    kernel = Compiled(ASSERTION, 1, 0)
    run_ptx(kernel, (1,), [32])
    with pytest.raises(FaultError, match=r"the assertion 'too far' of a.py:8 failed; block 0, thr"):
        run_ptx(kernel, (1,), [31])


def test_another_function_is_not_known():
    with pytest.raises(UnknownPtxError, match=r"does not know: call\.uni"):
        run_ptx(Compiled(ASSERTION.replace("__assertfail", "printf"), 1, 0), (1,), [32])


@pytest.mark.parametrize(("bits", "register"), [(32, "%r10"), (64, "%rd20")])
def test_the_address_of_a_parameter_may_have_32_bits(bits, register):
    """Triton chooses between parameters by their address, which has 32 bits since 3.9."""
    first, out = aligned(1, np.uint64), aligned(32, np.uint64)
    body = f"""
        setp.eq.u32 %p1, %r0, 7; mov.b{bits} {register}, p0; @%p1 mov.b{bits} {register}, p1;
        ld.param.b64 %rd21, [{register}]; mul.wide.u32 %rd22, %r0, 8; add.s64 %rd22, %rd22, %rd1;
        st.global.b64 [%rd22], %rd21;"""
    run(body, first, out)
    addresses = [x.__array_interface__["data"][0] for x in (first, out)]
    assert out.tolist() == [addresses[n == 7] for n in range(32)]
