import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.errors import UserError
from fastgpt.tokenizer import (
    GPT2_SHA256,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    load_tokenizer,
    make_tokenizer,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
ANY_IDS = st.lists(st.integers(-10, 100_000), max_size=50)
HARD = [
    "Hello world",
    "it's  we'll\tyou'RE \n\n   trailing   ",
    " " * 70 + "\r\n" * 5,
    "naïve café 東京 \U0001f469‍\U0001f469‍\U0001f467 é 1234567890",
    "<|endoftext|> as text",
    "".join(map(chr, range(0x250))),
]


@pytest.fixture(scope="module")
def gpt2():
    folder = Path(os.environ.get("FASTGPT_DATA", "data"))
    if missing := [name for name in GPT2_SHA256 if not (folder / name).is_file()]:
        pytest.skip(f"FASTGPT_DATA has no {' and no '.join(missing)}")
    return GPT2Tokenizer.published()


@given(TEXTS)
def test_bytes_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint16
    assert bytes(ids.tolist()) == text.encode()
    assert ByteTokenizer().decode(ids) == text


@given(st.text(st.characters(), min_size=1))
def test_chars_round_trip_even_of_lone_surrogates(text):
    tokenizer = CharTokenizer.train(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.max() < tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(iter(ids.tolist())) == text


def test_chars_are_numbered_in_code_point_order():
    tokenizer = CharTokenizer.train("ba\nc\U0001f600")
    assert tokenizer.encode("\nabc\U0001f600").tolist() == [0, 1, 2, 3, 4]


def test_chars_beyond_uint16_are_not_cut_off():
    text = "".join(map(chr, range(0x10000, 0x10000 + 65_537)))
    tokenizer = CharTokenizer.train(text)
    assert tokenizer.encode(text).tolist() == list(range(65_537))


def test_unknown_character_is_named_with_its_offset():
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\) at offset 3 .* 4 characters"):
        CharTokenizer.train("cafe").encode("cafés")
    # greater than every known character: must not be looked up past the end of the table
    with pytest.raises(UserError, match=r"U\+1F600\) at offset 0"):
        CharTokenizer.train("cafe").encode("\U0001f600")


@given(ids=ANY_IDS)
def test_decoding_never_fails(ids):
    for tokenizer in (ByteTokenizer(), CharTokenizer.train("abc")):
        text = tokenizer.decode(np.array(ids, np.int64))
        unknown = sum(not 0 <= i < tokenizer.vocab_size for i in ids)
        assert text.count("\ufffd") >= unknown


def test_broken_utf8_decodes_to_replacement_characters():
    assert ByteTokenizer().decode([0xC3, 0x28, 300]) == "\ufffd(\ufffd"
    assert ByteTokenizer().encode("a\ud800").tolist() == [ord("a"), ord("?")]


@pytest.mark.parametrize("into_folder", [True, False])
def test_saved_tokenizers_are_self_sufficient(tmp_path, monkeypatch, into_folder):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "nothing"))
    path = tmp_path if into_folder else tmp_path / "tokenizer.json"
    chars = CharTokenizer.train("ab\n\ud83d\ude00é")
    for tokenizer in (ByteTokenizer(), chars):
        tokenizer.save(path)
        assert (tmp_path / "tokenizer.json").is_file()
        loaded = load_tokenizer(path)
        assert (loaded.kind, loaded.vocab_size) == (tokenizer.kind, tokenizer.vocab_size)
        assert loaded.encode("ab\n").tolist() == tokenizer.encode("ab\n").tolist()
    assert load_tokenizer(path).encode("\ude00\ud83d").tolist() == [5, 4]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"kind": "chars"}', '{"kind": "chars", "chars": 3}']
)
def test_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer file"):
        load_tokenizer(path)


def test_missing_file_and_foreign_kind_are_named(tmp_path):
    with pytest.raises(UserError, match="no such tokenizer file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": "wordpiece"}))
    with pytest.raises(UserError, match=r"tokenizer\.json: unknown tokenizer 'wordpiece'"):
        load_tokenizer(tmp_path)


def test_unknown_kind_offers_the_nearest():
    with pytest.raises(UserError, match="unknown tokenizer 'byte'; did you mean 'bytes'"):
        make_tokenizer("byte", None)
    with pytest.raises(UserError, match="needs a text"):
        make_tokenizer("chars", None)
    with pytest.raises(UserError, match="at least one character"):
        make_tokenizer("chars", "")


def test_gpt2_ids_are_the_published_ones(gpt2):
    assert (gpt2.vocab_size, gpt2.eot_id) == (50_257, 50_256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("Hello").dtype == np.uint16
    assert gpt2.decode([50_256]) == "<|endoftext|>"


def test_gpt2_round_trips_hard_texts(gpt2):
    for text in HARD:
        assert gpt2.decode(gpt2.encode(text)) == text


@given(text=TEXTS, ids=ANY_IDS)
def test_gpt2_round_trip_and_decoding_never_fails(gpt2, text, ids):
    assert gpt2.decode(gpt2.encode(text)) == text
    assert isinstance(gpt2.decode(ids), str)


def test_gpt2_is_saved_and_loaded_without_any_other_file(gpt2, tmp_path, monkeypatch):
    gpt2.save(tmp_path)
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "nothing"))
    assert load_tokenizer(tmp_path).encode(HARD[3]).tolist() == gpt2.encode(HARD[3]).tolist()


def test_gpt2_says_what_is_missing_or_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"vocab\.bpe.*FASTGPT_DATA"):
        GPT2Tokenizer.published()
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=rf"not GPT-2's.*{GPT2_SHA256['vocab.bpe']}"):
        GPT2Tokenizer.published()
