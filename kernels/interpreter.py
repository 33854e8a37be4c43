"""Right bf16 arithmetic for Triton's interpreter, which holds bf16 numbers as their bits.

As it stands, it multiplies matrices of those bits as integers, and cuts where it should round.
"""

import functools
from typing import Any

import torch


@functools.cache
def patch_bf16() -> None:
    """Makes the interpreter of this process round to bf16 and multiply bf16 matrices correctly."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert_others = interpreter._convert_float
    builder: Any = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def convert(x: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of, to) == (tl.bfloat16, tl.float32):
            return x.astype("uint32") << 16
        if (of, to) == (tl.float32, tl.bfloat16):
            return torch.tensor(x).bfloat16().view(torch.uint16).numpy()
        return convert_others(x, of, to, rounding)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return multiply(self, a, b, *rest)

    interpreter._convert_float, builder.create_dot = convert, dot
