"""Compiles kernels ahead of time, without a GPU, and reads what Triton made of them."""

import ast
import functools
import hashlib
import inspect
import multiprocessing
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import fences
from ..runtime import Launch, recording
from .sass import Ceiling, Loop, ceiling, disassemble, instructions, loops, unit_of

FENCE = re.compile(
    r"fence\.proxy\.async|cp\.async\.wait_group|wgmma\.wait_group|wgmma\.fence|tcgen05\.wait"
    r"|tcgen05\.fence|mbarrier\.try_wait|bar(?:rier)?\.sync"
)
"""Instructions of PTX that order accesses to memory."""
MMA = re.compile(r"\s((?:HGMMA|QGMMA|HMMA|UTC[A-Z]*MMA)\b)[\w.]*\s")
"""Tensor-core instructions of SASS."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A shipped kernel variant, to be compiled ahead of time without a GPU.

    Args:
        label: name of the configuration within its kernels: "N=768 bf16 bias".
        run: calls launchers with tensors on the meta device; nothing is computed.
        mma: kernel name -> prefix of the SASS instruction that must occur: "HGMMA" (wgmma, sm_90),
            "HMMA" (mma.sync), "UTC" (tcgen05, sm_100). A kernel that is not named needs none.
    """

    label: str
    run: Callable[[], object]
    mma: Mapping[str, str] = field(default_factory=dict)


Variants = Callable[[int], Iterator[Variant]]
"""Function from an architecture (90 for sm_90) to the kernel variants that ship for it."""


@dataclass(frozen=True, slots=True)
class Config:
    """The compiler's input for one kernel launch: architecture, label, and the arguments."""

    arch: int
    label: str
    declared: str
    launch: Launch

    @property
    def kernel(self) -> str:
        return self.launch.kernel.__name__

    @property
    def key(self) -> str:
        return f"sm_{self.arch} {self.kernel} {self.label}"

    @property
    def folder(self) -> str:
        """Name of the folder of kernels/ that has the kernel."""
        return self.launch.kernel.fn.__module__.split(".")[-2]


@dataclass(slots=True)
class CompileResult:
    """The compiler's result for a `Config`: the resources that its code uses, or an error."""

    kernel: str
    arch: int
    config: str
    warps: int = 0
    registers: int = 0
    spilled: int = 0
    """Bytes of stack: all are spilled registers, because no kernel of ours has local arrays."""
    shared: int = 0
    columns: int = 0
    """Columns of tensor memory that a block allocates; 0 except on sm_100."""
    mma: dict[str, int] = field(default_factory=dict)
    """Number of tensor-core instructions, each by its name."""
    declared: str = ""
    error: str = ""
    loops: list[Loop] = field(default_factory=list)
    instructions: int = 0
    """Number of instructions, without padding."""
    units: dict[str, int] = field(default_factory=dict)
    """Number of instructions by the unit that runs them (`sass.UNITS`)."""
    fences: dict[str, int] = field(default_factory=dict)
    """Number of fences, waits and barriers in the PTX, each by its name."""

    @property
    def key(self) -> str:
        return f"sm_{self.arch} {self.kernel} {self.config}"

    @property
    def waits(self) -> bool:
        """True if a loop waits for a load that it has just asked for."""
        return any(loop.waits for loop in self.loops)

    def ceiling(self, loop: Loop) -> Ceiling | None:
        """Returns the upper bound of the speed of one of its loops; see `sass.ceiling`."""
        return ceiling(loop, self.arch, self.warps, self.registers, self.shared, self.columns)


# --- collect --------------------------------------------------------------------------------------


