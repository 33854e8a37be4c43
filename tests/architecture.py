"""Writes `docs/architecture.md` from the code itself: `python -m tests.architecture`.

The page lists the files that explain the rest in reading order, each with its length and the first
sentence of its docstring, and has a picture of their imports. `tests/test_architecture.py` fails if
the page is out of date, or the core longer than its ceiling.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PARTS = {
    "A run, from the command line to the last checkpoint": (
        "train", "fastgpt/cli", "fastgpt/config/config", "fastgpt/config/recipes",
        "fastgpt/train/trainer", "fastgpt/train/plan", "fastgpt/train/build",
        "fastgpt/train/recorder", "fastgpt/parallel/distributed",
    ),
    "The model and its optimizers": (
        "fastgpt/config/model", "fastgpt/model/gpt", "fastgpt/model/block",
        "fastgpt/ops/protocols", "fastgpt/ops/tables",
        "fastgpt/ops/torch_ops", "fastgpt/train/optim",
    ),
    "The kernels: attention stands for the others": (
        "kernels/runtime", "kernels/attention/op",
        "kernels/attention/forward", "kernels/attention/backward",
    ),
    "Batches": ("fastgpt/data/loader", "fastgpt/data/order", "fastgpt/data/dataset"),
    "What a run leaves behind": (
        "fastgpt/checkpoint/checkpoint", "fastgpt/run/directory", "fastgpt/logs/metrics",
        "fastgpt/evaluate/validation", "fastgpt/model/generation",
    ),
}  # fmt: skip
LISTED = [name for names in PARTS.values() for name in names]
CORE = (
    "config/", "model/", "train/", "parallel/", "checkpoint/",
    "data/loader.py", "data/order.py", "data/dataset.py", "data/shards.py",
)  # fmt: skip
"""Folders and files below fastgpt/ that every run needs; their length has a ceiling."""
CEILING = 5_300
"""Lines of the core: a feature is outside of it, or pays with a deletion."""
LINES_PER_HOUR = 500
"""Fastest pace at which reviewers still find most defects, in a study of 2,500 reviews at Cisco
(Cohen, Best Kept Secrets of Peer Code Review, 2006)."""


def core_files() -> list[Path]:
    return [
        path
        for path in sorted((ROOT / "fastgpt").rglob("*.py"))
        if path.relative_to(ROOT / "fastgpt").as_posix().startswith(CORE)
    ]


def core_lines() -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in core_files())


def page() -> str:
    """Returns the text of the page."""
    lines, core = sum(length(name) for name in LISTED), core_lines()
    rooms = ", ".join(name.strip("/") for name in CORE if name.endswith("/"))
    text = (
        "# Architecture\n\n"
        "Written by `python -m tests.architecture` from the code; docs/design.md says why it is"
        f" built so.\n\nBelow are the {len(LISTED)} files that explain the rest, {lines:,} lines,"
        f" in the order in which they are best read:\n{hours(lines)} at a reviewer's pace of"
        f" {LINES_PER_HOUR} lines an hour, comments included. The core, which every run needs\n"
        f"({rooms} and the loader), has {len(core_files())} files and {core:,} lines,"
        f" {hours(core)};\ntests keep it below {CEILING:,}.\n"
    )
    for title, names in PARTS.items():
        text += f"\n## {title}\n\n| file | lines | what it is |\n|---|---|---|\n"
        for name in names:
            link = f"[{name}.py](../{name}.py)"
            text += f"| {link} | {length(name)} | {summary(name)} |\n"
    return f"{text}\n## Who imports whom\n\n{picture()}"


def hours(lines: int) -> str:
    return f"{lines / LINES_PER_HOUR:.0f} hours"


def picture() -> str:
    """Draws the imports as a Mermaid diagram, without those that another import implies."""
    imports = {name: imported(name) for name in LISTED}
    text = "```mermaid\nflowchart TD\n"
    for i, (title, names) in enumerate(PARTS.items()):
        text += f'  subgraph p{i}["{title}"]\n'
        text += "".join(f'    {key(name)}["{name}.py"]\n' for name in names)
        text += "  end\n"
    for name, found in imports.items():
        beyond = {far for near in found for far in reached(near, imports) - {near}}
        if near := [key(x) for x in LISTED if x in found - beyond]:
            text += f"  {key(name)} --> {' & '.join(near)}\n"
    return f"{text}```\n"


def reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Returns the file and all files that it imports, directly or through others."""
    found, todo = {name}, [name]
    while todo:
        todo += (new := imports[todo.pop()] - found)
        found |= new
    return found


def imported(name: str) -> set[str]:
    """Returns the files of the list that a file of it imports."""
    modules = set(modules_imported(name))
    return {
        x for x in LISTED if x.replace("/", ".").replace("kernels", "fastgpt.kernels") in modules
    }


def modules_imported(name: str) -> Iterator[str]:
    package = name.replace("kernels", "fastgpt/kernels").split("/")
    for node in ast.walk(ast.parse(source(name))):
        match node:
            case ast.Import(names=names):
                yield from (x.name for x in names)
            case ast.ImportFrom(module=module, level=level, names=names):
                above = package[: len(package) - level] if level else []
                base = ".".join([*above, *filter(None, [module])])
                yield base
                yield from (f"{base}.{x.name}" for x in names)


def summary(name: str) -> str:
    """Returns the first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(source(name))) or ""
    first = re.split(r"(?<=[.:])\s", text.replace("\n", " "), maxsplit=1)[0]
    return text.split("\n\n")[0].replace("\n", " ") if first.endswith(":") else first


def length(name: str) -> int:
    return source(name).count("\n")


def source(name: str) -> str:
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def key(name: str) -> str:
    return name.replace("/", "_")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
