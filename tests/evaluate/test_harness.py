"""Tasks of the lm-evaluation-harness, which its own model for transformers answers."""

import json

import pytest

from fastgpt.convert.source import read
from fastgpt.errors import UserError
from fastgpt.evaluate import __main__ as command
from fastgpt.evaluate.harness import run_tasks
from fastgpt.evaluate.tasks import read_task, run_task
from fastgpt.logs.metrics import read_records
from tests.evaluate.conftest import write

WITH = "needs the extra eval (350 MB): make setup EXTRAS=dev,eval"


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("accelerate", reason=WITH)
    pytest.importorskip("lm_eval", reason=WITH)


@pytest.mark.slow
def test_a_task_of_ones_own_has_the_scores_of_the_same_file(
    scorer, folders, file, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = read_records(file)
    for row in rows:  # without the marks of WikiHow, which the harness's own task removes
        row["ctx_a"] = row["ctx_a"].removesuffix(" [header]")
        row["endings"] = [ending.replace(" [title]  ", " ") for ending in row["endings"]]
    write(file, *rows)
    task = {
        "task": "word", "dataset_path": "json", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(file)}},
        "output_type": "multiple_choice", "doc_to_choice": "endings", "doc_to_target": "label",
        "doc_to_text": "Cats: {{ctx_a}} {{ctx_b.capitalize()}}",
        "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
    }  # fmt: skip
    (tmp_path / "word.yaml").write_text(json.dumps(task))
    local = run_task(read_task("hellaswag", str(file), scorer), scorer)
    for folder in folders:
        out = tmp_path / "out.json"
        argv = ["--tasks", "word", "--include", str(tmp_path), "--device", "cpu", "--json"]
        command.main([str(folder), *argv, str(out)])
        rows = json.loads(out.read_text())
        assert local == pytest.approx({row["metric"]: row["value"] for row in rows}, rel=1e-5)
        assert {(row["task"], row["examples"]) for row in rows} == {("word", 52)}


@pytest.mark.slow
def test_an_unknown_task_is_named(folders, tmp_path):
    options = {"device": "cpu", "precision": "fp32", "batch": 1}
    with pytest.raises(UserError, match=r"^unknown task 'helaswag': the harness lists its own"):
        run_tasks(["helaswag"], read(str(folders[0])), tmp_path, **options)
