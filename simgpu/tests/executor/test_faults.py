"""Each fault that the executor knows is found in the smallest kernel that has it, and named."""

from contextlib import nullcontext

import numpy as np
import pytest

from executor.ptx import aligned, run
from simgpu.executor.errors import FaultError, UnknownPtxError

ADDRESS = """
    mad.wide.u32 %rd20, %r0, 4, %rd0;
    shl.b32 %r20, %r0, 2;
    mov.b32 %r21, global_smem;
    add.s32 %r20, %r20, %r21;
    mov.b32 %r30, 7;
"""
"""%rd20: a word of p0 for each thread; %r20: one of shared memory."""
POLLED = """
    setp.eq.u32 %p2, %r0, 0; @%p2 mbarrier.init.shared::cta.b64 [%r21], 1; bar.sync 0;
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], 1;
"""
"""All threads have polled an mbarrier."""
COLUMNS = """
    setp.lt.u32 %p3, %r0, 32;
    @%p3 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 32;
    bar.sync 0; ld.shared.b32 %r40, [global_smem];
    and.b32 %r41, %r0, 32; shl.b32 %r41, %r41, 16; add.u32 %r41, %r41, %r40;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {%r30};
"""
"""Each of two warps stores to lanes of tensor memory."""
FREED = "@%p3 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 32;"
OTHER = "xor.b32 %r22, %r0, 32; mad.wide.u32 %rd22, %r22, 4, %rd0; setp.eq.u32 %p5, %r1, 0;"
"""%rd22: the word of p0 of a thread of the other warp; %p5: in the first block."""
BESIDE = "xor.b32 %r22, %r20, 128; ld.shared.b32 %r10, [%r22];"
"""A read of the word of shared memory of a thread of the other warp."""
COPY = "cp.async.ca.shared.global [%r20], [%rd20], 4; cp.async.commit_group;"
READ = "race: reads what another warp writes"
WRITTEN = "race: writes what another warp reads or writes"
SAME = "race: writes what another thread writes in the same instruc"
ELSEWHERE = "without a barrier between, p0"
FAULTS = {
    "reads past the tensor": (
        "ld.global.b32 %r10, [%rd20+4];",
        r"reads 4 bytes outside of every tensor, p0\+256 bytes; block 0, thread 63, PTX line \d+",
    ),
    "writes before the tensor": ("st.global.b32 [%rd20+-4], %r30;", "writes 4 bytes outside"),
    "a misaligned address": ("ld.global.b32 %r10, [%rd20+2];", "misaligned address, p0.2 bytes"),
    "a register that nobody wrote": ("st.global.b32 [%rd20], %r99;", "depends on %r99, which was"),
    "shared memory that nobody wrote": ("ld.shared.b32 %r10, [%r20];", "memory that nobody wrote"),
    "past shared memory": ("st.shared.b32 [%r20+260], %r30;", "outside of the 512 bytes"),
    "two warps without a barrier": (
        f"st.shared.b32 [%r20], %r30; {BESIDE}", f"{READ} in shared memory",
    ),
    "a write after another warp's read": (
        f"""st.shared.b32 [%r20], %r30; bar.sync 0; {BESIDE} add.s32 %r10, %r10, 1;
        st.shared.b32 [%r20], %r10;""", WRITTEN,
    ),
    "two threads at one place": ("st.shared.b32 [%r21], %r0;", SAME),
    "two threads of a warp at one place": (
        """and.b32 %r22, %r0, 62; shl.b32 %r22, %r22, 2; cvt.rn.f32.u32 %r23, %r0;
        st.shared.b32 [%r22], %r23;""", SAME,
    ),
    "another warp's store to global memory": (
        f"""{OTHER} @%p5 st.global.b32 [%rd20], %r0; @%p5 ld.global.b32 %r10, [%rd22];
        st.shared.b32 [%r20], %r10;""", f"{READ}, {ELSEWHERE}",
    ),
    "a store to global memory that another warp read": (
        f"""{OTHER} @%p5 ld.global.b32 %r10, [%rd22]; @%p5 st.global.b32 [%rd20], %r30;
        add.u32 %r11, %r10, 1; setp.eq.u32 %p6, %r11, 3; @%p6 bra $L_skip; bar.sync 0; $L_skip:""",
        f"{WRITTEN}, {ELSEWHERE}",
    ),
    "what depends on a branch that depends on another warp's store": (
        f"""{OTHER} @%p5 ld.global.b32 %r10, [%rd22]; @%p5 st.global.b32 [%rd20], %r30;
        mov.b32 %r11, 1; setp.eq.u32 %p6, %r10, 3; @%p6 bra $L_skip; mov.b32 %r11, 2; $L_skip:
        st.shared.b32 [%r20], %r11;""", f"{WRITTEN}, {ELSEWHERE}",
    ),
    "two blocks at one place": ("st.global.b32 [%rd20], %r1;", "what thread 0 of block 1 writes"),
    "two blocks' same number": ("st.global.b32 [%rd20], %r30;", "what thread 0 of block 1 writes"),
    "a read of what another block wrote": (
        f"{OTHER} @%p5 st.global.b32 [%rd20], %r0; @!%p5 ld.global.b32 %r10, [%rd20];",
        "race: reads what block 0 writes, p0.0 bytes; block 1, thread 0",
    ),
    "a write of what another block read": (
        f"{OTHER} @%p5 ld.global.b32 %r10, [%rd20]; @!%p5 st.global.b32 [%rd20], %r0;",
        "race: writes what block 0 reads, p0.0 bytes; block 1, thread 0",
    ),
    "a copy that nobody waited for": (
        f"{COPY} bar.sync 0; ld.shared.b32 %r10, [%r20];", "is still being copied",
    ),
    "a wait that is one group short": (
        f"{COPY} cp.async.wait_group 1; ld.shared.b32 %r10, [%r20];", "is still being copied",
    ),
    "a copy that only its own warp waited for": (f"{COPY} cp.async.wait_group 0; {BESIDE}", READ),
    "a barrier in a branch": (
        "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $L_skip;\nbar.sync 0;\n$L_skip:",
        "divergent barrier: only 16 of 32 threads",
    ),
    "a warp that never comes": (
        "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L_skip;\nbar.sync 0;\n$L_skip:",
        "deadlock in block 0: warp 0 has exited, warp 1 waits at a barrier",
    ),
    "a shuffle of half a warp": (
        "setp.lt.u32 %p1, %r0, 16; @!%p1 shfl.sync.idx.b32 %r10, %r0, 0, 31, -1;",
        "shfl.sync: only 16 of 32 threads",
    ),
    "no mbarrier": (
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], 0;", "which is no mbarrier",
    ),
    "an mbarrier that others may still poll": (
        f"{POLLED} @%p2 mbarrier.inval.shared::cta.b64 [%r21];",
        "race: mbarrier.inval changes what another warp reads or writes",
    ),
    "a store to tensor memory that nobody waited for": (
        f"{COLUMNS} tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r42}}, [%r41];",
        "tcgen05.ld reads tensor memory before tcgen05.wait::st",
    ),
    "a store to tensor memory that is still read": (
        f"""{COLUMNS} tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r42}}, [%r41]; add.u32 %r42, %r42, 1;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {{%r42}};""",
        "tcgen05.st writes what a tcgen05.ld reads, before tcgen05.wait::ld",
    ),
    "tensor memory that others may still use": (
        f"{COLUMNS} tcgen05.wait::st.sync.aligned; {FREED}",
        "tcgen05.dealloc of what another warp uses, without a barrier",
    ),
    "an mbarrier that nobody arrives at": (
        f"{POLLED} $L_wait: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], 0;"
        "@!%p1 bra.uni $L_wait;",
        "deadlock in block 0: warp 0 polls an mbarrier, warp 1 polls an mbarrier",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name):
    body, said = FAULTS[name]
    x = aligned(64, np.uint32)
    with pytest.raises(FaultError, match=said) as found:
        run(ADDRESS + body, x, warps=2, blocks=2, shared=512)
    assert str(found.value).startswith("kernel: ")


