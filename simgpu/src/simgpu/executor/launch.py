"""From a recorded launch to executed PTX: compiling, binding the arguments, running."""

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from simgpu.executor import arithmetic, atomics, groups, moves, tcgen05, warp  # noqa: F401  (they register)
from simgpu.executor.build import Build
from simgpu.executor.errors import FaultError, UnknownPtxError
from simgpu.executor.machine import Machine
from simgpu.executor.memory import GlobalMemory, Region, smallest_access
from simgpu.executor.ptx import parse_ptx

LANES = 4096
"""Threads that run at a time: enough for numpy, few enough for caches."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as the compiler leaves it."""

    ptx: str
    warps: int
    shared: int
    """Bytes of shared memory of a thread block."""


@functools.lru_cache(maxsize=12)  # some take 10 MB
def built(ptx: str, follow: bool = False) -> Build:
    """The steps of a program, made once."""
    program = parse_ptx(ptx)
    try:
        return Build(program, follow)
    except UnknownPtxError as error:
        raise UnknownPtxError(f"{program.name}: {error}") from None


def run_ptx(
    kernel: Compiled,
    grid: Sequence[int],
    values: Sequence[Any],
    *,
    regions: Sequence[Region] = (),
    lanes: int = LANES,
) -> GlobalMemory:
    """Executes a launch of compiled PTX; tensors are changed in place.

    Where a warp reads what another one writes, without a barrier between, it is a fault if a store,
    a branch or an address of it depends on what was read. To find out, the thread blocks run again,
    on the memory that was there before them, and follow it. Triton has all warps load what one of
    them computes and stores, where a tile has fewer elements than there are threads.

    Args:
        kernel: what to run.
        grid: thread blocks in up to three dimensions.
        values: the kernel's parameters in their order: addresses and numbers. Those that the text
            has beyond them (scratch memory) are 0.
        regions: the tensors that it may touch.
        lanes: threads that run at a time, in whole blocks.

    Returns:
        GlobalMemory: with the marks of what was read and written.

    Raises:
        FaultError: the code does what it must not.
        UnknownPtxError: an instruction that the executor does not know.
    """
    program = built(kernel.ptx).program
    if len(values) > len(program.params):
        raise ValueError(f"{program.name} has {len(program.params)} parameters, got {len(values)}")
    given = [*values, *[0] * (len(program.params) - len(values))]
    params = {name: _bits(value, dtype) for (name, dtype), value in zip(program.params, given)}
    whole = (*map(int, grid), 1, 1)[:3]
    blocks = int(np.prod(whole))
    memory = GlobalMemory(regions, smallest_access(program, "global"))
    threads = 32 * kernel.warps
    at_once = max(1, lanes // threads)
    machine = functools.partial(
        Machine, params=params, grid=whole, threads=threads, shared=kernel.shared, memory=memory
    )
    with np.errstate(all="ignore"):
        for first in range(0, blocks, at_once):
            here = np.arange(first, min(first + at_once, blocks))
            _run(kernel.ptx, functools.partial(machine, blocks=here), memory)
    return memory


def _run(ptx: str, machine: Callable[..., Machine], memory: GlobalMemory) -> None:
    """Runs thread blocks; again, if there was a race, to see whether anything depends on it."""

    def run(follow: bool = False) -> None:
        build = built(ptx, follow=True) if follow else built(ptx)  # by the keys of its cache
        machine(build.program, build.blocks, build.registers()).run()

    fault = None
    try:
        run()
    except FaultError as error:
        fault = error
    if memory.raced():
        memory.back("followed")
        try:
            run(follow=True)
        except FaultError as error:
            if str(error) != str(fault):  # it names a register, and the race has no name yet
                memory.back("refused")
                run()
            raise
        memory.old.clear()
        memory.back("noted")
    if fault is not None:
        raise fault
    memory.old.clear()


def _bits(value: Any, dtype: np.dtype) -> Any:
    """A parameter's bits: of a float in float32, of an integer modulo its width."""
    if isinstance(value, float):
        return np.dtype(f"f{dtype.itemsize}").type(value).view(dtype)
    return dtype.type(int(value) % (1 << 8 * dtype.itemsize))


# --- Triton ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch `kernel[grid](*args, **meta)` of a `@triton.jit` function."""

    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]
    grid: tuple[int, ...]


