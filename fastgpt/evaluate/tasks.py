"""HellaSwag and LAMBADA from files of JSON lines, scored as the lm-evaluation-harness does.

Source
    Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?"; Paperno et al.
    2016, "The LAMBADA dataset", in OpenAI's version.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastgpt.distributed import Stopped, World
from fastgpt.errors import UserError, reason, unknown_name
from fastgpt.evaluate.score import Pair, Scorer

Scores = Sequence[tuple[float, bool]]


@dataclass(frozen=True, slots=True)
class Question:
    """A context with its possible continuations."""

    context: str
    choices: tuple[str, ...]
    right: int = 0
    """Index of the right choice."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Format of a task's lines, and its two metrics."""

    read: Callable[[dict[str, Any]], Question]
    grade: Callable[[Question, Scores], tuple[float, float]]
    """Values of a question, whose means over the task `metrics` takes."""
    metrics: Callable[[float, float], dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Questions of a file, with their token ids."""

    name: str
    questions: list[Question]
    pairs: list[list[Pair]]
    """Of each question, the context with each choice."""


def split_tasks(given: str, flag: str) -> dict[str, str]:
    """Splits `NAME=PATH,NAME` into names and paths, which are empty where there is none.

    Raises:
        UserError: a name is missing or given twice; the message calls the argument `flag`.
    """
    parts = [part.strip().partition("=") for part in given.split(",") if given]
    names = [name for name, _, _ in parts]
    if "" in names or len({*names}) < len(names):
        raise UserError(f"{flag} is {given!r}: expected different names, such as hellaswag=PATH")
    return {name: path for name, _, path in parts}


def read_task(name: str, path: str, scorer: Scorer) -> Task:
    """Reads a task's file, and encodes its questions.

    Raises:
        UserError: the name is unknown, or the file is missing or empty, or a line is not as
            expected; the message names the line.
    """
    if name not in KINDS:
        raise unknown_name("task", name, KINDS)
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: {path or 'no file'} cannot be read: {reason(error)}") from error
    questions, pairs = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            questions.append(question := KINDS[name].read(json.loads(line)))
            pairs.append([scorer.encode_pair(question.context, x) for x in question.choices])
        except UserError as error:
            raise UserError(f"{path} line {number:,}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(
                f"{path} line {number:,} is no line of {name} ({error!r}): expected"
                f" {EXPECTED[name]}"
            ) from error
    if not questions:
        raise UserError(f"{path} is empty: expected lines of {name}, {EXPECTED[name]}")
    return Task(name=name, questions=questions, pairs=pairs)


def run_task(task: Task, scorer: Scorer, world: World | None = None) -> dict[str, float]:
    """Computes a task's metrics; each rank scores a part of the questions.

    Raises:
        Stopped: on all ranks, if one was asked to stop.
    """
    world = world or World()
    mine = slice(world.rank, None, world.size)
    pairs, kind = task.pairs[mine], KINDS[task.name]
    totals = torch.zeros(3, dtype=torch.float64)
    try:
        scores = iter(scorer.log_likelihoods([pair for each in pairs for pair in each]))
        for question, each in zip(task.questions[mine], pairs):
            graded = kind.grade(question, [next(scores) for _ in each])
            totals[:2] += torch.tensor(graded, dtype=torch.float64)
    except Stopped:
        totals[2] = 1
    first, second, stopped = world.sum(totals).tolist()
    if stopped:
        raise Stopped
    return kind.metrics(first / len(task.pairs), second / len(task.pairs))


def too_long(task: Task, context: int) -> int:
    """Counts the questions that are longer than the model's context, whose beginning is cut."""
    return sum(any(len(a) + len(b) > context + 1 for a, b in each) for each in task.pairs)


# --- HellaSwag ------------------------------------------------------------------------------------


def _hellaswag(line: dict[str, Any]) -> Question:
    context = line["ctx"]
    if "ctx_a" in line:
        context = f"{line['ctx_a']} {line['ctx_b'].capitalize()}"
    if "activity_label" in line:
        context = f"{line['activity_label']}: {context}"
    choices, right = tuple(f" {_cleaned(x)}" for x in line["endings"]), int(line["label"])
    if not 0 <= right < len(choices):
        raise ValueError(f"label {right} of {len(choices)} endings")
    return Question(_cleaned(context), choices, right)


def _cleaned(text: str) -> str:
    """Removes the marks that WikiHow left in the texts."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _grade_choice(question: Question, scores: Scores) -> tuple[float, float]:
    """Tells whether the right choice is the likeliest, and whether it is by likelihood per letter.

    The space before a choice is no letter of it.
    """
    plain = [x for x, _ in scores]
    lengths = [len(choice) - 1 for choice in question.choices]
    normed = [x / n if n else -math.inf for x, n in zip(plain, lengths)]
    return tuple(float(x.index(max(x)) == question.right) for x in (plain, normed))  # pyright: ignore


# --- LAMBADA --------------------------------------------------------------------------------------


def _lambada(line: dict[str, Any]) -> Question:
    context, _, word = line["text"].rpartition(" ")
    return Question(context, (f" {word}",))


KINDS = {
    "hellaswag": Kind(_hellaswag, _grade_choice, lambda a, b: {"acc": a, "acc_norm": b}),
    "lambada": Kind(
        _lambada,
        lambda _, scores: (float(scores[0][1]), scores[0][0]),
        lambda a, b: {"acc": a, "perplexity": math.exp(-b) if b > -700 else math.inf},
    ),
}
EXPECTED = {
    "hellaswag": '{"ctx": ..., "endings": [...], "label": ...}',
    "lambada": '{"text": ...}',
}