SOUND = {
    "a barrier between": f"""
        st.shared.b32 [%r20], %r0; bar.sync 0; {BESIDE} xor.b32 %r10, %r10, 32;""",
    "a barrier between in global memory": """
        st.global.b32 [%rd22], %r0; bar.sync 0; xor.b32 %r22, %r0, 32;
        mad.wide.u32 %rd23, %r1, 256, %rd0; mad.wide.u32 %rd23, %r22, 4, %rd23;
        ld.global.b32 %r10, [%rd23]; bar.sync 0; xor.b32 %r10, %r10, 32;""",
    "another warp's read that it does not use": """
        setp.lt.u32 %p4, %r0, 32; @%p4 atom.global.add.u32 %r9, [%rd22], %r0; bar.sync 0;
        and.b32 %r23, %r0, 31; mad.wide.u32 %rd23, %r1, 256, %rd0;
        mad.wide.u32 %rd23, %r23, 4, %rd23; ld.global.b32 %r24, [%rd23]; add.u32 %r24, %r24, 1;
        setp.eq.u32 %p5, %r24, 40; @%p5 bra $L_less; add.u32 %r24, %r24, 1;
        bra.uni $L_meet; $L_less:
        mov.b32 %r24, 0; $L_meet:
        @%p4 st.global.b32 [%rd23], %r24; sub.u32 %r24, %r24, 2; selp.b32 %r10, %r24, %r0, %p4;""",
    "an mbarrier at its end": f"""
        {POLLED} bar.sync 0; @%p2 mbarrier.inval.shared::cta.b64 [%r21]; mov.b32 %r10, %r0;""",
    "tensor memory at its end": f"""
        {COLUMNS} tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r42}}, [%r41]; sub.u32 %r10, %r42, %r30;
        tcgen05.wait::ld.sync.aligned; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {{%r42}};
        bar.sync 0; {FREED} add.u32 %r10, %r10, %r0;""",
    "a copy, a wait and a barrier": f"""
        {COPY.replace("20], 4", "21], 4")} cp.async.wait_group 0; bar.sync 0; {BESIDE}
        xor.b32 %r10, %r10, 32;""",
    "two warps that write the same": """
        and.b32 %r23, %r0, 31; shl.b32 %r24, %r23, 2; add.s32 %r24, %r24, %r21;
        st.shared.b32 [%r24], %r23; bar.sync 0; ld.shared.b32 %r10, [%r24];
        and.b32 %r25, %r0, 32; add.s32 %r10, %r10, %r25;""",
    "two threads of a warp that round differently": """
        and.b32 %r22, %r0, 62; shl.b32 %r22, %r22, 2; and.b32 %r23, %r0, 1;
        add.s32 %r23, %r23, 0x3f800000; st.shared.b32 [%r22], %r23; mov.b32 %r10, %r0;""",
    "two threads of a warp that round pairs differently": """
        and.b32 %r22, %r0, 62; shl.b32 %r22, %r22, 2; and.b32 %r23, %r0, 1;
        add.s32 %r23, %r23, 0x3f800000; mov.b64 %rd24, {%r23, %r23};
        st.shared.b64 [%r22], %rd24; mov.b32 %r10, %r0;""",
    "a loop with its middle before its beginning": """
        mov.b32 %r10, 0; mov.b32 %r11, 0; setp.ge.u32 %p1, %r0, 16; bra.uni $L_begin;
        $L_even:
        add.u32 %r11, %r11, 2;
        $L_meet:
        bar.sync 0; add.u32 %r10, %r10, 1; setp.eq.u32 %p2, %r10, 3; @%p2 bra $L_end;
        $L_begin:
        @%p1 bra $L_even; add.u32 %r11, %r11, 2; bra.uni $L_meet;
        $L_end:
        sub.u32 %r10, %r11, 6; add.u32 %r10, %r10, %r0;""",
    "a loop of other lengths for other threads": """
        mov.b32 %r10, 0;
        $L_loop:
        setp.ge.u32 %p1, %r10, %r0;
        @%p1 bra $L_done;
        add.s32 %r10, %r10, 1;
        bra $L_loop;
        $L_done:
        bar.sync 0;""",
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_code_runs(name):
    """The nearest code without a fault: each thread writes its number."""
    out, numbers = aligned(128, np.uint32), aligned(64, np.uint32)
    numbers[:] = np.arange(64)
    body = f"""
        mad.wide.u32 %rd21, %r0, 4, %rd1;
        mad.wide.u32 %rd22, %r1, 256, %rd0;
        mad.wide.u32 %rd22, %r0, 4, %rd22;
        {ADDRESS}
        {SOUND[name]}
        st.global.b32 [%rd22], %r10;
    """
    run(body, out, numbers, warps=2, blocks=2, shared=512)
    assert out.tolist() == [*range(64), *range(64)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("frobnicate.b32 %r10, %r0;", r"^kernel: PTX line \d+ \(.*\): .* not know: frobnicate"),
        ("add.sat.s32 %r10, %r0, %r0;", "does not know: add.sat.s32"),
        ("fma.rn.f64 %rd1, %rd0, %rd0, %rd0;", "does not know: fma.rn.f64"),
        ("prmt.b32.f4e %r10, %r0, %r0, %r0;", "does not know: prmt.b32.f4e"),
        ("add.rz.f16 %rs1, %rs1, %rs1;", "does not know: add.rz.f16"),
        ("mul.wide.s64 %rd1, %rd0, %rd0;", "does not know: mul.wide.s64"),
        ("mov.b64 %rd1, {%r0, _};", "does not know: mov.b64"),
        ("mov.u32 %r10, %clock;", "special register %clock"),
        ("bar.sync 1, 64;", "does not know: bar.sync 1, 64"),
    ],
)
def test_what_it_does_not_know_is_named(body, said):
    with pytest.raises(UnknownPtxError, match=said):
        run(body, aligned(64, np.uint32), warps=2)


