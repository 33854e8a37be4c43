"""Fences that Triton leaves out, added to the PTX of our kernels.

Tensor cores read shared memory by another way (the async proxy) than the threads and cp.async
write it (the generic proxy). What a copy wrote is theirs to see after a `fence.proxy.async` that
follows the wait for the copy. Where Triton leaves it out, and how that was found and tested:
docs/reports/triton-sm100-fence.md.
"""

import functools
import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ours = threading.local()
"""Its attribute `compiling` is True while this thread launches or compiles a kernel of ours."""


@functools.cache
def needs_fence(arch: int) -> bool:
    """Returns True if the installed Triton leaves fences out for an arch (90 for sm_90)."""
    from triton import __version__

    version = tuple(int(part) for part in re.findall(r"\d+", __version__)[:3])
    # tcgen05 is in the families of sm_100 (103, 107) and sm_110, not in the one of sm_120 (PTX ISA,
    # target notes of 9.7.16); on sm_110 Triton 3.6 multiplies by mma.sync, which needs no fence
    families = {9: version < (3, 7, 1), 10: version < (3, 9), 11: (3, 7) <= version < (3, 9)}
    return families.get(arch // 10, False)


def add_fences(ptx: str) -> str:
    """Returns a kernel's PTX with a fence behind each wait for copies, if tensor cores read them.

    Each thread fences its own copies, before the barrier by which the product waits for them all.
    """
    if "wgmma.mma_async" not in ptx and "tcgen05.mma" not in ptx:
        return ptx
    return re.sub(r"(cp\.async\.wait_group\s+\d+;)", r"\1\n\tfence.proxy.async.shared::cta;", ptx)


KEY = f"fences {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
"""Part of Triton's cache key for kernels with fences; it changes with this file."""


@contextmanager
def compile_with_fences(kernel: Any, arch: int) -> Iterator[str]:
    """Adds the fences to what is compiled inside, if `kernel` is ours and needs them.

    Yields:
        str: what tells the code from Triton's own in a cache; empty if nothing is added.
    """
    if not needs_fence(arch) or not kernel.module.startswith(f"{__package__}."):
        yield ""
        return
    from triton import knobs

    knobs.runtime.add_stages_inspection_hook = _hook  # pyright: ignore[reportAttributeAccessIssue]
    _ours.compiling = True
    try:
        yield _hook()[0]
    finally:
        _ours.compiling = False


def _hook(backend: Any = None, stages: Any = None, *rest: Any) -> tuple[str, str]:
    """Triton's hook, which stays installed: it changes nothing of a kernel that is not ours.

    Without arguments it is asked for what tells the code apart in the caches on disk and in memory.
    """
    if not getattr(_ours, "compiling", False):
        return "", ""
    if stages is not None:
        to_ptx = stages["ptx"]
        stages["ptx"] = lambda source, metadata: add_fences(to_ptx(source, metadata))
    return KEY, KEY
