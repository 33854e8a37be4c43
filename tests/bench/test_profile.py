"""The predicted time of a kernel whose counts and machine code can be said on paper."""

import pytest

from bench.profile import predict, settings
from fastgpt.errors import UserError
from fastgpt.kernels.proof.compile import Row
from fastgpt.kernels.proof.execute import Counters
from fastgpt.kernels.proof.profile import Profile
from fastgpt.kernels.proof.sass import Loop
from tests.proof.execute.ptx import run

FMAS = "fma.rn.f32 %r11, %r10, %r10, %r10;\n" * 20
KERNEL = f"""
    mov.b32 %r10, 0;
$L_pass:
    add.s32 %r10, %r10, 1;
    {FMAS}
    setp.lt.s32 %p1, %r10, 5;
    @%p1 bra $L_pass;
"""


@pytest.fixture
def counted():
    """A profile of 132 blocks of 8 warps, each of which goes 5 times through 20 fmas."""
    counters = Counters()
    run(KERNEL, warps=8, blocks=132, counters=counters)
    return Profile(None, counters, 0, "")  # pyright: ignore[reportArgumentType]


def row(*loops, instructions):
    made = Row("kernel", 90, "", warps=8, registers=32, loops=list(loops))
    made.instructions = instructions
    return made


START = 10 * 8 / 4 + 1000 / 8
"""Clocks of ten instructions of 8 warps outside of the loop, and of a wait that 8 blocks share."""


@pytest.mark.parametrize("unrolled", [1, 4])
def test_a_loop_takes_its_passes_at_the_rate_of_its_busiest_unit(counted, unrolled):
    size = 23 * unrolled
    loop = Loop(0, {"fp32": 20 * unrolled, "alu": 3 * unrolled}, bytes=0, flops=0)
    milliseconds, bound = predict(row(loop, instructions=size + 10), counted)
    clocks = 5 * 23 * 8 / 4 + START  # 4 instructions a clock
    assert milliseconds == pytest.approx(clocks / 1.83e6)
    assert bound == "issue"


def test_without_a_loop_to_match_the_instructions_are_those_of_ptx(counted):
    several = [Loop(n, {"fp32": 20}, bytes=0, flops=0) for n in (0, 400)]
    milliseconds, bound = predict(row(*several, instructions=50), counted)
    clocks = 8 * (5 * 23 + 1) / 4 + 1000 / 8  # and a ret, but no moves
    assert (milliseconds, bound) == (pytest.approx(clocks / 1.83e6), "issue")


def test_a_kernel_takes_no_less_than_its_bytes_at_the_memorys_rate(counted):
    counted.counters.finish(touched=3_350_000_000)
    loop = Loop(0, {"fp32": 20, "alu": 3}, bytes=0, flops=0)
    assert predict(row(loop, instructions=33), counted) == (pytest.approx(1.0), "memory")


def test_a_tile_is_read_or_named():
    assert [*settings("128x64x8x3").values()] == [128, 64, 8, 3]
    with pytest.raises(UserError, match=r"--tiles 128x64: expected BLOCK_M x BLOCK_N x warps"):
        settings("128x64")
