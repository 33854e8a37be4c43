"""Tasks of the lm-evaluation-harness, which its own model for transformers answers."""

import json
import random

import pytest
import torch

from fastgpt.convert.source import load, read
from fastgpt.errors import UserError
from fastgpt.evaluate import __main__ as command
from fastgpt.evaluate.harness import run_tasks
from tests.data.sets import WORDS

WITH = "needs the extra eval (350 MB): make setup EXTRAS=dev,eval"


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("accelerate", reason=WITH)
    pytest.importorskip("lm_eval", reason=WITH)


def log_likelihood(model, tokenizer, context: str, ending: str) -> float:
    ids = torch.from_numpy(tokenizer.encode(f"{context} {ending}").astype("int64"))
    count = len(ids) - len(tokenizer.encode(context))
    log_p = model(ids[None, :-1])[0].log_softmax(-1)[-count:]
    return log_p.gather(-1, ids[-count:, None]).sum().item()


@pytest.mark.slow
def test_a_task_of_ones_own_has_the_scores_of_our_model(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    draw, words = random.Random(0), WORDS.split()

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    rows = [
        {"context": text(9), "endings": [text(5) for _ in range(4)], "label": draw.randrange(4)}
        for _ in range(52)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "word", "dataset_path": "json", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "rows.jsonl")}},
        "output_type": "multiple_choice", "doc_to_choice": "endings", "doc_to_target": "label",
        "doc_to_text": "{{context}}",
        "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
    }  # fmt: skip
    (tmp_path / "word.yaml").write_text(json.dumps(task))
    model, tokenizer = load(folders[0])
    right = {"acc": 0, "acc_norm": 0}
    for row in rows:
        found = [log_likelihood(model, tokenizer, row["context"], x) for x in row["endings"]]
        normed = [x / len(ending) for x, ending in zip(found, row["endings"])]
        for metric, scores in (("acc", found), ("acc_norm", normed)):
            right[metric] += scores.index(max(scores)) == row["label"]
    for folder in folders:
        out = tmp_path / "out.json"
        argv = ["--tasks", "word", "--include", str(tmp_path), "--device", "cpu", "--json"]
        command.main([str(folder), *argv, str(out)])
        found = json.loads(out.read_text())
        assert {row["metric"]: row["value"] * 52 for row in found} == pytest.approx(right)
        assert {(row["task"], row["examples"]) for row in found} == {("word", 52)}


@pytest.mark.slow
def test_an_unknown_task_is_named(folders, tmp_path):
    options = {"device": "cpu", "precision": "fp32", "batch": 1}
    with pytest.raises(UserError, match=r"^unknown task 'helaswag': the harness lists its own"):
        run_tasks(["helaswag"], read(str(folders[0])), tmp_path, **options)
