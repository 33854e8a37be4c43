"""Our model in the lm-evaluation-harness, against its own model for transformers, HFLM."""

import json
from types import SimpleNamespace

import pytest

from fastgpt.errors import UserError
from fastgpt.evaluate.harness import language_model, run_tasks
from fastgpt.evaluate.tasks import read_task, run_task

WITH = "needs the extra eval (350 MB): make setup EXTRAS=dev,eval"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
validation_split: validation
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{activity_label}}: {{ctx_a}}"
doc_to_choice: endings
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
output_type: generate_until
doc_to_text: "{{ctx_b}}"
doc_to_target: "{{endings[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
"""
WORD = """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
ROLL = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""


@pytest.fixture
def theirs(folders):
    pytest.importorskip("accelerate", reason=WITH)
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=WITH)
    return huggingface.HFLM(pretrained=str(folders[1]), device="cpu", batch_size=5, dtype="float32")


def requests(*rows):
    return [SimpleNamespace(args=row) for row in rows]


def asked(kind, *rows):
    instance = pytest.importorskip("lm_eval.api.instance", reason=WITH).Instance
    return [instance(kind, {}, row, i) for i, row in enumerate(rows)]


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_log_likelihoods_are_theirs(theirs, scorer, files):
    rows = [
        ("", "the cat"),
        ("a cat ", "sat"),
        *(t.split(" ", 1) for t in texts(files["lambada"]) if " " in t),
    ]
    rows = [(a, b if i < 2 else f" {b}"[:30]) for i, (a, b) in enumerate(rows)]
    expected = theirs.loglikelihood(asked("loglikelihood", *rows))
    for (ours, greedy), (total, flag) in zip(
        language_model(scorer).loglikelihood(asked("loglikelihood", *rows)), expected, strict=True
    ):
        assert (ours, greedy) == (pytest.approx(total, abs=1e-4), flag)


def test_log_likelihoods_of_long_texts_are_theirs(theirs, scorer, files):
    rows = [("",), ("a",), *((t * 3,) for t in texts(files["lambada"])[:20])]
    ours = language_model(scorer).loglikelihood_rolling(asked("loglikelihood_rolling", *rows))
    expected = theirs.loglikelihood_rolling(asked("loglikelihood_rolling", *rows))
    assert ours == pytest.approx(expected, abs=1e-3, rel=1e-6)


def test_generated_texts_are_theirs(theirs, scorer, files):
    cut = {"until": ["e", "\n"], "max_gen_toks": 12}
    rows = [(text, cut) for text in texts(files["lambada"])[:20]]
    rows += [(text, {"max_gen_toks": 5}) for text in texts(files["lambada"])[20:30]]
    ours = language_model(scorer).generate_until(asked("generate_until", *rows))
    assert ours == theirs.generate_until(asked("generate_until", *rows))
    assert len({*ours}) > 10


@pytest.mark.slow
def test_scores_of_tasks_are_theirs(theirs, scorer, files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    made = {"choice": CHOICE, "generate": GENERATE, "word": WORD, "roll": ROLL}
    for name, text in made.items():
        path = files["lambada" if name in ("word", "roll") else "hellaswag"]
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, path=path) + text)
    ours = run_tasks([*made], scorer, tmp_path)["results"]
    import lm_eval

    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path))
    expected = lm_eval.simple_evaluate(
        model=theirs, tasks=[*made], task_manager=manager, bootstrap_iters=0
    )["results"]
    for name in made:
        numbers = {k: v for k, v in expected[name].items() if isinstance(v, float)}
        assert len(numbers) >= 1
        assert {k: ours[name][k] for k in numbers} == pytest.approx(numbers, rel=1e-5)
    local = run_task(read_task("lambada", str(files["lambada"]), scorer), scorer)
    theirs_word = {key: expected["word"][f"{key},none"] for key in local}
    assert local == pytest.approx(theirs_word, rel=1e-5)


@pytest.mark.slow
def test_an_unknown_task_is_named(scorer, tmp_path):
    pytest.importorskip("lm_eval", reason=WITH)
    with pytest.raises(UserError, match=r"^unknown task 'helaswag': the harness lists its own"):
        run_tasks(["helaswag"], scorer, tmp_path)


@pytest.mark.parametrize("wrong", [{"max_gen_toks": 40}, {"num_beams": 2, "max_gen_toks": 3}])
def test_generation_that_cannot_be_is_refused(wrong, scorer):
    from fastgpt.evaluate.harness import Answers

    with pytest.raises(UserError, match=r"max_gen_toks is 40: expected fewer|unknown num_beams"):
        Answers(scorer).generate_until(requests(("a", wrong)))
