"""Checks of this machine. Each yields what it found, and then its possible faults, of which the
first that holds counts: (does it hold, state, words to add, cure)."""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastgpt.commands import installed
from fastgpt.device.toolchain import has_compiler, missing_for_triton
from fastgpt.errors import UserError, brief, counted, reason
from fastgpt.files import data_dir, sync
from fastgpt.require_torch import repaired

OK, WARNING, PROBLEM = "ok", "warning", "problem"
"""States. problem: a run fails or computes wrong values; warning: it may be slow, or is untried."""
SHARED, FILES = 2**30, 1024
"""Bytes of /dev/shm that NCCL's guide gives a container (`--shm-size=1g`), and open files: a rank
has up to 128 shards, its libraries and a connection to each other rank."""
CHECKPOINTS, SLOW = 5 * 1.5e9, 50e6
"""Bytes of checkpoints of GPT-2 124M: three, the best one, and one that is being written; bytes per
second below which one takes over half a minute."""
PIP = f"{sys.executable} -m pip install"
CUDA_BUILD = "install a CUDA build of torch: pytorch.org/get-started"
Found = Iterator[tuple[Any, ...]]


class Finding(NamedTuple):
    """Result of a check, in one line, with the cure if its state is not ok."""

    check: str
    state: str
    found: str
    cure: str = ""


def run(check: Callable[..., Found], *given: Any) -> list[Finding]:
    """Returns the findings of a check; an error that it raises is one, too."""
    name, findings = check.__name__, []
    try:
        for what, *faults in check(*given):
            state, words, cure = next((x[1:] for x in faults if x[0]), (OK, "", ""))
            findings.append(Finding(name, state, f"{what}{words}", cure))
    except Exception as error:
        findings.append(Finding(name, PROBLEM, f"the check failed: {brief(error)}", repaired()))
    return findings


def python() -> Found:
    old = sys.version_info < (3, 11), PROBLEM, ", which is too old", "install Python 3.11 or newer"
    yield f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})", old


def compiler() -> Found:
    found, _, cure = missing_for_triton().partition(": ")
    slow = ": runs use neither our kernels nor torch.compile"
    no_cpp = ", but no C++ compiler (CXX, g++, clang++): runs do not use torch.compile"
    yield (
        found or "C compiler and Python.h",
        (found, WARNING, slow, cure or f"{PIP} triton"),
        (not has_compiler(), WARNING, no_cpp, "apt install g++ (dnf: gcc-c++)"),
    )


def limits() -> Found:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else SHARED
    cure = "docker run --shm-size=1g; on Kubernetes an emptyDir of medium Memory at /dev/shm"
    little = size < SHARED, WARNING, ": too little for NCCL between several GPUs", cure
    yield f"{size / 2**20:,.0f} MiB of shared memory", little
    if os.name == "posix":
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: no limit
        few = 0 <= files < FILES, WARNING, ": too few for many ranks", "ulimit -n 4096"
        yield f"{files} open files", few


def disk() -> Found:
    """Checks free space and write speed where runs and data are, or are to be made."""
    for folder, setting in ((Path("runs"), "--run-dir"), (data_dir(), "the variable FASTGPT_DATA")):
        there = next(x for x in (folder.absolute(), *folder.absolute().parents) if x.exists())
        cure, failed = f"free some space, or choose another: {setting}", ""
        block = os.urandom(2**25)
        start = time.perf_counter()
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(block)
                sync(file)
        except OSError as error:
            failed = reason(error)
        speed, free = len(block) / (time.perf_counter() - start), shutil.disk_usage(there).free
        yield (
            f"{free / 1e9:,.1f} GB free, written at {speed / 1e6:,.0f} MB/s ({there})",
            (failed, PROBLEM, f", which then failed: {failed}", cure),
            (free < CHECKPOINTS, WARNING, ": too little for checkpoints of GPT-2 124M", cure),
            (speed < SLOW, WARNING, ": checkpoints will be slow", f"a faster disk: {setting}"),
        )