PARTLY = "setp.lt.u32 %p1, %r0, 16; @%p1 ld.global.b32 %r10, [%rd20];"
"""%r10 is written by 16 threads alone."""


@pytest.mark.parametrize(
    ("use", "depends"),
    [
        ("st.global.b32 [%rd20], %r10;", "%r10"),
        ("add.s32 %r11, %r10, 1; xor.b32 %r12, %r11, %r0; st.global.b32 [%rd20], %r12;", "%r12"),
        ("mad.wide.u32 %rd22, %r10, 4, %rd0; ld.global.b32 %r11, [%rd22];", "%rd22"),
        ("setp.eq.s32 %p2, %r10, 0; @%p2 st.global.b32 [%rd20], %r0;", "%p2"),
        ("mov.b64 %rd9, {%r10, %r0}; mov.b64 {%r9, _}, %rd9; st.global.b32 [%rd20], %r9;", "%r9"),
        ("shfl.sync.idx.b32 %r11, %r10, 20, 31, -1; @%p1 st.global.b32 [%rd20], %r11;", "%r11"),
        ("prmt.b32 %r11, %r0, %r10, 0x7210; st.global.b32 [%rd20], %r11;", "%r11"),
        ("prmt.b32 %r11, %r0, %r10, 0x6540; prmt.b32 %r12, %r11, %r0, 0x5402;"
         "st.global.b32 [%rd20], %r12;", "%r12"),
        ("@%p1 st.global.b32 [%rd20], %r10;", None),
        ("selp.b32 %r11, %r10, %r0, %p1; st.global.b32 [%rd20], %r11;", None),
        ("mov.b64 %rd9, {%r10, %r0}; mov.b64 {_, %r9}, %rd9; st.global.b32 [%rd20], %r9;", None),
        ("mov.b64 %rd21, {%r0, %r10}; cvt.u32.u64 %r11, %rd21; st.global.b32 [%rd20], %r11;", None),
        ("shfl.sync.idx.b32 %r11, %r10, 3, 31, -1; @%p1 st.global.b32 [%rd20], %r11;", None),
        ("add.s32 %r11, %r10, 1; @%p1 st.global.b32 [%rd20], %r11;", None),
        ("prmt.b32 %r11, %r0, %r10, 0x7410; prmt.b32 %r12, %r11, %r0, 0x4510;"
         "st.global.b32 [%rd20], %r12;", None),
    ],
)  # fmt: skip
def test_only_what_depends_on_a_register_of_other_threads_is_a_fault(use, depends):
    said = pytest.raises(FaultError, match=f"depends on {depends}, which was never written")
    with said if depends else nullcontext():
        run(ADDRESS + PARTLY + use, aligned(64, np.uint32), warps=2)
