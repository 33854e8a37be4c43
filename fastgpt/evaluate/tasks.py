"""HellaSwag from a file of JSON lines, scored as the lm-evaluation-harness does.

Source
    Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?"
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastgpt.errors import UserError, brief, counted, reason, unknown_name
from fastgpt.evaluate.score import Pair, Scorer
from fastgpt.files import parse_json
from fastgpt.parallel.distributed import World
from fastgpt.parallel.signals import Stopped

EXPECTED = 'expected {"ctx": ..., "endings": [...], "label": ...}'


@dataclass(frozen=True, slots=True)
class Question:
    """A context with its possible continuations."""

    pairs: list[Pair]
    """Token ids of the context with each choice."""
    letters: list[int]
    """Characters of each choice, without the space before it."""
    right: int
    """Index of the right choice."""


@dataclass(frozen=True, slots=True)
class Task:
    """Questions of a file."""

    name: str
    questions: list[Question]


def split_tasks(given: str, flag: str) -> dict[str, str]:
    """Splits `NAME=PATH,NAME` into names and paths, which are empty where there is none.

    Raises:
        UserError: a name is missing or given twice; the message calls the argument `flag`.
    """
    parts = [part.strip().partition("=") for part in given.split(",") if given]
    found = {name: path for name, _, path in parts}
    if "" in found or len(found) < len(parts):
        raise UserError(f"{flag} is {given!r}: expected different names, such as hellaswag=PATH")
    return found


def read_task(name: str, path: str, scorer: Scorer) -> Task:
    """Reads a task's file, and encodes its questions.

    Raises:
        UserError: the name is not hellaswag, or the file is missing or empty, or a line is not as
            expected; the message names the line.
    """
    if name != "hellaswag":
        raise unknown_name("task with a file", name, ["hellaswag"])
    questions = []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: {path or 'no file'} cannot be read: {reason(error)}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number:,}"
        try:
            context, choices, right = _hellaswag(parse_json(line))
            "".join([context, *choices]).encode()  # JSON may hold half a character
            pairs = [scorer.encode_pair(context, f" {choice}") for choice in choices]
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where} is no line of {name} ({brief(error)}): {EXPECTED}") from error
        questions.append(Question(pairs, [*map(len, choices)], right))
    if not questions:
        raise UserError(f"{path} has no line of {name}: {EXPECTED}")
    return Task(name, questions)


def _hellaswag(line: dict[str, Any]) -> tuple[str, list[str], int]:
    """Returns the context, the choices, and the index of the right one."""
    context, endings, label = line.get("ctx_a"), line["endings"], line["label"]
    context = line["ctx"] if context is None else f"{context} {line['ctx_b'].capitalize()}"
    if "activity_label" in line:
        context = f"{line['activity_label']}: {context}"
    if not isinstance(endings, list):
        raise TypeError("its endings are no list")
    labels = [*map(str, range(len(endings)))]  # files have numbers or strings
    if str(label) not in labels:
        raise ValueError(f"its label is {label}, of {counted(len(endings), 'ending')}")
    return _cleaned(context), [*map(_cleaned, endings)], labels.index(str(label))


def _cleaned(text: str) -> str:
    """Removes the marks that WikiHow left in the texts."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def run_task(task: Task, scorer: Scorer, world: World | None = None) -> dict[str, float]:
    """Computes a task's metrics; each rank, or group of peers, scores a part of the questions.

    Raises:
        Stopped: on all ranks, if one was asked to stop.
    """
    world = world or World()
    mine = task.questions[world.dp_rank :: world.dp_size]
    totals = torch.zeros(3, dtype=torch.float64)
    try:
        scores = iter(scorer.log_likelihoods([pair for x in mine for pair in x.pairs]))
        for x in mine:
            plain = [next(scores) for _ in x.pairs]
            normed = [log_p / n if n else -math.inf for log_p, n in zip(plain, x.letters)]
            right = [float(y.index(max(y)) == x.right) for y in (plain, normed)]
            totals[:2] += torch.tensor(right, dtype=torch.float64)
    except Stopped:
        totals[2] = 1
    count = len(task.questions) * world.non_dp_size
    plain, normed, stopped = (world.sum(totals) / count).tolist()
    if stopped:
        raise Stopped
    return {"acc": plain, "acc_norm": normed}


def too_long(task: Task, context: int) -> int:
    """Counts the questions that are longer than the model's context, whose beginning is cut."""
    return sum(any(len(a) + len(b) > context + 1 for a, b in q.pairs) for q in task.questions)
