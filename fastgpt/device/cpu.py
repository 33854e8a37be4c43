"""Settings of this process that make training on a CPU faster: threads, waiting, memory, imports.

PyTorch's threads wait for each other by spinning, which is fastest on an idle machine. On a busy
one a thread that spins keeps its core from the thread that it waits for: with as many other busy
processes as cores, training fell to a tenth of its speed or less.
"""

import ctypes
import functools
import inspect
import os
import platform
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.device.device import device_name
from fastgpt.files import cores, recall, remember

LOOK_S = 0.5
"""Seconds between two looks at how long the training thread waited for a core."""
CROWDED = 0.1
"""Least share of its time that it waits on a busy machine. On an idle one it is under 0.01."""
CALM_LOOKS = 4
"""Number of looks in a row without other programs after which threads spin again."""
PROXY_FLOPS = 2e9
"""Most FLOPs of the work by which numbers of threads are compared."""
PROXY_S = 0.15
"""Seconds to spend on each number of threads."""


def prepare(width: int, tokens: int, dtype: torch.dtype, *, compiled: bool, alone: bool) -> None:
    """Sets up this process for training on a CPU.

    Args:
        width: of the model.
        tokens: number of tokens in a micro-batch.
        dtype: of the matrix products.
        compiled: True if torch.compile is going to be used.
        alone: True if this is the only rank; the others keep the number of threads they were given.
    """
    keep_freed_memory()
    if not compiled:
        spare_dynamo()
    if "OMP_NUM_THREADS" not in os.environ and alone:  # torchrun sets it
        torch.set_num_threads(thread_count(width, tokens, dtype))
    if torch.get_num_threads() > 1:
        _start_watching(_schedstat())


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


def spare_dynamo() -> None:
    """Keeps PyTorch's optimizers from importing torch._dynamo, which takes a second.

    Their methods import it to tell it to leave them alone. Without torch.compile there is nothing
    to tell; a program that later compiles a call of these methods compiles through them.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        vars(function).setdefault("__dynamo_disable", function)


# --- number of threads ----------------------------------------------------------------------------


def thread_count(width: int, tokens: int, dtype: torch.dtype) -> int:
    """Returns the number of threads with which layers of this width are fastest here.

    The first call on a machine takes at most 2 seconds; the answer is kept in the cache folder,
    unless other programs needed the cores meanwhile. Up to PyTorch's own number, the number of
    physical cores, each half of the one before is tried.
    """
    most = _own_number()
    facts = (device_name("cpu").split(",")[0], most, torch.__version__, dtype, tokens, width)
    key = ", ".join(map(str, facts))
    known = recall("threads.json")
    found = known.get(key)
    if type(found) is int and 1 <= found <= most:
        return found
    before = _times(_schedstat())
    found = _fastest(width, tokens, dtype, most)
    if _crowded(before, _times(_schedstat())):
        return most
    remember("threads.json", known | {key: found})
    return found


@functools.cache
def _own_number() -> int:
    """Returns the number of threads that PyTorch began with."""
    return torch.get_num_threads()


def _fastest(width: int, tokens: int, dtype: torch.dtype, most: int) -> int:
    rows = max(1, min(tokens, int(PROXY_FLOPS / (16 * width**2))))
    x, up, down = (
        torch.randn(n, m).to(dtype)
        for n, m in ((rows, width), (4 * width, width), (width, 4 * width))
    )
    best, count, seconds = most, most, _seconds(x, up, down, most)
    while count > 1:
        count //= 2
        fewer = _seconds(x, up, down, count)
        if fewer > 1.5 * seconds:
            break
        if fewer < 0.95 * seconds:  # more threads unless fewer are clearly faster
            best, seconds = count, fewer
    torch.set_num_threads(most)
    return best


def _seconds(x: Tensor, up: Tensor, down: Tensor, threads: int) -> float:
    """Times a feed-forward layer, in seconds: the least of several runs."""
    torch.set_num_threads(threads)
    best, end = float("inf"), time.perf_counter() + PROXY_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        F.layer_norm(x + F.linear(F.gelu(F.linear(x, up)), down), x.shape[1:])
        best = min(best, time.perf_counter() - start)
    return best


# --- waiting --------------------------------------------------------------------------------------


def _schedstat() -> Path:
    """Returns Linux's file with the times that this thread ran, and waited for a core."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")


def _times(schedstat: Path) -> tuple[int, int]:
    """Reads the nanoseconds that a thread ran and waited; 0 and 0 where nothing says so."""
    try:
        ran, waited = map(int, schedstat.read_text().split()[:2])
    except (OSError, ValueError):
        return 0, 0
    return ran, waited


def _crowded(before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Returns True if a thread waited for a core for more than a `CROWDED` part of its time."""
    ran, waited = (after - earlier for earlier, after in zip(before, now))
    return waited > CROWDED * (ran + waited)


@functools.cache
def _start_watching(schedstat: Path) -> None:
    threading.Thread(target=Waiting(schedstat).watch, name="waiting", daemon=True).start()


class Waiting:
    """Makes PyTorch's threads sleep while they wait, as long as other programs need the cores.

    libgomp, the OpenMP of PyTorch's builds for Linux, reads its settings once, at its start. But it
    hardly spins while a process has more OpenMP threads than logical cores. So on a busy machine
    further teams of threads are kept, which do nothing. Results do not depend on them.

    Args:
        schedstat: file of the thread that trains; see `_schedstat`.
    """

    def __init__(self, schedstat: Path) -> None:
        self._schedstat = schedstat
        self._before = _times(schedstat)
        self._calm = 0
        self.let_go: threading.Event | None = None
        """Ends the further teams; None while there are none, and threads spin."""

    def watch(self) -> None:
        """Looks until the thread that trains has ended."""
        while self._schedstat.exists():
            time.sleep(LOOK_S)
            self.look()
        self.release()

    def look(self) -> None:
        """Compares the time that the thread waited for a core since the last look."""
        before, self._before = self._before, _times(self._schedstat)
        if sum(self._before) - sum(before) < 1e9 * LOOK_S / 5:  # an idle thread shows nothing
            return
        crowded = _crowded(before, self._before)
        self._calm = 0 if crowded else self._calm + 1
        if crowded and self.let_go is None:
            self.let_go = threading.Event()
            own = torch.get_num_threads()  # of which a team adds all but the one that begins it
            for _ in range((cores() - own) // max(1, own - 1) + 1):
                threading.Thread(target=_hold_team, args=(self.let_go,), daemon=True).start()
        elif self._calm >= CALM_LOOKS:
            self.release()

    def release(self) -> None:
        """Lets the threads spin again."""
        if self.let_go is not None:
            self.let_go.set()
            self.let_go = None


def _hold_team(let_go: threading.Event) -> None:
    """Keeps a team of OpenMP threads, which end with the thread that began them."""
    torch.zeros(torch.get_num_threads() * 2**17).add_(1)  # PyTorch gives each thread 2**15 at least
    let_go.wait()
