"""Judges an upgrade of Triton: compiles and executes our kernels with both versions, and compares.

    python -m kernels.upgrade --to 3.9 [--from 3.7.1] [--brief] [--arch 80 90] [--op norm]

Each version is installed into a folder of its own, without dependencies, and a process that imports
it from there reports what it makes of our kernels (`kernels.proof.report`). The reports are
compared as `kernels.aot --base` compares two commits, but registers, memory, instructions and
clocks may grow by a tenth, and other bits of a result are not worse.

The exit status is 0 if nothing is worse, 1 if something is, 2 if nothing could be compared. A full
run takes about half an hour of one core for each version and arch, --problems 3 ten minutes,
--brief one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from .aot import BadUsageError
from .proof.report import OPS, flags
from .proof.rules import Report, compare, show

GROWTH = 0.1
"""Share by which a resource may grow; a change of speed shows in the ceiling."""


def installed_into(folder: Path, release: str) -> Path:
    """Returns the folder of a version of Triton, which pip downloads unless it is there."""
    target = folder / f"triton-{release}"
    if not (target / "triton" / "__init__.py").exists():
        exact = release if release.count(".") > 1 else f"{release}.*"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        print(f"installing triton=={exact} into {target}", flush=True)
        if subprocess.run([*pip, f"triton=={exact}"]).returncode:
            raise BadUsageError(f"pip cannot install triton=={exact}; expected a released version")
    return target


def report_with(release: str, folder: Path, passed_on: list[str]) -> Report:
    """Reports what a version of Triton makes of the kernels; flags of `report` are passed on."""
    target, out = installed_into(folder, release).resolve(), (folder / f"{release}.json").resolve()
    out.unlink(missing_ok=True)
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    print(f"Triton {release}", flush=True)
    command = [sys.executable, "-m", "fastgpt.kernels.proof.report", "--out", str(out), *passed_on]
    if subprocess.run(command, env=environment).returncode or not out.exists():
        raise BadUsageError(f"the kernels do not run with Triton {release}: see above")
    return json.loads(out.read_text(encoding="utf-8"))


def released(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text}: expected a version such as 3.9")
    return text


def main(argv: list[str] | None = None) -> int:
    cache = Path(os.environ.get("FASTGPT_CACHE", "~/.cache/fastgpt")).expanduser()
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = own.add_argument
    add("--to", type=released, required=True, metavar="VERSION", help="Triton to move to")
    add("--from", dest="old", type=released, default=version("triton"), metavar="VERSION",
        help="Triton to compare with [the installed one]")  # fmt: skip
    add("--folder", type=Path, default=cache / "upgrade", help="folder of the versions and reports")
    parser = argparse.ArgumentParser(
        prog="python -m kernels.upgrade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[own, flags()],
        allow_abbrev=False,
    )
    args, (_, passed_on) = parser.parse_args(argv), own.parse_known_args(argv)
    if strange := sorted(set(args.op) - set(OPS)):
        parser.error(f"--op {strange[0]}: expected some of {', '.join(OPS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        old, new = (report_with(release, args.folder, passed_on) for release in (args.old, args.to))
    except BadUsageError as error:
        print(f"kernels.upgrade: {error}")
        return 2
    worse = show(compare(old, new, GROWTH))
    verdict = f"no, {worse} findings are worse" if worse else "yes, nothing is worse"
    print(f"upgrade Triton {old['triton']} to {new['triton']}? {verdict}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
