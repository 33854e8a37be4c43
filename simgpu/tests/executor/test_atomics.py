"""Atomic changes of global memory, of one block and of several."""

import numpy as np
import pytest

from executor.ptx import aligned, placed, run
from simgpu.executor.errors import FaultError, UnknownPtxError

PLACE = "and.b32 %r20, %r0, 3; mad.wide.u32 %rd20, %r20, 4, %rd0;"
"""%rd20: one of four words of p0, shared by the threads."""


def changed(operation, before, value="add.u32 %r30, %r0, 1;", **options):
    x = placed(np.array(before, np.uint32))
    run(f"{PLACE} {value} {operation}", x, **options)
    return x


@pytest.mark.parametrize("red", [False, True])
@pytest.mark.parametrize(
    ("operation", "of_all"),
    [
        ("add.u32", lambda old, new: (old + sum(new)) % 2**32),
        ("min.u32", lambda old, new: min(old, *new)),
        ("max.s32", lambda old, new: max([old, *new], key=lambda x: x - (x >> 31 << 32))),
        ("and.b32", lambda old, new: np.bitwise_and.reduce([old, *new])),
        ("or.b32", lambda old, new: np.bitwise_or.reduce([old, *new])),
        ("xor.b32", lambda old, new: np.bitwise_xor.reduce([old, *new])),
    ],
)
def test_every_thread_of_every_block_counts(operation, of_all, red):
    before = [5, 0, 0xFFFF_FFFF, 1000]
    form = f"{'red' if red else 'atom'}.global.gpu.acq_rel.{operation} {'' if red else '%r31, '}"
    got = changed(f"{form}[%rd20], %r30;", before, warps=2, blocks=3)
    want = [of_all(old, [t + 1 for t in range(k, 64, 4)] * 3) for k, old in enumerate(before)]
    assert got.tolist() == want


def test_floats_are_added_one_after_the_other():
    x, want = placed(np.array([0, 0, 0, 1e8], np.float32)), np.array([0, 0, 0, 1e8], np.float32)
    run(f"{PLACE} cvt.rn.f32.u32 %r30, %r0; atom.global.add.f32 %r31, [%rd20], %r30;", x)
    for thread in range(32):
        want[thread % 4] += np.float32(thread)
    assert x.tolist() == want.tolist()


def test_the_old_value_is_returned():
    x, out = placed(np.array([100], np.uint32)), aligned(32, np.uint32)
    store = "mad.wide.u32 %rd21, %r0, 4, %rd1; st.global.b32 [%rd21], %r31;"
    run(f"atom.global.add.u32 %r31, [%rd0], 1; {store}", x, out)
    assert out.tolist() == list(range(100, 132))


def test_compare_and_swap_and_exchange():
    got = changed("atom.global.cas.b32 %r31, [%rd20], %r0, %r30;", [0, 9, 2, 3])
    assert got.tolist() == [1, 10, 3, 4]  # 9 is what thread 9 expects
    got = changed("atom.global.exch.b32 %r31, [%rd20], %r30;", [0] * 4)
    assert got.tolist() == [29, 30, 31, 32]


def test_several_elements_at_once():
    x = placed(np.arange(4, dtype=np.float32))
    add = "atom.global.gpu.relaxed.add.v2.f32 {%r20, %r21}, [%rd0+8], {%r10, %r11};"
    run(f"mov.b32 %r10, 0f3F800000; mov.b32 %r11, 0f40000000; {add}", x)
    assert x.tolist() == [0, 1, 34, 67]
    with pytest.raises(FaultError, match="changes 8 bytes at a misaligned address"):
        run("red.global.add.v2.f32 [%rd0+4], {%r0, %r0};", x)


@pytest.mark.parametrize(
    ("kind", "one", "register", "want"),
    [
        ("f16", 0x3C00, "%rs10", [0x5000]),
        ("bf16", 0x3F80, "%rs10", [0x4200]),
        ("f16x2", 0x3C00_4000, "%r10", [0x5400, 0x5000]),  # the other half is 2
    ],
)
def test_32_are_added_in_16_bits(kind, one, register, want):
    x, size = aligned(2, np.uint16), 32 if kind == "f16x2" else 16
    move = f"mov.b{size} {register}, {one};"
    run(f"{move} atom.global.add.noftz.{kind} {register}, [%rd0], {register};", x)
    assert x[: len(want)].tolist() == want


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_odd_half_words_are_changed_as_well(kind):
    one, eight = {"f16": (0x3C00, 0x4800), "bf16": (0x3F80, 0x4100)}[kind]
    x = aligned(4, np.uint16)
    address = "and.b32 %r20, %r0, 3; mad.wide.u32 %rd20, %r20, 2, %rd0;"
    add = f"mov.b16 %rs10, {one}; atom.global.add.noftz.{kind} %rs11, [%rd20], %rs10;"
    run(f"{address} {add}", x)
    assert x.tolist() == [eight] * 4


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        ("st.global.b32 [%rd20], 1;", "writes what block 0 changes atomically"),
        ("ld.global.b32 %r31, [%rd20];", "reads what block 0 changes atomically"),
    ],
)
def test_another_block_must_not_touch_it_otherwise(operation, what):
    form = f"setp.eq.u32 %p1, %r1, 1; @%p1 {operation}"
    with pytest.raises(FaultError, match=what):
        changed(f"{form} @!%p1 atom.global.add.u32 %r32, [%rd20], 1;", [0] * 4, blocks=3, lanes=32)


def test_a_change_outside_of_the_tensor_is_a_fault():
    with pytest.raises(FaultError, match="changes 4 bytes outside of every tensor"):
        changed("atom.global.add.u32 %r31, [%rd20+16], 1;", [0] * 4)


@pytest.mark.parametrize("operation", ["inc.u32", "add.e4m3", "add.relaxed"])
def test_unknown_atomics_are_named(operation):
    with pytest.raises(UnknownPtxError, match=f"form of atomics: atom.global.{operation}"):
        changed(f"atom.global.{operation} %r31, [%rd20], 1;", [0] * 4)