def versions() -> Found:
    """Looks for PyTorch and Triton in the table of the pairs that were run."""
    import tomllib  # of Python 3.11

    import torch

    table = tomllib.loads((Path(__file__).parents[1] / "versions.toml").read_text("utf-8"))["pair"]
    pinned = next(x for x in table if x.get("pinned"))
    triton, have = installed("triton") or "missing", torch.__version__.partition("+")[0]
    known = next((x for x in table if x["torch"] == have), None)
    asked, suite = (known["triton"], known["ran"]["suite"]) if known else (triton, "passes")
    cure = f"{PIP} torch=={pinned['torch']} triton=={pinned['triton']}"
    yield (
        f"PyTorch {torch.__version__}, Triton {triton}",
        (not known, WARNING, ": fastgpt was never run with this PyTorch", cure),
        (triton not in (asked, "missing"), PROBLEM, f": it needs Triton {asked}", cure),
        (suite != "passes", WARNING, f": {suite} of fastgpt's tests (docs/versions.md)", cure),
    )


def gpus() -> Found:
    import torch

    from fastgpt.device import device

    cuda, count = torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = device.DRIVER.read_text("utf-8") if device.DRIVER.exists() else ""
    number = (re.findall(r"\d+\.\d+[.\d]*", driver) or ["unknown"])[0]
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        used = f": other programs use {(total - free) / 2**30:.1f} GiB"
        found = f"{torch.cuda.get_device_name(i)}, {total / 2**30:.1f} GiB, driver {number}"
        yield found, (free < 0.9 * total, WARNING, used, "end what nvidia-smi shows")
    if not count:
        why = device.why_no_cuda()
        cure = "install the newest driver; in a container, docker run --gpus all"
        yield (
            why or f"none for CUDA: runs use {device.device_name('cpu')}",
            (why, PROBLEM, "", cure if cuda else CUDA_BUILD),
            (cuda and not driver, WARNING, f"; no NVIDIA driver is loaded for CUDA {cuda}", cure),
            (driver, WARNING, "; CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES"),
        )
    if count > 1:
        lacks = not torch.distributed.is_nccl_available(), PROBLEM, " is missing", CUDA_BUILD
        yield f"NCCL for {count} GPUs", lacks


def data() -> Found:
    """Reads every shard of the prepared directories in the data folder."""
    from fastgpt.data.corpus import has_shards, open_shards
    from fastgpt.data.verify import check_all

    for folder in filter(has_shards, sorted(data_dir().glob("*"))):
        cure = f"copy {folder} again; or remove it, python -m fastgpt.prepare SOURCE --out {folder}"
        try:
            corpus = open_shards(folder, tokenizer="auto")
            check_all(shards := corpus.shards(), corpus.tokenizer.vocab_size)
            yield (f"{folder}: {counted(len(shards), 'shard')} as written",)
        except (UserError, OSError) as error:
            yield reason(error), (True, PROBLEM, "", cure)


def ops() -> Found:
    """Checks the first problem of each op's `Spec`: our kernels on CUDA, else what CPUs use."""
    import torch

    from fastgpt.device import device
    from fastgpt.kernels.specs import SPECS

    cuda = torch.cuda.is_available() and device.kind_of("cuda").kernels
    on, wrong = "cuda" if cuda and not missing_for_triton() else "cpu", []
    cure = "choose another --ops.* for it, such as torch; and report it as a bug of fastgpt"
    for name, spec in SPECS.items():
        try:
            found = [x for d in (torch.float32, torch.bfloat16) for x in spec.faults(on, d)]
        except Exception as error:
            found = [brief(error)]
        wrong += [f"{name}: {x}" for x in found[:1]]
    right = f"{len(SPECS) - len(wrong)} of {len(SPECS)} are right on {on}, in fp32 and bf16"
    yield right, (wrong, PROBLEM, f"; wrong are {'; '.join(wrong)}", cure)


CHECKS = python, compiler, limits, disk, versions, gpus, data, ops
