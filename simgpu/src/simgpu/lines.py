"""The lines of Python that device work and waits come from, for the messages of the stand-ins.

The innermost few frames count that are not PyTorch's, Triton's or ours. A place is a
number, and its text is made once.
"""

import atexit
import ctypes
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

FRAMES = 3
_SITE = Path(torch.__file__).parents[1]
_FOREIGN = (
    "<",
    *(f"{folder}/" for folder in (_SITE / "torch", _SITE / "triton", Path(__file__).parent)),
)
_numbers: dict[Any, int] = {}
_places = ["(no Python)"]
_waits: Counter[int] = Counter()
_callbacks: list[Any] = []
_cuda = ctypes.PyDLL("libcuda.so.1")  # no other thread comes between


def install() -> None:
    """Lets the driver's stand-in ask for lines."""
    _callbacks.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(here))
    _cuda.simgpu_set_lines(_callbacks[0])
    atexit.register(_cuda.simgpu_set_lines, None)


def waits() -> Counter[str]:
    """Returns how often the host waited for a device so far, by "file:line in function"."""
    found: Counter[str] = Counter()
    for place, n in (+_waits).items():
        found[_places[place].partition(" < ")[0]] += n
    return found


def here(waits: int) -> int:
    """Returns the number of the place that the thread is at; notes `waits` there."""
    frame: FrameType | None = sys._getframe().f_back
    if frame is None:  # a thread of autograd's, for which the main one waits
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[FrameType] = []
    while frame is not None and len(found) < FRAMES:
        if not frame.f_code.co_filename.startswith(_FOREIGN):
            found.append(frame)
        frame = frame.f_back
    key = tuple((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lasti) for frame in found)
    number = _numbers.setdefault(key, len(_places))
    if number == len(_places):
        place = [f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}" for f in found]
        _places.append(" < ".join(place) or "(no Python)")
        _cuda.simgpu_note_place(_places[-1].encode())
    _waits[number] += waits
    return number
