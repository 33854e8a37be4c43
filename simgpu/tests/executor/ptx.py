"""Small kernels in PTX, written by hand: each test sees one family of instructions alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from simgpu.executor.launch import Compiled, run_ptx
from simgpu.executor.memory import Region

HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({params})
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<200>;
    .reg .b64 %rd<60>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
{body}
    ret;
}}
"""


def region(name: str, x: np.ndarray) -> Region:
    base = x.base if x.base is not None else x
    assert isinstance(base, np.ndarray)
    memory = base.__array_interface__["data"][0], base.nbytes
    return Region(name, x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize, memory)


def run(
    body: str, *arrays: np.ndarray, warps: int = 1, blocks: int = 1, shared: int = 0, **options: Any
) -> None:
    """Runs a kernel with the addresses of `arrays` as its parameters p0, p1, ...."""
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "\n".join(f"    ld.param.b64 %rd{i}, [p{i}];" for i in range(len(arrays)))
    text = HEADER.format(params=params, body=f"{loads}\n{body}")
    regions = [region(f"p{i}", x) for i, x in enumerate(arrays)]
    values = [r.address for r in regions]
    run_ptx(Compiled(text, warps, shared), (blocks,), values, regions=regions, **options)


def aligned(shape: int | Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros that begin at a multiple of 16 bytes, as tensors do, in memory of their own."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(count + 16, np.uint8)
    start = -memory.__array_interface__["data"][0] % 16
    return memory[start : start + count].view(dtype).reshape(shape)


def placed(values: Any) -> np.ndarray:
    """A copy of an array, as `aligned` makes them."""
    values = np.asarray(values)
    x = aligned(values.shape, values.dtype)
    x[...] = values
    return x


def apply(operation: str, result: Any, *operands: np.ndarray) -> np.ndarray:
    """The results of one instruction on arrays, an element a thread.

    Args:
        operation: such as "add.f32", or with registers to be filled in, the result first:
            "add.f32 {}, {}, {};".
        result: dtype of the result.
        operands: of one size, bit patterns or numbers.
    """
    n = len(operands[0])
    threads = -(-n // 32) * 32
    arrays = [aligned(threads, result), *(aligned(threads, x.dtype) for x in operands)]
    if "{" not in operation:
        operation = f"{operation} {', '.join(['{}'] * len(arrays))};"
    for to, x in zip(arrays[1:], operands):
        to[:n] = x
    body, names = [], [_register(x.dtype, k) for k, x in enumerate(arrays)]
    for k, x in enumerate(arrays):
        body.append(f"mad.wide.u32 %rd{20 + k}, %r1, {32 * x.itemsize}, %rd{k};")
        body.append(f"mad.wide.u32 %rd{20 + k}, %r0, {x.itemsize}, %rd{20 + k};")
        if k:
            body.append(f"ld.global.b{8 * x.itemsize} {names[k]}, [%rd{20 + k}];")
    body.append(operation.format(*names))
    body.append(f"st.global.b{8 * arrays[0].itemsize} [%rd20], {names[0]};")
    run("\n".join(body), *arrays, blocks=threads // 32)
    return arrays[0][:n]


def _register(dtype: np.dtype, number: int) -> str:
    name, first = {2: ("rs", 10), 4: ("r", 10), 8: ("rd", 40)}[dtype.itemsize]
    return f"%{name}{first + number}"
