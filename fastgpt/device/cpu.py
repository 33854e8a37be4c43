"""Settings of this process that make training on a CPU faster: waiting, memory, imports.

PyTorch's threads wait for each other by spinning, which is fastest on an idle machine. On a busy
one a thread that spins keeps its core from the thread that it waits for: with as many other busy
processes as cores, training fell to a tenth of its speed or less.
"""

import ctypes
import functools
import inspect
import platform
import threading
import time
from pathlib import Path

import torch

from fastgpt.files import cores

LOOK_S = 0.5
"""Seconds between two looks at how long the training thread waited for a core."""
CROWDED = 0.1
"""Least share of its time that it waits on a busy machine. On an idle one it is under 0.01."""
CALM_LOOKS = 4
"""Number of looks in a row without other programs after which threads spin again."""


def prepare(*, compiled: bool) -> None:
    """Sets up this process for training on a CPU.

    Args:
        compiled: True if torch.compile is going to be used.
    """
    keep_freed_memory()
    if not compiled:
        skip_dynamo_import()
    if torch.get_num_threads() > 1:
        _start_watching(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat"))


def keep_freed_memory() -> None:
    """Tells glibc's allocator to keep freed memory, so that the next step can reuse it.

    By default it returns large blocks to the system, and getting them back costs page faults and
    zeroing: a step of 6 layers of 384 (B=16, T=256, bf16, two AVX-512 cores) took 549 ms instead of
    463 ms. The process then keeps its peak memory. With other allocators this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**30)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 2**26)


def skip_dynamo_import() -> None:
    """Keeps PyTorch's optimizers from importing torch._dynamo, which takes a second.

    Their methods import it to tell it to leave them alone. Without torch.compile there is nothing
    to tell; a program that later compiles a call of these methods compiles through them.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        vars(function).setdefault("__dynamo_disable", function)


# --- waiting --------------------------------------------------------------------------------------


@functools.cache
def _start_watching(schedstat: Path) -> None:
    threading.Thread(target=adapt_spinning, args=(schedstat,), name="waiting", daemon=True).start()


def adapt_spinning(schedstat: Path) -> None:
    """Makes PyTorch's threads sleep while they wait, as long as other programs need the cores.

    libgomp, the OpenMP of PyTorch's builds for Linux, reads its settings once, at its start. But it
    hardly spins while a process has more OpenMP threads than logical cores. So on a busy machine
    further teams of threads are kept, which do nothing. Results do not depend on them.

    Args:
        schedstat: Linux's file with the times that the training thread ran, and waited for a core;
            it goes with the thread, and the watch ends.
    """
    before, calm, let_go = _times(schedstat), 0, None
    while schedstat.exists():
        time.sleep(LOOK_S)
        now = _times(schedstat)
        ran, waited = (after - earlier for earlier, after in zip(before, now))
        before = now
        if ran + waited < 1e9 * LOOK_S / 5:  # an idle thread shows nothing
            continue
        crowded = waited > CROWDED * (ran + waited)
        calm = 0 if crowded else calm + 1
        if crowded and let_go is None:
            let_go = threading.Event()
            threads = torch.get_num_threads()  # a team adds all but the thread that starts it
            for _ in range((cores() - threads) // max(1, threads - 1) + 1):
                threading.Thread(target=_hold_threads, args=(let_go,), daemon=True).start()
        elif let_go is not None and calm >= CALM_LOOKS:
            let_go.set()
            let_go = None
    if let_go is not None:
        let_go.set()


def _times(schedstat: Path) -> tuple[int, int]:
    """Reads the nanoseconds that a thread ran and waited; 0 and 0 where nothing says so."""
    try:
        ran, waited = map(int, schedstat.read_text().split()[:2])
    except (OSError, ValueError):
        return 0, 0
    return ran, waited


def _hold_threads(let_go: threading.Event) -> None:
    """Keeps a team of OpenMP threads, which end with the thread that began them."""
    torch.zeros(torch.get_num_threads() * 2**17).add_(1)  # PyTorch gives each thread 2**15 at least
    let_go.wait()
