"""Matrix fragments and descriptors against the formulas of the PTX ISA, element by element.

The executor reshapes whole arrays; here each element is looked up by the ISA's own formula for its
thread and register, in plain loops.
"""

import re

import numpy as np
import pytest
import torch

from executor.ptx import aligned, placed, run
from simgpu.executor.errors import FaultError
from simgpu.executor.tensor import chunk_addresses, swizzled

GENERATOR = np.random.default_rng(0)
FOUR = "{%r11, %r12, %r13, %r14}"
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}


def small(*shape):
    """Numbers that 16 bits hold exactly; float32 holds the sums of their products exactly."""
    return GENERATOR.integers(-8, 8, shape).astype(np.float32)


def bits(values, kind):
    x = torch.from_numpy(np.ascontiguousarray(values)).to(KINDS[kind])
    return x.view(torch.int16).numpy().view(np.uint16)


def packed(low, high):
    return int(low) | int(high) << 16


def check_result(out, want):
    """Thread t of a warp has rows t / 4 and t / 4 + 8 of 16, columns 2 * (t % 4) and the next."""
    for t in range(len(out)):
        for i in range(4):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2)
            assert out[t, i] == want[row, 2 * (t % 4) + i % 2], (t, i)


@pytest.mark.parametrize("kind", KINDS)
def test_fragments_of_mma(kind):
    """9.7.15.5.8: thread t = 4 * group + q, with rows of A by group and columns by q."""
    A, B, C = small(16, 16), small(16, 8), small(16, 8)
    a, b = bits(A, kind), bits(B, kind)
    registers = aligned((32, 10), np.uint32)
    for t in range(32):
        group, q = divmod(t, 4)
        for i in range(4):
            row, column = group + 8 * (i % 2), 2 * q + 8 * (i // 2)
            registers[t, i] = packed(a[row, column], a[row, column + 1])
            value = C[group + 8 * (i // 2), 2 * q + i % 2]
            registers[t, 6 + i] = value.view(np.uint32)
        for i in range(2):
            row = 2 * q + 8 * i
            registers[t, 4 + i] = packed(b[row, group], b[row + 1, group])
    out = aligned((32, 4), np.float32)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd20+{4 * i}];" for i in range(10))
    body = f"""
        mad.wide.u32 %rd20, %r0, 40, %rd0; mad.wide.u32 %rd21, %r0, 16, %rd1; {loads}
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}},
            {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        st.global.v4.b32 [%rd21], {{%r20, %r21, %r22, %r23}};"""
    run(body, registers, out)
    check_result(out, A @ B + C)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_back(count, trans):
    """9.7.15.5.15: thread t has columns 2 * (t % 4) of row t / 4; transposed, it has the rows."""
    matrices = aligned((count, 8, 8), np.uint16)
    matrices[...] = np.arange(matrices.size).reshape(matrices.shape)
    out, back = aligned((32, count), np.uint32), aligned((count, 8, 8), np.uint16)
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    stores = "\n".join(f"st.global.b32 [%rd21+{4 * i}], %r{20 + i};" for i in range(count))
    body = f"""
        mad.wide.u32 %rd20, %r0, 16, %rd0; mad.wide.u32 %rd21, %r0, {4 * count}, %rd1;
        mad.wide.u32 %rd22, %r0, 16, %rd2; shl.b32 %r10, %r0, 4; setp.lt.u32 %p1, %r0, {8 * count};
        @%p1 ld.global.v4.b32 {FOUR}, [%rd20]; @%p1 st.shared.v4.b32 [%r10], {FOUR}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r10];
        {stores} add.s32 %r10, %r10, 512;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r10], {{{names}}}; bar.sync 0;
        @%p1 ld.shared.v4.b32 {FOUR}, [%r10]; @%p1 st.global.v4.b32 [%rd22], {FOUR};"""
    run(body, matrices, out, back, shared=1024)
    seen = matrices.swapaxes(1, 2) if trans else matrices
    for t in range(32):
        row, column = t // 4, 2 * (t % 4)
        for i in range(count):
            assert out[t, i] == packed(seen[i, row, column], seen[i, row, column + 1]), (t, i)
    assert (back == matrices).all()


def layout(swizzle, transposed, mn, k, leading, stride):
    """Byte of an element before the swizzle, by the canonical layouts of 9.7.15.5.1."""
    if swizzle == 0 and not transposed:
        return mn % 8 * 16 + mn // 8 * stride + k % 8 * 2 + k // 8 * leading
    if swizzle == 0:
        return mn % 8 * 2 + mn // 8 * stride + k % 8 * 16 + k // 8 * leading
    if not transposed:
        return mn % 8 * swizzle + mn // 8 * stride + k * 2
    elements = swizzle // 2
    return mn % elements * 2 + mn // elements * leading + k % 8 * swizzle + k // 8 * stride


@pytest.mark.parametrize("transposed", [False, True], ids=["K-major", "MN-major"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_every_element_of_a_descriptors_matrix(swizzle, transposed):
    start, leading, stride = np.array([1024]), np.array([2048]), np.array([4096])
    chunks = chunk_addresses(start, leading, stride, swizzle, 64, transposed)[0]
    for mn in range(64):
        for k in range(16):
            at = 1024 + layout(swizzle, transposed, mn, k, 2048, 4096)
            if swizzle:  # address bits 4, 5, 6 are combined with 7, 8, 9
                at ^= (at >> 7 & (swizzle // 16 - 1)) << 4
            chunk = chunks[k, mn // 8] if transposed else chunks[mn, k // 8]
            assert chunk + 2 * (mn % 8 if transposed else k % 8) == at, (mn, k)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_the_swizzle_is_tritons(swizzle):
    """Triton's own layout function says which element of a tile lies at each place."""
    ttgl = pytest.importorskip("triton.experimental.gluon.language")
    layout = ttgl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    if not hasattr(layout, "format_tensor_view"):
        pytest.skip("this Triton does not tell its layouts")
    columns = swizzle // 2
    found = re.findall(r"\(\s*(\d+):\s*(\d+)\)", layout.format_tensor_view([8, columns]))
    assert len(found) == 8 * columns
    for place, (row, column) in enumerate(found):
        plain = 2 * (int(row) * columns + int(column))
        assert swizzled(np.array([plain & ~15]), swizzle)[0] + plain % 16 == 2 * place


COPY = [f"ld.global.v4.b32 {FOUR}, [%rd20+{at}]; st.shared.v4.b32 [%r10+{at}], {FOUR};"
        for at in (0, 16, 32, 48)]  # fmt: skip
WGMMA = """
    mad.wide.u32 %rd20, %r0, 64, %rd0; shl.b32 %r10, %r0, 6; {copy}
    {before}
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r20, %r21, %r22, %r23}}, %rd9, %rd10,
        0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {after}
    mad.wide.u32 %rd21, %r0, 16, %rd1;
    st.global.v4.b32 [%rd21], {{%r20, %r21, %r22, %r23}};
"""
"""A (64, 16) at 0 and B (8, 16) at 4096 of shared memory, K-major without a swizzle."""


def wgmma(before="fence.proxy.async; bar.sync 0;", after="wgmma.wait_group.sync.aligned 0;"):
    """Runs the product; (D, A B)."""
    A, B = small(64, 16), small(16, 8)
    memory = np.zeros(4096, np.uint16)
    for matrix, start, size in ((bits(A, "bf16"), 0, 64), (bits(B.T, "bf16"), 2048, 8)):
        for mn in range(size):
            for k in range(16):
                memory[start + layout(0, False, mn, k, 128, 256) // 2] = matrix[mn, k]

    def descriptor(start):
        return start >> 4 | (128 >> 4) << 16 | (256 >> 4) << 32

    out = aligned((128, 4), np.float32)
    text = WGMMA.format(copy="\n".join(COPY), before=before, after=after)
    text = f"mov.b64 %rd9, {descriptor(0)}; mov.b64 %rd10, {descriptor(4096)};\n{text}"
    run(text, placed(memory), out, warps=4, shared=8192)
    return out, A @ B


def test_fragments_of_wgmma():
    """9.7.15.5.1.1.3: warp w has rows 16 * w and on, laid out as by mma.sync."""
    check_result(*wgmma())


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"before": "bar.sync 0;"}, "without a fence.proxy.async between"),
        ({"before": "fence.proxy.async;"}, "race: reads what another warp writes"),
        ({"after": "st.shared.b32 [%r10], %r0; wgmma.wait_group.sync.aligned 0;"}, "still reads"),
    ],
)
def test_what_wgmma_needs_around_it(missing, said):
    with pytest.raises(FaultError, match=said):
        wgmma(**missing)


@pytest.mark.parametrize("after", ["", "wgmma.wait_group.sync.aligned 1;"])
def test_results_of_a_product_that_nobody_waited_for_are_nan(after):
    out, _ = wgmma(after=after)
    assert np.isnan(out).all()
