"""Our model in the lm-evaluation-harness, against its own model for transformers, HFLM."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from fastgpt.errors import UserError
from fastgpt.evaluate.harness import Answers, language_model, run_tasks
from fastgpt.evaluate.tasks import read_task, run_task
from fastgpt.logs.metrics import read_records

WITH = "needs the extra eval (350 MB): make setup EXTRAS=dev,eval"


@pytest.fixture
def theirs(folders):
    pytest.importorskip("accelerate", reason=WITH)
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=WITH)
    return huggingface.HFLM(pretrained=str(folders[1]), device="cpu", batch_size=5, dtype="float32")


def asked(*rows):
    return [SimpleNamespace(args=row) for row in rows]


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_answers_are_theirs(kind, theirs, scorer, files):
    texts = [row["text"] for row in read_records(files["lambada"])]
    if kind == "loglikelihood":
        pairs = [text.split(" ", 1) for text in texts if " " in text]
        rows = [("", "the cat"), ("a cat ", "sat"), *((a, f" {b}"[:30]) for a, b in pairs)]
    elif kind == "loglikelihood_rolling":
        rows = [("",), ("a",), *((text * 3,) for text in texts[:20])]
    else:
        cut = {"until": ["e", "\n"], "max_gen_toks": 12}
        rows = [(text, cut if i < 20 else {"max_gen_toks": 5}) for i, text in enumerate(texts[:30])]
    ours = getattr(language_model(scorer), kind)(asked(*rows))
    expected = getattr(theirs, kind)(asked(*rows))
    if kind == "generate_until":
        assert ours == expected
        assert len({*ours}) > 10
    else:
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.slow
def test_a_task_of_ones_own_has_the_scores_of_the_same_file(scorer, files, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason=WITH)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    task = {
        "task": "word", "dataset_path": "json", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(files["lambada"])}},
        "output_type": "loglikelihood", "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": metric} for metric in ("perplexity", "acc")],
    }  # fmt: skip
    (tmp_path / "word.yaml").write_text(json.dumps(task))
    theirs = run_tasks(["word"], scorer, tmp_path)["results"]["word"]
    local = run_task(read_task("lambada", str(files["lambada"]), scorer), scorer)
    assert local == pytest.approx({name: theirs[f"{name},none"] for name in local}, rel=1e-5)


@pytest.mark.slow
def test_an_unknown_task_is_named(scorer, tmp_path):
    pytest.importorskip("lm_eval", reason=WITH)
    with pytest.raises(UserError, match=r"^unknown task 'helaswag': the harness lists its own"):
        run_tasks(["helaswag"], scorer, tmp_path)


@pytest.mark.parametrize("wrong", [{"max_gen_toks": 40}, {"num_beams": 2, "max_gen_toks": 3}])
def test_generation_that_cannot_be_is_refused(wrong, scorer):
    with pytest.raises(UserError, match=r"max_gen_toks is 40: expected 1 to 39|unknown num_beams"):
        Answers(scorer).generate_until(asked(("a", wrong)))
