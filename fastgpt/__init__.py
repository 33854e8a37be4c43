"""fastgpt: a small, fast trainer for GPT-2-class language models."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if not Path(__file__).with_name("kernels").is_dir():  # checked out without symbolic links
    __path__.append(str(Path(__file__).parents[1]))  # where kernels/ itself is

# a module of this package, or of bench, is about to run as a command; doctor says what is missing
if sys.argv[:1] == ["-m"] and "fastgpt.doctor" not in sys.orig_argv:
    from fastgpt.require_torch import require_torch

    require_torch()

if TYPE_CHECKING:  # the names of _MODULES, for editors and type checkers
    from fastgpt.config.config import Config as Config
    from fastgpt.config.config import OpsConfig as OpsConfig
    from fastgpt.config.model import ModelConfig as ModelConfig
    from fastgpt.config.recipes import RECIPES as RECIPES
    from fastgpt.convert.source import load as load
    from fastgpt.data.items import Data as Data
    from fastgpt.errors import UserError as UserError
    from fastgpt.model.build import build_model as build_model
    from fastgpt.model.generation import generate as generate
    from fastgpt.model.gpt import GPT as GPT
    from fastgpt.sampling.streaming import stream as stream
    from fastgpt.sampling.text import encode_prompt as encode_prompt
    from fastgpt.sampling.text import sample_text as sample_text
    from fastgpt.train.trainer import Trainer as Trainer

# Imported when first asked for: `import fastgpt` must not take the seconds that torch takes.
_MODULES = {
    "Config": "config.config",
    "Data": "data.items",
    "GPT": "model.gpt",
    "ModelConfig": "config.model",
    "OpsConfig": "config.config",
    "RECIPES": "config.recipes",
    "Trainer": "train.trainer",
    "UserError": "errors",
    "build_model": "model.build",
    "encode_prompt": "sampling.text",
    "generate": "model.generation",
    "load": "convert.source",
    "sample_text": "sampling.text",
    "stream": "sampling.streaming",
}


if not TYPE_CHECKING:  # a type checker would then accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"fastgpt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
