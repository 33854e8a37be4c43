"""Executes the PTX of compiled Triton kernels on a CPU, and finds the faults in it.

Each thread of the GPU is one lane of numpy arrays. It needs numpy alone; compiling a kernel needs
Triton. From the bottom up: `ptx` (parser), `state` (the lanes' registers),
`memory` (global), `shared`, `flight` (what is under way, and tensor memory), `flow` (the order of a
program's parts), `machine` (thread blocks in lockstep), `unwritten`, `build` (instructions to
steps), `formats` (numbers); the instructions in `arithmetic`, `moves`, `atomics`, `warp`, `tensor`
(fragments, descriptors), `groups` (cp.async, wgmma, mbarrier) and `tcgen05`; and `launch`
(compiling, binding, running).

Kernels of yours, whatever launches them:

    from simgpu.executor import executed_on_cpu

    x, y = torch.randn(1000), torch.empty(1000)
    with executed_on_cpu(arch=90):
        double_kernel[(4,)](x, y, 1000, BLOCK=256)

Here y holds the result, or a `FaultError` says what is wrong and in which thread and line.
"""

from simgpu.executor.errors import FaultError, UnknownPtxError
from simgpu.executor.launch import (
    Compiled,
    Launch,
    around_compilation,
    compile_launch,
    execute,
    executed_on_cpu,
    run_launch,
    run_ptx,
)

__all__ = [
    "Compiled", "FaultError", "Launch", "UnknownPtxError", "around_compilation",
    "compile_launch", "execute", "executed_on_cpu", "run_launch", "run_ptx",
]  # fmt: skip