around_compilation: list[Callable[[Any, int], AbstractContextManager[str]]] = []
"""Context managers that packages enter while a kernel of theirs is compiled: each takes the kernel
and the arch, and yields a text that tells the code from Triton's own in a cache, or nothing for the
kernels of others."""


def region(name: str, tensor: Any) -> Region:
    """Returns the memory that a kernel may touch through a torch tensor."""
    storage, item = tensor.untyped_storage(), tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    memory = storage.data_ptr(), storage.nbytes()
    return Region(name, tensor.data_ptr(), tuple(tensor.shape), strides, item, memory)


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compiles a launch for an arch as far as PTX, which is kept in Triton's cache."""
    from triton import __version__, knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    arguments, signature, attributes, given = specialised(launch)
    constexprs = {name: x for name, x in arguments.items() if signature[name] == "constexpr"}
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options: Any = backend.parse_options({**given, **source.parse_options()})
    with ExitStack() as stack:
        added = [stack.enter_context(each(launch.kernel, arch)) for each in around_compilation]
        key = "-".join((__version__, source.hash(), backend.hash(), options.hash()))
        name = hashlib.sha256("".join([key, *added]).encode()).hexdigest()
        path = Path(knobs.cache.dir) / "executed" / f"{name}.json"
        if not path.exists():
            compiled = _in_child(lambda: _to_ptx(source, target, backend, options))
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps(asdict(compiled)), encoding="utf-8")
            whole.replace(path)  # other processes see all of it or nothing
    return Compiled(**json.loads(path.read_text(encoding="utf-8")))


_jobs: list[Callable[[], Compiled]] = []
"""Compilations for the next forked process, which cannot be handed kernels: they do not pickle."""


def _in_child(job: Callable[[], Compiled]) -> Compiled:
    """Compiles in a forked process: Triton keeps 0.2 to 0.4 MB of each compilation forever."""
    _jobs[:] = [job]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_do_job).result()


def _do_job() -> Compiled:
    return _jobs[0]()


def _to_ptx(source: Any, target: Any, backend: Any, options: Any) -> Compiled:
    """Runs the compiler's stages up to PTX: the assembler behind them takes half of the time."""
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == "ptx":
            break
    return Compiled(module, metadata["num_warps"], metadata["shared"])


def execute(launch: Launch, arch: int, **options: Any) -> None:
    """Compiles a launch and runs it on its tensors, which are on the CPU."""
    run_launch(compile_launch(launch, arch), launch, **options)


def run_launch(kernel: Compiled, launch: Launch, **options: Any) -> None:
    """Runs compiled code on the tensors of the launch that it was compiled for."""
    arguments, signature, *_ = specialised(launch)
    passed = [(name, x) for name, x in arguments.items() if signature[name] != "constexpr"]
    values = [value.data_ptr() if hasattr(value, "data_ptr") else value for _, value in passed]
    regions = [region(name, value) for name, value in passed if hasattr(value, "data_ptr")]
    run_ptx(kernel, launch.grid, values, regions=regions, **options)


@functools.cache
def _binder(kernel: Any) -> Callable[..., Any]:
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, CUDABackend)


def specialised(launch: Launch) -> tuple[dict[str, Any], dict[str, str], dict, dict[str, Any]]:
    """Returns (arguments, signature, attributes, options), as Triton's launcher derives them."""
    from triton.backends.nvidia.compiler import CUDABackend

    arguments, found, options = _binder(launch.kernel)(*launch.args, **launch.meta)
    signature = {name: kind for name, (kind, _) in zip(arguments, found)}
    attributes = {
        (i,): CUDABackend.parse_attr(key)
        for i, (kind, key) in enumerate(found)
        if kind != "constexpr" and key
    }
    return arguments, signature, attributes, options


@contextmanager
def executed_on_cpu(arch: int, **options: Any) -> Iterator[list[Launch]]:
    """Executes what Triton launches inside it, `kernel[grid](...)` on CPU tensors.

    Yields the list that the launches are noted in. Takes the options of `run_ptx`.

    Raises:
        RuntimeError: Triton interprets kernels, so that it compiles none.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so no kernel is compiled; expected it unset")
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> None:
        arguments, *_, options_of = specialised(Launch(kernel, args, given, ()))
        whole = grid(arguments) if callable(grid) else grid
        launches.append(Launch(kernel, tuple(arguments.values()), options_of, tuple(whole)))
        execute(launches[-1], arch, **options)

    with mock.patch.object(JITFunction, "run", run):
        yield launches
