"""Text of the page about the Python API, from the docstrings; `make docs` writes it."""

import inspect
import re
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

from fastgpt import kernels
from fastgpt.flags import flags_of

FUNCTIONS = (
    "GPT", "GPT.from_config", "GPT.forward", "GPT.generate", "generate", "load", "build_model",
    "encode_prompt", "sample_text", "stream", "Trainer", "Trainer.fit", "Data", "UserError",
)  # fmt: skip
"""Public names in the order of the page."""
SETTINGS = (
    "Config", "ModelConfig", "config.DataConfig", "config.OptimConfig", "config.TrainConfig",
    "OpsConfig", "config.ParallelConfig",
)  # fmt: skip
PARTS = {
    "Models and training": FUNCTIONS,
    "Settings": SETTINGS,
    "Kernels": [f"kernels.{name}" for name in kernels.__all__],
}
PREFACE = """# Python API

These names are stable: a change that breaks one is announced in the changelog. The examples assume
`import torch` and `import fastgpt`; the one of `Trainer` also needs a text `mine.txt`, and others
need a run `runs/mine`.
"""


def page() -> str:
    """Returns the text of the page."""
    text = PREFACE
    for title, names in PARTS.items():
        text += f"\n## {title}\n" + "".join(map(entry, names))
    return text


def entry(name: str) -> str:
    """Describes a class, a function or the fields of a dataclass."""
    thing = resolve_name(f"fastgpt:{name}")
    head, about = f"\n### fastgpt.{name}\n\n", inspect.getdoc(thing) or ""
    if name in SETTINGS:
        table = "".join(f"| `{name}` | {text} |\n" for name, text in field_texts(thing))
        return f"{head}{about}\n\n| field | what it is [default] |\n|---|---|\n{table}"
    first, *rest = re.split(r"^(?=Args:|Returns:|Raises:|>>>)", about, maxsplit=1, flags=re.M)
    block = "\n\n".join([name + signature(thing), *(part.strip() for part in rest)])
    return f"{head}{first.strip()}\n\n```text\n{block}\n```\n"


def field_texts(kind: Any) -> Iterator[tuple[str, str]]:
    """Yields the name of each flag of a dataclass, and its first sentence and default."""
    for field in flags_of(kind):
        if "." not in field.name:  # of a section
            first = field.first_sentence.replace("<", "&lt;")
            default = field.default
            yield field.name, first if default in (None, "") else f"{first} [{default}]"


def signature(thing: Any) -> str:
    """Returns the names and defaults of the arguments, without types, whose spelling may change."""
    known = inspect.signature(thing.__init__ if isinstance(thing, type) else thing)
    bare = [x.replace(annotation=x.empty) for x in known.parameters.values() if x.name != "self"]
    return str(known.replace(parameters=bare, return_annotation=known.empty))
