"""A model of ours for EleutherAI's lm-evaluation-harness, the optional package lm-eval."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastgpt.errors import UserError, reason
from fastgpt.evaluate.score import Scorer
from fastgpt.evaluate.text import loss_of
from fastgpt.sampling.text import encode_prompt, sample_text


class Answers:
    """The three methods that the harness calls, for requests with `args`."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Scores (context, continuation) pairs; see `Scorer.log_likelihoods`."""
        pairs = [self.scorer.encode_pair(*request.args) for request in requests]
        return self.scorer.log_likelihoods(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Computes the log-likelihood in nats of whole texts, in windows of the context."""
        totals = []
        for request in requests:
            tokens = self.scorer.tokenizer.encode(request.args[0])
            tokens = np.array([self.scorer.prefix(), *tokens.tolist()])
            loss, count = loss_of(tokens, self.scorer) if len(tokens) > 1 else (0.0, 0)
            totals.append(-loss * count)
        return totals

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continues texts, each up to the first of its stop strings, in batches."""
        texts, batch = [], self.scorer.batch
        for options, group in groupby(requests, key=lambda request: request.args[1]):
            prompts = [request.args[0] for request in group]
            for start in range(0, len(prompts), batch):
                texts += self._generate(prompts[start : start + batch], **options)
        return texts

    def _generate(
        self, prompts: Sequence[str], *, until: str | Sequence[str] | None = None,
        max_gen_toks: int = 256, do_sample: bool | None = None, temperature: float = 0.0,
        top_k: int | None = None, top_p: float | None = None, **unknown: Any,
    ) -> Iterable[str]:  # fmt: skip
        # 256 are the default of the harness's own models, too
        scorer, context = self.scorer, self.scorer.model.config.context
        if unknown:
            raise UserError(f"the task's generation_kwargs have unknown {', '.join(unknown)}")
        if not 0 < max_gen_toks < context:
            raise UserError(f"max_gen_toks is {max_gen_toks}: expected 1 to {context - 1}")
        room = context - max_gen_toks
        encoded = [encode_prompt(prompt, scorer.tokenizer)[-room:] for prompt in prompts]
        with scorer.autocast, torch.no_grad():
            texts = sample_text(
                scorer.model, scorer.tokenizer, encoded, max_new_tokens=max_gen_toks,
                temperature=0.0 if do_sample is False else temperature,
                top_k=top_k, top_p=top_p, seed=0, device=scorer.device,
            )  # fmt: skip
        for prompt, text in zip(encoded, texts):
            text = text[len(scorer.tokenizer.decode(prompt.numpy())) :]
            for stop in [until] if isinstance(until, str) else until or ():
                text = text.split(stop)[0] if stop else text
            yield text


def language_model(scorer: Scorer) -> Any:
    """Returns an `lm_eval.api.model.LM` that answers with this model.

    Raises:
        UserError: the package lm-eval is missing.
    """
    base = _package("lm_eval.api.model").LM
    return type("FastgptLM", (Answers, base), {})(scorer)


def run_tasks(names: list[str], scorer: Scorer, include: Path | None) -> dict[str, Any]:
    """Runs tasks of the harness; returns its results, as `lm_eval.simple_evaluate` does.

    Args:
        include: folder with tasks of the user's own, as YAML.

    Raises:
        UserError: the package lm-eval is missing, or a task is unknown or its data cannot be had.
    """
    lm = language_model(scorer)
    folder = None if include is None else str(include)
    try:
        manager = _package("lm_eval.tasks").TaskManager(include_path=folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--include {folder} cannot be read: {reason(error)}") from error
    if unknown := sorted({*names} - {*manager.all_tasks}):
        raise UserError(
            f"unknown task {unknown[0]!r}: the harness lists its own with lm-eval ls tasks"
        )
    try:
        return _package("lm_eval").simple_evaluate(
            model=lm, tasks=names, task_manager=manager, bootstrap_iters=0
        )
    except (OSError, ValueError) as error:  # no network, no such data set
        raise UserError(f"the harness cannot run {', '.join(names)}: {reason(error)}") from error


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            "tasks without a file need the package lm-eval: install the extra `eval`, make setup"
            " EXTRAS=dev,eval; hellaswag=PATH.jsonl and lambada=PATH.jsonl need none"
        ) from error
