"""`python -m fastgpt.evaluate`: texts, and tasks of the lm-evaluation-harness."""

import json
import math
import sys

import pytest
import torch

from fastgpt.convert.source import load, read
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.evaluate import __main__ as command
from fastgpt.evaluate.harness import run_tasks
from tests.convert.models import converted, saved_run
from tests.data.sets import prepared, texts, tokenizer_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run and export of one GPT-2 with a BPE tokenizer; its context is 40."""
    place, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of("bpe")
    torch.manual_seed(1)
    run = saved_run(place / "run", tokenizer, vocab_size=tokenizer.vocab_size)
    return run, converted(run, place / "hf", "hf")


def results(run, *flags):
    """Runs the command, and reads the file that it wrote, in which no number may be infinite."""
    out = run.with_name("out.json")
    command.main([str(run), "--json", str(out), "--device", "cpu", *flags])
    return json.loads(out.read_text(), parse_constant=pytest.fail)


def test_bits_per_byte_of_a_text_and_of_held_out_tokens(tmp_path):
    run = saved_run(tmp_path / "run", ByteTokenizer(), vocab_size=256)
    (tmp_path / "a.txt").write_text(text := "the naïve cat sat on the mat. " * 9)
    loss, _, bits = results(run, "--text", str(tmp_path / "a.txt"))
    ids, total = torch.tensor([*text.encode()]), 0.0
    for start in range(0, len(ids) - 1, 40):
        first = min(start, len(ids) - 41)
        window = ids[first : first + 41]
        log_p = load(run)[0](window[None, :-1])[0].log_softmax(-1)
        total -= log_p[torch.arange(40), window[1:]][start - first :].sum().item()
    assert loss["value"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert bits["value"] == pytest.approx(loss["value"] / math.log(2))  # a byte is a token
    assert loss["examples"] == len(ids) - 1
    data = prepared(tmp_path / "data", texts(40))
    with pytest.raises(UserError, match=r"another bpe .* than the model's \(bytes\)"):
        results(run, "--text", str(data))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"a\.txt has 1 token"):
        results(run, "--text", str(tmp_path / "a.txt"))


def test_an_infinite_perplexity_is_null_in_json(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(
        command, "score_text", lambda *_, **__: ({"perplexity": math.inf, "x": 0.5}, 52)
    )
    (text := tmp_path / "a.txt").write_text("the cat sat on the mat")
    assert [row["value"] for row in results(folders[0], "--text", str(text))] == [None, 0.5]


@pytest.mark.parametrize(("flags", "said"), [
    ("", "nothing to evaluate"), ("--text x.txt", "'x.txt': no such file"),
    ("--tasks arc_easy", "needs the package lm-eval"),
    ("--tasks arc_easy --include nowhere", "--include is nowhere"),
    ("--batch 0 --text x", "--batch is 0"),
])  # fmt: skip
def test_bad_flags_are_refused(folders, flags, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=said):
        command.main([str(folders[0]), *flags.split(), "--device", "cpu"])


def log_likelihood(model, tokenizer, context: str, ending: str) -> float:
    ids = torch.from_numpy(tokenizer.encode(f"{context} {ending}").astype("int64"))
    count = len(ids) - len(tokenizer.encode(context))
    log_p = model(ids[None, :-1])[0].log_softmax(-1)[-count:]
    return log_p.gather(-1, ids[-count:, None]).sum().item()


@pytest.mark.slow
def test_a_task_of_ones_own_has_the_scores_of_our_model(folders, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    some = texts(260, longest=5)
    rows = [
        {"context": some[i], "endings": some[i + 1 : i + 5], "label": i % 4}
        for i in range(0, 260, 5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "word", "dataset_path": "json", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "rows.jsonl")}},
        "output_type": "multiple_choice", "doc_to_choice": "endings", "doc_to_target": "label",
        "doc_to_text": "{{context}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "word.yaml").write_text(json.dumps(task))
    model, tokenizer = load(folders[0])
    right = 0
    for row in rows:
        found = [log_likelihood(model, tokenizer, row["context"], x) for x in row["endings"]]
        right += found.index(max(found)) == row["label"]
    for folder in folders:
        [found] = results(folder, "--tasks", "word", "--include", str(tmp_path))
        assert found["value"] * 52 == pytest.approx(right)
        assert (found["task"], found["metric"], found["examples"]) == ("word", "acc", 52)
    options = {"device": "cpu", "precision": "fp32", "batch": 1}
    with pytest.raises(UserError, match=r"^unknown task 'helaswag'"):
        run_tasks(["helaswag"], read(str(folders[0])), tmp_path, **options)
