"""Block sizes, warps and stages of attention's kernels: tables in `tuning/`, one for each GPU kind.

The first row counts whose settings, as far as it names them, are those of the call (a list names
several):

    step    "fwd", "dq" or "dkv"
    bits    16 or 32, the width of the dtype
    D       the head dimension, rounded up to 16, 32, 64, 128 or 256
    plain   no window, no documents, no dropout, no padded head dimension, no grouped heads: what
            else a kernel does takes registers, and with it another tile may be needed

Nothing is ever tuned while a model trains: `python -m bench.tune` writes the tables.
"""

import functools
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..runtime import family

TUNING = Path(__file__).with_name("tuning")
KEYS = ("step", "bits", "D", "plain")

_tried: dict[str, dict[str, int]] = {}


def config(step: str, x: Tensor, meta: dict[str, Any], arch: int) -> dict[str, int]:
    """Returns the settings with which to launch `step` on tensors like `x`, to be added to `meta`.

    They are BLOCK_M, BLOCK_N, num_warps, num_stages, and maxnreg where a bound on registers lets
    two blocks share a multiprocessor. `meta` has the other constexprs of the launch.
    """
    plain = meta["D"] == meta["BLOCK_D"] and not (
        meta["WINDOW"] or meta["DOCS"] or meta["DROPOUT"] or meta["GROUP"] > 1
    )
    if step in _tried:
        return _tried[step]
    return shipped(arch, step, 8 * x.element_size(), meta["BLOCK_D"], plain)


@contextmanager
def trying(step: str, settings: dict[str, int]) -> Iterator[None]:
    """Makes a step use these settings instead of the table's, while the tuner measures them."""
    _tried[step] = settings
    try:
        yield
    finally:
        del _tried[step]


@functools.cache
def shipped(arch: int, step: str, bits: int, D: int, plain: bool) -> dict[str, int]:
    """Returns the shipped settings (block sizes, warps, stages) for a call."""
    if arch == 0:  # interpreted: small, and of two sizes, so that short inputs show both
        return {"BLOCK_M": 32, "BLOCK_N": 64} if step == "dkv" else {"BLOCK_M": 64, "BLOCK_N": 32}
    row = next(row for row in rows(arch) if serves(row, (step, bits, D, plain)))
    return {name: value for name, value in row.items() if name not in KEYS}


def serves(row: dict[str, Any], call: tuple[str, int, int, bool]) -> bool:
    """Returns True if a row of the table is for a call of (step, bits, D, plain)."""
    named = ((row.get(key, value), value) for key, value in zip(KEYS, call, strict=True))
    return all(value in (it if isinstance(it, list) else [it]) for it, value in named)


@functools.cache
def rows(arch: int) -> list[dict[str, Any]]:
    """Reads the table of an arch; an untuned arch gets the safe table, with one warning."""
    path = table_path(arch)
    if path.stem == "default":
        warnings.warn(
            f"attention was never tuned for sm_{arch}, so it runs with safe settings, "
            f"not fast ones. Tuned: {', '.join(sorted(p.stem for p in TUNING.glob('sm_*')))}",
            stacklevel=2,
        )
    return json.loads(path.read_text(encoding="utf-8"))["attention"]


def table_path(arch: int) -> Path:
    """Returns the path of an arch's own table, else of its family's, else of the safe one."""
    paths = (TUNING / f"sm_{known}.json" for known in (arch, family(arch)))
    return next((path for path in paths if path.exists()), TUNING / "default.json")
