"""Builds the folder that Hugging Face's library `kernels` loads: our ops as a kernel of its Hub.

    python -m kernels.hub [--out DIR] [--version N]

The folder has `build/torch-cuda` and `build/torch-cpu`, each with the ops, `kernels.layers`, our
license, and the metadata by which the library knows it; a card (README.md, and CARD.md where
Hugging Face's own tool looks for it); and build.toml. None of it imports fastgpt. To load and
publish it: docs/kernels/hub.md. Format: huggingface.co/docs/kernels, "Kernel requirements".
"""

import argparse
import json
import re
import shutil
import textwrap
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOT_OPS = {"alias", "aot", "graphs", "hub", "parity", "proof", "spec", "specs", "upgrade"}
"""Modules and folders that are for tests, measurements, builds and fastgpt alone: they stay out."""
BACKENDS = {"cpu": {}, "cuda": {"archs": ["8.0", "9.0", "10.0", "12.0"]}}
"""Variants, with the compute capabilities that `kernels.aot` compiles for; on the Hub each stands
for the newer ones of its major number, too."""
CONFIG = """\
[general]
name = "fastgpt-kernels"
version = {version}
edition = 5
license = "mit"
backends = ["cpu", "cuda"]

[torch-noarch]
pyext = ["json", "py"]
"""
CARD = """\
---
library_name: kernels
license: mit
---
# fastgpt-kernels

Triton kernels for GPTs, which have run on simulated GPUs, not yet on a real one. On a CPU the ops
are plain PyTorch. `kernels.get_local_kernel(path)` loads a copy of this folder.

Functions, each with a docstring: {functions}.

Layers: {layers}.
"""


def files() -> dict[str, bytes]:
    """Returns a variant without its metadata: the content of each file by its path.

    Raises:
        OSError: a file cannot be read; the license is beside kernels/ in a checkout alone.
    """
    kernels = ROOT / "kernels"
    found = {}
    for path in sorted(kernels.rglob("*")):
        name = path.relative_to(kernels)
        if path.suffix in (".py", ".json") and not NOT_OPS & {path.stem, *name.parts}:
            found[name.as_posix()] = path.read_bytes()
    start = found["__init__.py"].decode()
    docstring, ops = start.partition("\nif ")[0], textwrap.dedent(start.partition("\nelse:\n")[2])
    layers = 'from . import layers\n\n__all__ += ["layers"]\n'
    found["__init__.py"] = f"{docstring}\n{ops}\n{layers}".encode()
    return found | {"LICENSE": (ROOT / "LICENSE").read_bytes()}


def metadata(contents: dict[str, bytes], backend: str, version: int) -> dict[str, Any]:
    """Returns a variant's metadata.json, whose `id` is another after any change of its files."""
    digests = {
        name: b64encode(sha256(content).digest()).decode() for name, content in contents.items()
    }
    unique = sha256(json.dumps([version, digests]).encode()).hexdigest()[:12]
    return {
        "name": "fastgpt-kernels",
        "id": f"_fastgpt_kernels_{backend}_{unique}",
        "version": version,
        "license": "mit",
        "python-depends": [],
        "backend": {"type": backend, **BACKENDS[backend]},
        "digest": {"algorithm": "sha256", "files": digests},
    }


def build(out: Path, version: int = 0) -> None:
    """Writes the folder `out`, in place of an earlier build.

    Raises:
        ValueError: the version is negative, or `out` has other files.
        OSError: a file cannot be read or written.
    """
    if version < 0:
        raise ValueError(f"version: expected 0 or more, got {version}")
    config = out / "build.toml"
    earlier = config.is_file() and "fastgpt-kernels" in config.read_text(encoding="utf-8")
    if out.exists() and any(out.iterdir()) and not earlier:
        raise ValueError(f"{out} has other files: expected a new or empty folder, or a build")
    contents = files()
    shutil.rmtree(out / "build", ignore_errors=True)
    functions = re.findall(r'^    "(\w+)",$', contents["__init__.py"].decode(), re.M)
    layers = re.findall(r"^class (\w+)", contents["layers.py"].decode(), re.M)
    card = CARD.format(functions=", ".join(functions), layers=", ".join(layers)).encode()
    described = {"README.md": card, "build/CARD.md": card}
    described["build.toml"] = CONFIG.format(version=version).encode()
    for backend in BACKENDS:
        about = json.dumps(metadata(contents, backend, version), indent=1).encode()
        variant = contents | {"metadata.json": about}
        described |= {f"build/torch-{backend}/{name}": it for name, it in variant.items()}
    for name, content in described.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m kernels.hub", description="Builds the folder that Hugging Face's kernels loads."
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/hub"), help="folder to write (build/hub)")
    add("--version", type=int, default=0, help="on the Hub; 0, the default, promises no stable API")
    args = parser.parse_args(argv)
    try:
        build(args.out, args.version)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"wrote {args.out}, which kernels.get_local_kernel loads")


if __name__ == "__main__":
    main()
