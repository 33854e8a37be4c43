"""Block sizes, warps and stages of attention's kernels: tables in kernels/tuning, one a GPU kind.

The first row counts whose settings, as far as it names them, are those of the call:

    triton  "3.6": the minor version, for rows that another version's compiler would spill
    step    "fwd", "dq" or "dkv"
    bits    16 or 32, the width of the dtype
    D       the head dimension, rounded up to 16, 32, 64, 128 or 256
    causal  whether there is a causal mask
    plain   no window, no documents, no dropout, no padded head dimension, no grouped heads: what
            else a kernel does takes registers, and with it another tile may be needed

Nothing is ever tuned while a model trains.
"""

import functools
import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

TUNING = Path(__file__).with_name("tuning")
KEYS = ("triton", "step", "bits", "D", "causal", "plain")


def config(step: str, x: Tensor, meta: dict[str, Any], arch: int) -> dict[str, int]:
    """What launches `step` on tensors like `x`: BLOCK_M, BLOCK_N, num_warps, num_stages, and where
    a bound on registers lets two blocks share a multiprocessor, maxnreg.

    Args:
        step: "fwd", "dq" or "dkv".
        x: any of q, k, v.
        meta: the constexprs of the launch.
        arch: see `runtime.arch`.

    Returns:
        dict[str, int]: to be added to `meta`.
    """
    plain = meta["D"] == meta["BLOCK_D"] and not (
        meta["WINDOW"] or meta["DOCS"] or meta["DROPOUT"] or meta["GROUP"] > 1
    )
    bits = 8 * x.element_size()
    return _config(arch, step, bits, meta["BLOCK_D"], meta["CAUSAL"], plain)


@functools.cache
def _config(arch: int, step: str, bits: int, D: int, causal: bool, plain: bool) -> dict[str, int]:
    if arch == 0:  # interpreted: small, and of two sizes, so that short inputs show both
        return {"BLOCK_M": 32, "BLOCK_N": 64} if step == "dkv" else {"BLOCK_M": 64, "BLOCK_N": 32}
    triton = ".".join(version("triton").split(".")[:2])
    call = dict(zip(KEYS, (triton, step, bits, D, causal, plain), strict=True))
    row = next(row for row in rows(arch) if all(row.get(k, call[k]) == call[k] for k in KEYS))
    return {name: value for name, value in row.items() if name not in KEYS}


@functools.cache
def rows(arch: int) -> list[dict[str, Any]]:
    """The table of an arch; of an unknown one the safe table, which is said once."""
    path = TUNING / f"sm_{arch}.json"
    if not path.exists():
        warnings.warn(
            f"attention was never tuned for sm_{arch}; it runs there in a safe configuration, "
            f"not a fast one. Tuned: {', '.join(sorted(p.stem for p in TUNING.glob('sm_*')))}",
            stacklevel=2,
        )
        path = TUNING / "default.json"
    return json.loads(path.read_text(encoding="utf-8"))["attention"]
