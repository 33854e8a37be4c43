"""Counts of hand-written kernels that can be said on paper."""

import numpy as np
import pytest

from executor.ptx import aligned, run
from simgpu.executor import Counters
from simgpu.executor.counters import pipe_of


def counted(body, *arrays, **options):
    """Counters of one run of a kernel's body."""
    counters = Counters()
    run(body, *arrays, counters=counters, **options)
    return counters


# --- global memory --------------------------------------------------------------------------------

ACCESSES = {
    # name: (offset of lane %r0 in bytes, load) -> (sectors, least, bytes)
    "each word after the other": ("mul.lo.s32 %r20, %r0, 4;", "b32 %r10", (4, 4, 128)),
    "every 32nd word": ("mul.lo.s32 %r20, %r0, 128;", "b32 %r10", (32, 4, 128)),
    "half a sector late": ("mad.lo.s32 %r20, %r0, 4, 16;", "b32 %r10", (5, 4, 128)),
    "all lanes one word": ("mul.lo.s32 %r20, %r0, 0;", "b32 %r10", (1, 1, 4)),
    "16-bit numbers": ("mul.lo.s32 %r20, %r0, 2;", "b16 %rs10", (2, 2, 64)),
    "8 bytes a lane": ("mul.lo.s32 %r20, %r0, 8;", "v2.b32 {%r10, %r11}", (8, 8, 256)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCESSES)
def test_sectors_of_global_memory(name):
    offset, load, expected = ACCESSES[name]
    start = aligned(4096 + 32, np.uint8)
    first = -start.__array_interface__["data"][0] % 32
    body = f"{offset} cvt.u64.u32 %rd20, %r20; add.s64 %rd20, %rd0, %rd20;"
    c = counted(f"{body} ld.global.{load}, [%rd20];", start[first : first + 4096])
    assert (c.total("sectors"), c.total("least_sectors"), c.total("bytes")) == expected


def test_lanes_that_take_no_part_touch_no_sector():
    body = "setp.lt.u32 %p1, %r0, 4; mad.wide.u32 %rd20, %r0, 4, %rd0;"
    c = counted(f"{body} @%p1 st.global.b32 [%rd20], %r0;", aligned(32, np.uint32))
    assert (c.total("sectors"), c.total("bytes"), c.total("touched")) == (1, 16, 16)


# --- shared memory --------------------------------------------------------------------------------

CONFLICTS = {
    # name: (byte offset of a lane, registers of the store) -> (wavefronts, least)
    "each lane its bank": ("shl.b32 %r20, %r0, 2;", "b32 %r0", (1, 1)),
    "two lanes a bank": ("shl.b32 %r20, %r0, 3;", "b32 %r0", (2, 1)),
    "all lanes one bank": ("shl.b32 %r20, %r0, 7;", "b32 %r0", (32, 1)),
    "8 bytes a lane": ("shl.b32 %r20, %r0, 3;", "v2.b32 {%r0, %r0}", (2, 2)),
    "16 bytes a lane": ("shl.b32 %r20, %r0, 4;", "v4.b32 {%r0, %r0, %r0, %r0}", (4, 4)),
    "16 bytes of 128": ("shl.b32 %r20, %r0, 7;", "v4.b32 {%r0, %r0, %r0, %r0}", (32, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_passes_over_the_banks_of_shared_memory(name):
    offset, registers, expected = CONFLICTS[name]
    c = counted(f"{offset} st.shared.{registers.replace(' ', ' [%r20], ', 1)};", shared=4096)
    assert (c.total("wavefronts"), c.total("least_wavefronts")) == expected


@pytest.mark.parametrize(("row", "passes"), [(16, 4), (128, 32), (144, 4)])
def test_rows_of_ldmatrix_take_a_pass_for_eight_without_conflict(row, passes):
    write = f"mul.lo.s32 %r20, %r0, {row}; st.shared.v4.b32 [%r20], {{%r0, %r0, %r0, %r0}};"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r20];"
    c = counted(f"{write} bar.warp.sync 0xffffffff; {load}", shared=32 * row)
    assert (c.total("wavefronts"), c.total("least_wavefronts")) == (2 * passes, 8)


# --- instructions ---------------------------------------------------------------------------------

LOOP = """
    mov.b32 %r10, 0;
$L_pass:
    add.s32 %r10, %r10, 1;
    fma.rn.f32 %r11, %r10, %r10, %r10;
    fma.rn.f32 %r12, %r10, %r10, %r10;
    ex2.approx.f32 %r13, %r10;
    setp.lt.s32 %p1, %r10, 5;
    @%p1 bra $L_pass;
    bar.sync 0;
"""


def test_instructions_of_a_loop_by_opcode_pipe_and_pass():
    c = counted(LOOP, warps=2, blocks=3)
    assert c.opcodes()["fma.rn.f32"] == 2 * 5 * 2 * 3
    (loop,) = c.loops(least=6)
    assert c.passes(loop) == 5 * 3
    pipes = {"fp32": 60, "special": 30, "int": 60, "control": 30}
    assert {k: n for k, n in c.pipes(loop.blocks).items() if n} == pipes
    assert c.pipes()["move"] == 3 * 6  # two of the header's
    assert (c.barriers(), c.thread_blocks) == (3, 3)


def test_counters_add_up_launches_of_one_kernel_alone():
    counters = Counters()
    for _ in range(2):
        run(LOOP, counters=counters)
    assert counters.opcodes()["bar.sync"] == 2
    with pytest.raises(ValueError, match="cannot count"):
        run("bar.sync 0;", counters=counters)


def test_multiply_adds_of_a_product():
    zeros = "".join(f"mov.b32 %r{i}, 0;" for i in range(10, 20))
    mma = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23},
        {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};"""
    assert counted(zeros + mma, warps=2).total("multiply_adds") == 2 * 16 * 8 * 16


PIPES = {
    "fp32": "fma.rn.f32 mul.bf16x2 sub.f32",
    "int": "setp.lt.f32 max.f32 cvt.rn.bf16x2.f32 div.s32 mad.lo.s32 subc.u32",
    "special": "cvt.rn.f32.s32 cvt.rzi.s32.f32 ex2.approx.ftz.f32 div.full.f32",
    "move": "mov.b32 ld.param.b64",
    "memory": "ld.global.v4.b32 cp.async.cg.shared.global shfl.sync.bfly.b32 tcgen05.ld.sync",
    "control": "bra.uni cp.async.commit_group wgmma.wait_group.sync.aligned tcgen05.wait::ld.sync",
    "tensor": "mma.sync.aligned.m16n8k16 wgmma.mma_async.sync tcgen05.mma.cta_group::1.kind::f16",
}


@pytest.mark.parametrize("pipe", PIPES)
def test_the_pipe_of_an_opcode(pipe):
    assert {pipe_of(op) for op in PIPES[pipe].split()} == {pipe}
