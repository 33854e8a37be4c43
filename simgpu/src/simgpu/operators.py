"""Replaces PyTorch's CUDA kernels by the CPU's or by PyTorch's decompositions."""

import ctypes
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._decomp import decomposition_table

from simgpu import attention, lines

KEPT = re.compile(
    r"aten::(empty|empty_strided|as_strided|view|view_as_real|view_as_complex|_reshape_alias|"
    r"unfold|set_|resize_|_local_scalar_dense|record_stream|is_pinned|_pin_memory|is_set_to|"
    r"_fused_sdp_choice|_efficientzerotensor|lift\w*)(\.\w+)?$"
)
"""Operators that only make, view or describe memory: their CUDA kernels run as they are."""
WITHOUT_KEY = ["aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_"]
"""Operators with CUDA kernels that no key of the dispatcher leads to."""
WIDE = [
    f"aten::{name}.dtype{out}" for name in ("mm", "bmm", "addmm", "baddbmm") for out in ("", "_out")
]
"""Products with a result of another dtype than the factors; the CPU has none."""
_library = torch.library.Library("aten", "IMPL")


def install(folder: Path) -> None:
    """Replaces the kernels, in a process that has just imported torch."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = [n for n in names if n.startswith("aten::") and not KEPT.match(n)]
    by_host, by_error = [], []
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    written = {**attention.KERNELS, "aten::native_dropout": _dropout}
    for name in [*names, *WITHOUT_KEY]:
        function = written.get(name)
        if function is None and name not in WIDE and not has(name, "CPU"):
            function = decomposition_table.get(_overload(name))
        if function is not None:
            with warnings.catch_warnings():  # of what is meant here: a kernel is replaced
                warnings.simplefilter("ignore")
                _library.impl(name.removeprefix("aten::"), function, "CUDA", allow_override=True)
        else:
            (by_host if has(name, "CPU") or name in WIDE else by_error).append(name)
    native = ctypes.CDLL(str(folder / "libsimgpu.so"))
    native.simgpu_replace("\n".join(by_host).encode(), "\n".join(by_error).encode())
    initialize = torch.cuda._lazy_init

    def initialize_and_watch() -> None:
        before = torch.cuda._initialized  # type: ignore[attr-defined]
        initialize()
        if not before and torch.cuda._initialized:  # type: ignore[attr-defined]
            native.simgpu_watch_allocator()

    torch.cuda._lazy_init = initialize_and_watch
    query, wait = torch.cuda.Event.query, torch.cuda.Event.synchronize
    tell = ctypes.CDLL("libcuda.so.1").simgpu_tell  # the program may hand this on to its threads
    torch.cuda.Event.query = lambda self: query(self) and tell() == 0  # type: ignore[method-assign]

    def note_and_wait(self: torch.cuda.Event) -> None:
        lines.here(1)
        wait(self)

    torch.cuda.Event.synchronize = note_and_wait  # type: ignore[method-assign]


def _overload(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """native_dropout, which draws from the CUDA generator; the CPU's draws from its own."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0), kept
