"""Foreign files take neither much memory nor time, and what is wrong with them is one line."""

import faulthandler
import json

import pytest

from fastgpt.config.model import ModelConfig
from fastgpt.data.tokenizers.huggingface import JsonTokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import Template, template_of
from tests.data.sets import tokenizer_of
from tests.faults.hostile import TALK, cpu_s
from tests.faults.mutations import PIECES


@pytest.fixture(autouse=True)
def cheap():
    """Ends everything after a minute, in loops of C, too; fails after 5 s of CPU time."""
    faulthandler.dump_traceback_later(60, exit=True)
    began = cpu_s()
    yield
    faulthandler.cancel_dump_traceback_later()
    assert cpu_s() - began < 5


def test_counts_have_limits():
    with pytest.raises(UserError, match=r"--model\.num-layers is 257: expected 1 to 256"):
        ModelConfig(num_layers=257)


LIMIT, TOO_DEEP = r"takes more than 1 s or 256 MiB of memory", r"\w+ .*: .*maximum recursion"


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, LIMIT), (2, LIMIT), (3, TOO_DEEP), (4, TOO_DEEP), (5, LIMIT)],
)
def test_a_foreign_template_has_limits(number, said):
    with pytest.raises(UserError, match=rf"^the chat template {said}[^\n]*$"):
        Template(PIECES[number]).render(TALK)
    assert Template("{{ messages[1].content }}").render(TALK) == "on a mat"


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_file_with_a_template_is_named(text):
    with pytest.raises(UserError, match=r"^tokenizer_config\.json cannot be read: "):
        template_of({"tokenizer_config.json": text})


def normalizing(pattern, text, times=1):
    """The file of a tokenizer that first replaces a pattern in the text."""
    step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": text}
    steps = {"normalizer": {"type": "Sequence", "normalizers": [step] * times}}
    return json.dumps(json.loads(tokenizer_of("bpe").to_json()) | steps)


@pytest.mark.parametrize(
    ("pattern", "text", "times", "said"),
    [("(", "", 1, "unmatched paren"), ("(a+)+$", "", 1, "retry-limit"),
     ("q", 100 * "q", 1, "over 64 times as long"), ("q", "qq", 40, "takes more than 1 s")],
)  # fmt: skip
def test_a_foreign_tokenizer_is_tried_within_limits(pattern, text, times, said, capfd):
    content = normalizing(pattern, text, times)
    capfd.readouterr()
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*$"):
        JsonTokenizer(content)
    assert capfd.readouterr() == ("", "")


def test_a_panic_over_a_later_text_is_one_line():
    tokenizer = JsonTokenizer(normalizing("(a+)+$", ""), own=True)
    with pytest.raises(UserError, match=r"^the bpe tokenizer cannot encode a text: [^\n]*$"):
        tokenizer.encode("a" * 40 + "!")
