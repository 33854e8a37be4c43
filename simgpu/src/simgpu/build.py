"""Builds the stand-ins for the libraries of NVIDIA's that the installed PyTorch asks for.

Which these are, with which names, symbols and versions of symbols, is read from PyTorch's own
libraries; the headers are those that come with Triton, or those in the folder that the environment
variable SIMGPU_CUDA_INCLUDE names. What `native/` does not write becomes a function that says its
name and fails.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
SOURCES = {
    "libcuda": "state memory stream order trace graph driver",
    "libcudart": "runtime", "libcudnn": "cudnn", "libcupti": "cupti", "libnccl": "nccl reduce",
}  # fmt: skip
"""Library -> the names of its files in `native/`."""
PREFIXES = {
    "cublasLt": "libcublasLt", "cublas": "libcublas", "cudnn": "libcudnn", "cuda": "libcudart",
    "cufft": "libcufft", "curand": "libcurand", "cusparseLt": "libcusparseLt",
    "cusparse": "libcusparse", "cusolver": "libcusolver", "cupti": "libcupti",
    "cuFile": "libcufile", "nccl": "libnccl", "nvshmem": "libnvshmem_host",
    "nvrtc": "libnvrtc", "nvJitLink": "libnvJitLink", "cu": "libcuda",
}  # fmt: skip
"""How the symbols of a library begin, for those that have no version; the first that fits."""
FAILS = {"libcudart": 801, "libcuda": 801}
"""The error of an entry that is not written: "not supported"; elsewhere 3, an internal error."""
CXX = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=default", "-Wall", "-Wno-attributes"]
HOOK = {
    "METADATA": "Metadata-Version: 2.1\nName: simgpu-hook\nVersion: 1\n",
    "entry_points.txt": "[torch.backends]\nsimgpu = simgpu:_after_torch\n",
}
"""Distribution with the entry point that `import torch` calls, on the path of our processes."""
PTXAS = """#!/bin/sh
# The assembler, which puts behind its result the PTX that it came from: that is what is run.
'{}' "$@" || exit
out= in=
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2; shift ;;
    *.ptx) in=$1 ;;
  esac
  shift
done
[ -n "$out" ] && [ -n "$in" ] || exit 0
{{ printf '\\n//SIMGPU-PTX\\n'; cat "$in"; printf '\\0'; }} >>"$out"
"""


def built() -> Path:
    """Returns the folder of the stand-ins for the installed PyTorch; builds them if they are new.

    Raises:
        RuntimeError: no compiler, no PyTorch, or a source that does not compile.
    """
    torch, triton = _folder("torch"), _folder("triton")
    place = f"{torch} {importlib.metadata.version('torch')}"
    cache = os.environ.get("SIMGPU_CACHE") or Path.home() / ".cache" / "simgpu"
    folder = Path(cache, hashlib.sha256(place.encode()).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    own = triton / "backends" / "nvidia" / "include"
    include = Path(os.environ.get("SIMGPU_CUDA_INCLUDE") or own)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        everything = _key(Path(__file__), include / "cuda.h", *sorted(NATIVE.iterdir()))
        if not _is_made(folder / "complete", everything):
            _build(folder, torch, triton, include)
            (folder / "complete.key").write_text(everything)
    return folder


def _key(*files: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _is_made(path: Path, key: str) -> bool:
    stamp = path.with_name(path.name + ".key")
    return stamp.exists() and stamp.read_text() == key


def _make(path: Path, key: str, *command: object) -> None:
    """Runs a command that makes `path`, unless that was made of the same; it appears whole."""
    if not _is_made(path, key):
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        _run(*command, "-o", whole)
        whole.replace(path)
        path.with_name(path.name + ".key").write_text(key)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not installed: simgpu stands in for what is under it")
    return Path(spec.submodule_search_locations[0])


def _run(*command: object) -> str:
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} was not found: simgpu needs g++ and binutils") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def wanted(torch: Path) -> dict[str, dict[str, str]]:
    """Returns soname -> symbol -> version of what PyTorch's libraries need and do not have."""
    libraries = sorted((torch / "lib").glob("*.so*"))
    if not any(path.name == "libtorch_cuda.so" for path in libraries):
        raise RuntimeError(f"{torch} is not a CUDA build of PyTorch")
    needed, symbols = set(), set()
    for path in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", path)))
        for line in _run("nm", "-D", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols.add((name, version.lstrip("@")))
    sonames = {n.split(".so")[0]: n for n in needed if re.match(r"lib(cu|nccl|nv)", n)}
    found: dict[str, dict[str, str]] = {soname: {} for soname in sonames.values()}
    for name, version in sorted(symbols):
        library = next((b for p, b in PREFIXES.items() if re.match(rf"{p}[A-Z_a-z]", name)), "")
        soname = version if version in found else sonames.get(library)
        if soname:
            found[soname][name] = version
    return found


def _build(folder: Path, torch: Path, triton: Path, include: Path) -> None:
    found = wanted(torch)
    _check_headers(include, next(n for n in found if n.startswith("libcudart.so")))
    driver = next(n for n in found if n.startswith("libcuda.so"))
    _library(folder, driver, found.pop(driver), include)
    ours = [folder / driver, "-ldl", "-lpthread"]
    dispatch = [
        *CXX, "-w", "-shared", NATIVE / "dispatch.cpp", f"-I{include}", f"-I{torch / 'include'}",
        f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda",
        "-Wl,--allow-shlib-undefined", *ours,
    ]  # fmt: skip
    key = _key(NATIVE / "dispatch.cpp", include / "cuda.h", *sorted(NATIVE.glob("*.h")))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(_make, folder / "libsimgpu.so", key, "g++", *dispatch)]
        for soname, symbols in found.items():
            jobs.append(pool.submit(_library, folder, soname, symbols, include, *ours))
        for job in jobs:
            job.result()
    for name in ("ptxas", "ptxas-blackwell"):
        script = folder / name
        script.write_text(PTXAS.format(triton / "backends" / "nvidia" / "bin" / name))
        script.chmod(0o755)
    hook = folder / "hook" / "simgpu_hook-1.dist-info"
    hook.mkdir(parents=True, exist_ok=True)
    for name, text in HOOK.items():
        (hook / name).write_text(text)


