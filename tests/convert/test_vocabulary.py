"""Tokenizers that are written for Hugging Face give the same ids there."""

import pytest
from transformers import AutoTokenizer

from fastgpt.convert.target import write_tokenizer
from fastgpt.data.tokenizers import load_tokenizer, make_tokenizer
from tests.convert.models import converted, saved, theirs
from tests.data.sets import gpt2_files, tokenizer_of

TEXTS = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n",
    "  two  spaces\t\ttabs\r\n", "don't won't I'm 12345 x=1;y+=2", "a", "",
)  # fmt: skip
WIDE = ("na\u00efve caf\u00e9 \u4f60\u597d \U0001f600 \u00a0\u2003|", "\x00\x7f\ufffd")


@pytest.mark.parametrize("kind", ["bytes", "chars", "gpt2", "bpe"])
def test_other_programs_give_the_same_ids(kind, tmp_path):
    if kind == "gpt2":
        gpt2_files()
    tokenizer = make_tokenizer(kind, lambda: iter((*TEXTS, *WIDE)))
    write_tokenizer(tokenizer, tmp_path, context=64)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert theirs.model_max_length == 64
    assert theirs.eos_token_id == tokenizer.eot_id == ours.eot_id
    for text in (*TEXTS, *WIDE):
        ids = tokenizer.encode(text).tolist()
        assert (
            theirs(text, add_special_tokens=False)["input_ids"] == ids == ours.encode(text).tolist()
        )
        assert theirs.decode(ids) == text == ours.decode(ids)


def test_a_chat_template_is_carried_through_a_run(tmp_path):
    folder = saved(theirs("llama", vocab_size=500), tmp_path / "there")
    write_tokenizer(tokenizer_of("bpe"), folder, context=64)
    template = "{% for m in messages %}\u00e9 {{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    back = converted(converted(folder, tmp_path / "run", "run"), tmp_path / "back", "hf")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