def collect(variants: Iterable[Variants], archs: Iterable[int]) -> Iterator[Config]:
    """Yields the compiler's input for every launch of the shipped variants, without duplicates."""
    seen = set()
    for arch in archs:
        for of_arch in variants:
            for variant in of_arch(arch):
                with recording(arch) as launches:
                    variant.run()
                for launch in launches:
                    name = launch.kernel.__name__
                    key = (arch, name, repr(specialised(launch)))
                    if key not in seen:
                        seen.add(key)
                        yield Config(arch, variant.label, variant.mma.get(name, ""), launch)


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict, dict[str, Any]]:
    """Returns (signature, constexprs, attributes, options), as Triton's launcher derives them."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, launch.args)) | launch.meta
    signature, constexprs, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values.pop(param.name)
        kind, key = "constexpr", value
        if not param.is_constexpr:
            kind, key = native_specialize_impl(
                CUDABackend,
                value,
                False,
                not param.do_not_specialize,
                not param.do_not_specialize_on_alignment,
            )
        signature[param.name] = kind
        if kind == "constexpr":
            constexprs[param.name] = key
        elif key:
            attributes[(i,)] = CUDABackend.parse_attr(key)
    return signature, constexprs, attributes, values


def fingerprint(config: Config) -> str:
    """Hashes everything that decides the machine code, except the compiler.

    These are the sources, what they are compiled for, and what adds fences, where it adds any;
    comments, docstrings and line numbers of kernels do not count.
    """
    kernel = config.launch.kernel
    fenced = config.declared.startswith(("HGMMA", "UTC")) and fences.needs_fence(config.arch)
    added = getattr(fences, "KEY", "") if fenced else ""
    text = repr((config.arch, config.declared, specialised(config.launch), sources(kernel), added))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sources(kernel: Any) -> dict[str, str]:
    """Returns the source of a kernel and of all functions it calls, and the globals they read."""
    found: dict[str, str] = {}
    open_ = [kernel]
    while open_:
        function = open_.pop()
        found[function.__name__] = _without_comments(function.fn)
        for name in function.fn.__code__.co_names:
            value = function.fn.__globals__.get(name)
            if isinstance(value, int | float) or type(value).__name__ == "constexpr":
                found[name] = repr(value)
            elif hasattr(value, "fn") and name not in found:
                open_.append(value)
    return dict(sorted(found.items()))


@functools.cache
def _without_comments(function: Callable[..., object]) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return ast.unparse(tree)  # ast.dump differs between versions of Python


# --- compile --------------------------------------------------------------------------------------

_configs: list[Config] = []
"""Configurations that the forked processes of `compile_all` read, as kernels cannot be pickled."""


def compile_all(configs: Iterable[Config], jobs: int | None = None) -> Iterator[CompileResult]:
    """Compiles configurations in parallel; yields the results in order, each once it is ready.

    Args:
        jobs: number of compilations at a time; None: one for each core.
    """
    global _configs
    _configs = list(configs)
    jobs = min(jobs or os.cpu_count() or 1, len(_configs))
    with multiprocessing.get_context("fork").Pool(max(1, jobs)) as pool:
        yield from pool.imap(_compile_nth, range(len(_configs)))


def _compile_nth(n: int) -> CompileResult:
    return compile_config(_configs[n])


def compile_config(config: Config) -> CompileResult:
    """Compiles one configuration for its arch and reads its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attributes, options = specialised(config.launch)
    source = ASTSource(config.launch.kernel, signature, constexprs, attributes)
    try:
        target = GPUTarget("cuda", config.arch, 32)
        with fences.compile_with_fences(config.launch.kernel, config.arch):
            compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # of any compiler pass; other configurations still get a row
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return CompileResult(config.kernel, config.arch, config.label, error=message)
    text = disassemble(compiled.asm["cubin"])
    code = instructions(text)
    usage = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    metadata: Any = compiled.metadata
    return CompileResult(
        kernel=config.kernel,
        arch=config.arch,
        config=config.label,
        warps=metadata.num_warps,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=metadata.shared,
        columns=getattr(metadata, "tmem_size", 0),
        mma=dict(sorted(Counter(MMA.findall(text)).items())),
        declared=config.declared,
        loops=loops(text),
        instructions=len(code),
        units=dict(sorted(Counter(unit_of(op) for _, op, _ in code).items())),
        fences=dict(sorted(Counter(FENCE.findall(compiled.asm["ptx"])).items())),
    )