def _check_headers(include: Path, cudart: str) -> None:
    """Raises unless the headers are of the CUDA that PyTorch was built for.

    Names and structures change from one major version to the next.
    """
    headers = re.search(r"define CUDA_VERSION (\d+)\d{3}$", (include / "cuda.h").read_text(), re.M)
    torch = cudart.removeprefix("libcudart.so.").split(".")[0]
    if headers is None or headers[1] != torch:
        raise RuntimeError(
            f"PyTorch was built for CUDA {torch}, but the headers in {include} are of CUDA "
            f"{headers and headers[1]}: set SIMGPU_CUDA_INCLUDE to a folder of CUDA {torch}'s"
        )


def _library(
    folder: Path, soname: str, symbols: dict[str, str], include: Path, *libraries: object
) -> None:
    base = soname.split(".so")[0]
    lines = ['extern "C" int simgpu_missing(const char*, const char*, int);', 'extern "C" {']
    for name in symbols:
        call = f'simgpu_missing("{base}", "{name}", {FAILS.get(base, 3)})'
        if re.search("(Error|Status)(String|Name)$", name):
            call = '(long)"not simulated"'
        lines.append(f"__attribute__((weak)) long {name}() {{ return {call}; }}")
    stubs = folder / f"{base}.cpp"
    stubs.write_text("\n".join([*lines, "}\n"]))
    versions = sorted({version for version in symbols.values() if version})
    script = folder / f"{base}.map"
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
    sources = [NATIVE / f"{name}.cpp" for name in SOURCES.get(base, "").split()]
    numbers = [f"-DSIMGPU_{name.upper()}={_version(name)}" for name in ("nccl", "cudnn")]
    _make(
        folder / soname,
        _key(stubs, script, include / "cuda.h", *sorted(NATIVE.glob("*.h")), *sources),
        "g++", *CXX, "-shared", stubs, *sources, f"-I{NATIVE}", f"-I{include}", *numbers,
        f"-Wl,-soname,{soname}", *([f"-Wl,--version-script={script}"] if versions else []),
        *libraries,
    )  # fmt: skip


def _version(library: str) -> int:
    """The version of a library that PyTorch was built for, as that library numbers it."""
    for line in importlib.metadata.requires("torch") or []:
        if match := re.match(rf"nvidia-{library}-cu\d+==(\d+)\.(\d+)\.(\d+)", line):
            first, second, third = map(int, match.groups())
            return first * 10000 + second * 100 + third
    return 0
