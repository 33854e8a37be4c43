"""A file from elsewhere that is damaged ends in one line of error."""

import json

import pytest

from fastgpt.config.model import ModelConfig
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import Template, template_of
from tests.data.sets import tokenizer_of
from tests.faults.hostile import TALK
from tests.faults.mutations import PIECES


def test_counts_have_limits():
    with pytest.raises(UserError, match=r"--model\.num-layers is 257: expected 1 to 256"):
        ModelConfig(num_layers=257)


REFUSED = (
    r"cannot be read: .*Unexpected end of template", r"refuses the messages: .*Range too big",
    r"refuses the messages: no", r"refuses the messages: .*maximum recursion",
    r"refuses the messages: .*unsafe",
)  # fmt: skip
"""Error about each of the first pieces."""


@pytest.mark.parametrize(("piece", "said"), [*zip(PIECES, REFUSED)])
def test_a_template_that_fails_is_one_line(piece, said):
    with pytest.raises(UserError, match=rf"^the chat template {said}[^\n]*$"):
        Template(piece).render(TALK)
    assert Template("{{ messages[1].content }}").render(TALK) == "on a mat"


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_file_with_a_template_is_named(text):
    with pytest.raises(UserError, match=r"^tokenizer_config\.json cannot be read: "):
        template_of({"tokenizer_config.json": text})


def normalizing(pattern):
    """The file of a tokenizer that first removes a pattern from the text."""
    step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    return json.dumps(json.loads(tokenizer_of("bpe").to_json()) | {"normalizer": step})


def test_a_tokenizer_that_cannot_be_read_is_one_line():
    with pytest.raises(UserError, match=r"^not a tokenizer [^\n]*: [^\n]*unmatched paren[^\n]*$"):
        Tokenizer(normalizing("("))


def test_a_panic_over_a_later_text_is_one_line():
    tokenizer = Tokenizer(normalizing("(a+)+$"))
    with pytest.raises(UserError, match=r"^the bpe tokenizer cannot encode a text: [^\n]*$"):
        tokenizer.encode("a" * 40 + "!")
