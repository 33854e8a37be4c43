import base64
import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Tokenizer as TheirTokenizer

from fastgpt.data import download
from fastgpt.data.tokenizers import (
    GPT2_SHA256,
    GPT2_URL,
    load_tokenizer,
    make_tokenizer,
    same_tokenizer,
)
from fastgpt.errors import UserError
from tests.data.sets import gpt2_files, tokenizer_of

FAMILY = "\U0001f469‍\U0001f469‍\U0001f467‍\U0001f466"
HARD = [
    "",
    "Hello world",
    "it's  we'll\tyou'RE I'd they've 'tis don''t 's 'll're '",
    "\n\n   trailing   ",
    *(f"{start}{space * n}{end}" for space in (" ", "\n", "\t", "\r\n", "\xa0", "\u3000", " \n")
      for n in (1, 2, 3, 70, 1000) for start in ("", "a", " ") for end in ("", "b", "!", "7")),
    "naïve café e\u0301 東京 1234567890",
    f"{FAMILY} \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd ☃\ufe0f",
    "Ünïcødé Кириллица ελληνικά עברית العربية हिन्दी ไทย 한국어 日本語 \U0001d518\U0001d52b ⅷ½²",
    "<|endoftext|> as text<|endoftext|><|endoftext",
    "\0\x01\x1b[0m\x7f\x80\x9f\x1c\x1d\x1e\x1f\x85\u180e\u200b\u2028\u2029\ufeff\ufffe",
    "x" * 5000 + "=" * 300 + "ab" * 300,
]  # fmt: skip
PIECES = [*" \n\tAb7½!é東", "  ", "'s", "'", "<|endoftext|>", FAMILY]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PIECED = st.lists(st.sampled_from(PIECES)).map("".join)


@pytest.fixture(scope="module")
def gpt2():
    return tokenizer_of("gpt2")


@pytest.fixture(scope="module")
def theirs():
    """Returns a function that encodes text by another library's GPT-2 tokenizer."""
    files = gpt2_files()
    tokenizer = TheirTokenizer(str(files / "encoder.json"), str(files / "vocab.bpe"))
    return lambda text: tokenizer(text, split_special_tokens=True)["input_ids"]


def test_ids_are_the_published_ones(gpt2):
    assert (gpt2.kind, gpt2.vocab_size, gpt2.eot_id) == ("gpt2", 50_257, 50_256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("Hello").dtype == gpt2.encode("").dtype == np.uint16
    assert gpt2.decode([50_256]) == "<|endoftext|>"


def test_hard_texts_have_gpt2s_ids_and_round_trip(gpt2, theirs):
    for text in HARD:
        ids = gpt2.encode(text)
        assert ids.tolist() == theirs(text), text
        assert gpt2.decode(ids) == text


def test_code_points_of_every_class_have_gpt2s_ids(gpt2, theirs):
    """Unicode characters of every class get GPT-2's ids, beside letters, digits and spaces."""
    points = [*range(0x3000), *range(0x3000, 0x30000, 13), *range(0x30000, 0x110000, 997)]
    chars = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    assert len({unicodedata.category(char) for char in chars}) == 29  # all but surrogates
    for i in range(0, len(chars), 1000):
        text = "".join(f"a{c}b1{c}2 {c} {c}{c}\n{c}!{c}?" for c in chars[i : i + 1000])
        assert gpt2.encode(text).tolist() == theirs(text), f"from U+{ord(chars[i]):04X}"


@given(TEXTS | PIECED)
def test_any_text_has_gpt2s_ids(gpt2, theirs, text):
    assert gpt2.encode(text).tolist() == theirs(text)


@pytest.mark.parametrize(
    "space", [" ", "\n", *(pytest.param(x, marks=pytest.mark.slow) for x in ("\u3000", " \t\r\n"))]
)
def test_a_million_spaces_before_a_word(gpt2, theirs, space):
    """A million spaces before a word are encoded, too many for one match of the pattern."""
    run = space * (1_000_000 // len(space))
    text = f"a{run}b{run}{run[:5]}\x1c{run[:20_000]}7 8"
    assert gpt2.encode(text).tolist() == theirs(text)


def test_merges_are_the_published_ones(gpt2, tmp_path, monkeypatch):
    asked, files = [], gpt2_files()

    def fetched(url, sha256, instead):
        asked.append((url, sha256))
        assert instead.startswith("vocab.bpe, as OpenAI published it ")
        return (files / "vocab.bpe").read_bytes()

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(download, "_download", fetched)
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path))
    assert same_tokenizer(make_tokenizer("gpt2", None), gpt2)
    assert asked == [(GPT2_URL, GPT2_SHA256)]
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"vocab\.bpe is not GPT-2's"):
        make_tokenizer("gpt2", None)


def test_a_file_of_version_0_2_is_read_without_the_merges(gpt2, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "nothing"))
    tokens = [base64.b64encode(gpt2.token_bytes(id)).decode() for id in range(50_256)]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"kind": "gpt2", "tokens": tokens}))
    assert load_tokenizer(path).to_json() == gpt2.to_json()
    path.write_text(json.dumps({"kind": "gpt2", "tokens": [*tokens[1:], tokens[0]]}))
    with pytest.raises(UserError, match=r"not a tokenizer file .*tokens are not GPT-2's"):
        load_tokenizer(path)


def test_other_merges_are_not_taken_for_gpt2s(gpt2, tmp_path):
    """A file with GPT-2's words whose merges are in another order has other ids for a text."""
    saved = json.loads(gpt2.to_json())
    saved["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = load_tokenizer(tmp_path)
    text = "Hello world, there"
    ids = tokenizers.Tokenizer.from_str(json.dumps(saved)).encode(text).ids
    assert tokenizer.kind == "bpe"
    assert tokenizer.encode(text).tolist() == ids != gpt2.encode(text).tolist()
