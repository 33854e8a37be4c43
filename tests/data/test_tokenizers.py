import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.data.tokenizers import (
    KINDS,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    load_tokenizer,
    make_tokenizer,
    same_tokenizer,
)
from fastgpt.errors import UserError
from tests.data.sets import LEARNT, tokenizer_of


@pytest.fixture(scope="module")
def tokenizer(request):
    """Returns a tokenizer of each kind, made before the timed test begins."""
    return tokenizer_of(request.param)


each_kind = pytest.mark.parametrize("tokenizer", KINDS, indirect=True)
each_lossless_kind = pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "bpe"], indirect=True)


@each_lossless_kind
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    if tokenizer.kind == "bytes":
        assert bytes(ids.tolist()) == text.encode()


@each_lossless_kind
def test_lone_surrogates_are_replaced(tokenizer):
    shown = "a???" if tokenizer.kind == "bytes" else "a\ufffd\U0001f600"
    assert tokenizer.decode(tokenizer.encode("a\ud800\ud83d\ude00")) == shown


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_chars_round_trip(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.max() < tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(iter(ids.tolist())) == text


def test_chars_beyond_uint16_are_not_cut_off():
    text = "".join(map(chr, range(0x10000, 0x10000 + 65_537)))
    tokenizer = CharTokenizer(text)
    assert tokenizer.encode(text).tolist() == list(range(65_537))


def test_unknown_character_is_named_with_its_offset():
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\) at offset 3 .* 4 characters"):
        CharTokenizer("cafe").encode("cafés")
    # greater than every known character: must not be looked up past the end of the table
    with pytest.raises(UserError, match=r"U\+1F600\) at offset 0"):
        CharTokenizer("cafe").encode("\U0001f600")


@each_kind
@given(ids=st.lists(st.integers(-10, 60_000) | st.integers(-(2**40), 2**40), max_size=50))
def test_decoding_never_fails(tokenizer, ids):
    unknown = sum(not 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids).count("\ufffd") >= unknown
    assert tokenizer.decode(np.array(ids, np.int64)) == tokenizer.decode(iter(ids))


@each_kind
@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_saved_tokenizers_are_self_sufficient(tmp_path, monkeypatch, tokenizer, name):
    tokenizer.save(tmp_path / name)
    assert (tmp_path / "tokenizer.json").is_file()
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "nothing"))
    for loaded in (load_tokenizer(tmp_path), make_tokenizer(str(tmp_path / name), None)):
        for name in ("kind", "vocab_size", "eot_id"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
        assert loaded.encode(LEARNT[1]).tolist() == tokenizer.encode(LEARNT[1]).tolist()
        assert same_tokenizer(loaded, tokenizer)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such tokenizer file"),
        ("", "not a tokenizer file"),
        ("[]", "not a tokenizer file"),
        ('{"kind": "chars"}', "not a tokenizer file"),
        ('{"kind": "chars", "chars": 3}', "not a tokenizer file"),
        ('{"kind": "gpt2", "tokens": ["YQ==", "YQ=="]}', "not a tokenizer file .*not GPT-2's"),
        ('{"kind": "char"}', "unknown tokenizer 'char'; .* 'chars'"),
        ('{"model": {"type": "BPE"}}', "not a tokenizer that the tokenizers package can read"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "is empty"),
    ],
)
def test_missing_or_damaged_file_is_named(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=rf"tokenizer\.json: .*{complaint}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "tokenizer"),
    [
        ('{"kind": "bytes"}', ByteTokenizer()),
        ('{"kind": "chars", "chars": ["\\n", "a", "\\u00e9"]}', CharTokenizer("a\n\u00e9")),
        ('{"kind": "ids", "vocab_size": 300}', IdTokenizer(300)),
    ],
)
def test_files_of_version_0_2_are_read(tmp_path, content, tokenizer):
    (tmp_path / "tokenizer.json").write_text(content)
    assert load_tokenizer(tmp_path).to_json() == tokenizer.to_json()
    tokenizer.save(tmp_path)
    for loaded in (load_tokenizer(tmp_path), tokenizer):
        assert type(loaded) is type(tokenizer)
        assert loaded.to_json() == tokenizer.to_json()


def test_a_file_with_other_words_than_ours_is_read_as_it_is(tmp_path):
    saved = json.loads(CharTokenizer("ab").to_json())
    for words in ({"b": 0, "a": 1}, {"a": 0, "b": 5}):
        saved["model"]["vocab"] = words
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.kind == "wordlevel"
        assert tokenizer.encode("ab").tolist() == [words["a"], words["b"]]


def test_ids_are_written_as_numbers():
    tokenizer = IdTokenizer(300)
    assert tokenizer.kind == "ids"
    assert tokenizer.encode(" 17 4\n299 ").tolist() == [17, 4, 299]
    assert tokenizer.decode([17, 4, 299]) == "17 4 299"
    for wrong in ("300", "a", "1,2"):
        with pytest.raises(UserError, match=f"'{wrong}' is not an id: expected 0 to 299"):
            tokenizer.encode(wrong)
    with pytest.raises(UserError, match="vocab_size is 0: expected 1 or more"):
        IdTokenizer(0)


def test_nothing_to_learn_from_is_an_error():
    for kind in ("chars", "bpe", "wordpiece"):
        with pytest.raises(UserError, match=f"the {kind} tokenizer needs a text"):
            make_tokenizer(kind, None)
    with pytest.raises(UserError, match="at least one character"):
        make_tokenizer("chars", lambda: [""])


@pytest.mark.parametrize(
    ("kind", "vocab_size", "complaint"),
    [
        ("byte", None, "unknown tokenizer 'byte'; did you mean 'bytes'"),
        ("", None, "unknown tokenizer '' .*'wordpiece', the path of a tokenizer.json"),
        ("missing/tokenizer.json", None, "unknown tokenizer 'missing/tokenizer.json' .*'bpe'"),
        ("docs", None, "unknown tokenizer 'docs' .*or of a folder with one"),
        ("gpt2", 1000, "--vocab-size is 1000: the gpt2 tokenizer has its own vocabulary, exp"),
        ("bpe", 256, "--vocab-size is 256: expected 257 to 1,048,576"),
        ("wordpiece", 2**40, "--vocab-size is 1099511627776: expected 257 to"),
    ],
)
def test_requests_that_cannot_be_are_found_before_any_work(kind, vocab_size, complaint):
    def texts():
        raise AssertionError("the corpus was read")

    with pytest.raises(UserError, match=complaint):
        make_tokenizer(kind, texts, vocab_size=vocab_size)


def test_tokenizers_are_the_same_if_their_content_is():
    assert same_tokenizer(CharTokenizer("ab"), CharTokenizer("ba"))
    assert not same_tokenizer(CharTokenizer("ab"), CharTokenizer("ac"))
    assert not same_tokenizer(ByteTokenizer(), CharTokenizer("ab"))
