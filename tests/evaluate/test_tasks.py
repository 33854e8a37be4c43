"""Tasks from local files, against transformers and the definitions written a second time."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgpt.errors import UserError
from fastgpt.evaluate.tasks import read_task, run_task, too_long
from fastgpt.evaluate.text import score_text
from fastgpt.logs.metrics import read_records
from tests.evaluate.conftest import LINES


@pytest.fixture
def score(folders):
    """Computes the log-likelihood of a continuation with transformers."""
    model = AutoModelForCausalLM.from_pretrained(folders[1]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[1])

    def run(context: str, continuation: str) -> float:
        whole = tokenizer(context + continuation)["input_ids"]
        start = tokenizer(context)["input_ids"]
        new = torch.tensor(whole[len(start) :])
        ids = torch.tensor((whole if start else [tokenizer.eos_token_id, *whole])[-41:])
        with torch.no_grad():
            log_p = model(ids[None, :-1]).logits[0].log_softmax(-1)[-len(new) :]
        return log_p[torch.arange(len(new)), new].sum().item()

    return run


def test_hellaswag_is_scored_as_published(file, scorer, score):
    def clean(text):
        return re.sub(r"\[.*?\]", "", text.replace(" [title]", ". ")).replace("  ", " ")

    right = np.zeros(2)
    for row in read_records(file):
        context = clean(f"Cats: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        endings = [clean(ending) for ending in row["endings"]]
        plain = np.array([score(context, f" {ending}") for ending in endings])
        normed = plain / [len(ending) for ending in endings]
        right += [plain.argmax() == row["label"], normed.argmax() == row["label"]]
    task = read_task("hellaswag", str(file), scorer)
    assert 0 < too_long(task, 40) < LINES
    found = run_task(task, scorer)
    assert found == {"acc": right[0] / LINES, "acc_norm": right[1] / LINES}
    assert len({0, *found.values()}) == 3


def test_loss_of_a_text_scores_each_token_once(scorer, score):
    text = "the cat sat on the mat, and the dog sat on the log. " * 8
    short, ids = scorer.tokenizer.encode(text[:30]), scorer.tokenizer.encode(text)
    assert len(ids) > 41
    assert score_text(ids, None, scorer)[1] == len(ids) - 1
    begun = np.array([scorer.tokenizer.eot_id, *short.tolist()])
    found, count = score_text(begun, None, scorer)
    assert -found["loss"] * count == pytest.approx(score("", text[:30]), abs=1e-4)


GOOD = '{"ctx": "a", "endings": [%s], "label": 0}'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("hellaswg", "", r"unknown task with a file 'hellaswg'; did you mean 'hellaswag'\?"),
        ("lambada", "", r"unknown task with a file 'lambada' .*'hellaswag'"),
        ("hellaswag", "\n", r"x\.jsonl has no line of hellaswag: expected \{\"ctx\""),
        ("hellaswag", '{"ctx": "a", "endings": ["b"]}', r"line 1 is .* \(KeyError: 'label'\)"),
        ("hellaswag", GOOD % '"b"' + '\n{"tex', r"x\.jsonl line 2 is no line of hellaswag"),
        ("hellaswag", GOOD % "3", r"line 1 is no .*\(AttributeError: .*\): expected \{"),
        ("hellaswag", GOOD % f'"{"é" * 50}"', r"line 1: .* tokens: expected 1 to the model"),
        ("hellaswag", '{"ctx": "a", "endings": ["b"], "label": 1}', r": its label is 1, of 1 end"),
        ("hellaswag", '{"ctx": "a", "endings": "bc", "label": 1}', r": its endings are no list\)"),
        ("hellaswag", '{"ctx": "a", "endings": ["b"], "label": 0.9}', r": its label is 0\.9, of"),
        ("hellaswag", "[" * 100_000, r"line 1 is no line .*nested too deeply"),
        ("hellaswag", GOOD % '"\\ud800"', r"line 1 is no line .*surrogates not allowed"),
        ("hellaswag", "[]", r"line 1 is no line of hellaswag"),
        ("hellaswag", None, r"x\.jsonl cannot be read: No such file"),
    ],
)
def test_bad_files_are_named_with_the_line(name, content, said, scorer, tmp_path):
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        read_task(name, str(path), scorer)
