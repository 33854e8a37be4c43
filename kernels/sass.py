"""Machine code of a compiled kernel, read without a GPU by the tools that come with Triton."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path


def disassemble(cubin: bytes) -> str:
    """Resource usage and SASS of a cubin, by the cuobjdump that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", "--dump-sass", file.name]
        # nvdisasm is looked up on PATH and comes with Triton too
        path = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
        )
    return done.stdout


@cache
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def tensor_core_instructions(sass: str) -> dict[str, int]:
    """How often each tensor-core instruction occurs in SASS."""
    found = re.findall(r"\s((?:HGMMA|QGMMA|HMMA|UTC[A-Z]*MMA)\b)[\w.]*\s", sass)
    return dict(sorted(Counter(found).items()))
