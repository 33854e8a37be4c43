import base64
import json
import unicodedata
from unittest import mock

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from fastgpt.data import download
from fastgpt.data.tokenizers import (
    EOT_TOKENS,
    GPT2_SHA256,
    GPT2_URL,
    KINDS,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    same_tokenizer,
)
from fastgpt.errors import UserError
from tests.data.sets import LEARNT, gpt2_files, tokenizer_of
from tests.processes import python

FAMILY = "\U0001f469‍\U0001f469‍\U0001f467‍\U0001f466"
HARD = [
    "",
    "it's  we'll\tyou'RE I'd they've 'tis don''t 's 'll're '",
    *(f"{start}{space * n}{end}" for space in (" ", "\n", "\t", "\r\n", "\xa0", "\u3000", " \n")
      for n in (1, 2, 3, 70, 1000) for start in ("", "a", " ") for end in ("", "b", "!", "7")),
    f"{FAMILY} \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd ☃\ufe0f naïve café e\u0301 1234567890",
    "Кириллица ελληνικά עברית العربية हिन्दी ไทย 한국어 日本語 \U0001d518\U0001d52b ⅷ½²",
    "<|endoftext|> as text<|endoftext|><|endoftext",
    "x" * 5000 + "=" * 300 + "ab" * 300,
]  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = [*" \n\tAb7½!é東", "  ", "'s", "'", "<|endoftext|>", FAMILY]


@pytest.fixture(scope="module")
def gpt2():
    return tokenizer_of("gpt2")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("kind", ["bytes", "chars", "gpt2", "bpe"])
@given(text=TEXTS)
def test_any_text_round_trips(kind, text):
    tokenizer = CharTokenizer(text + "a") if kind == "chars" else tokenizer_of(kind)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert (ids < tokenizer.vocab_size).all()
    assert tokenizer.decode(ids) == tokenizer.decode(iter(ids.tolist())) == text
    if kind == "bytes":
        assert bytes(ids.tolist()) == text.encode()
    if kind == "chars":
        assert tokenizer.vocab_size == len({*text, "a"})


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "bpe"])
def test_lone_surrogates_are_replaced(kind):
    shown, tokenizer = "a???" if kind == "bytes" else "a\ufffd\U0001f600", tokenizer_of(kind)
    assert tokenizer.decode(tokenizer.encode("a\ud800\ud83d\ude00")) == shown


def test_unknown_character_is_named_with_its_offset():
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\) at offset 3 .* 4 characters"):
        CharTokenizer("cafe").encode("cafés")
    # greater than every known character: must not be looked up past the end of the table
    with pytest.raises(UserError, match=r"U\+1F600\) at offset 0"):
        CharTokenizer("cafe").encode("\U0001f600")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(ids=st.lists(st.integers(-10, 60_000) | st.integers(-(2**40), 2**40), max_size=50))
def test_decoding_never_fails(kind, ids):
    tokenizer = tokenizer_of(kind)
    unknown = sum(not 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids).count("\ufffd") >= unknown
    assert tokenizer.decode(np.array(ids, np.int64)) == tokenizer.decode(iter(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tokenizers_are_self_sufficient(tmp_path, file, monkeypatch, kind):
    tokenizer = tokenizer_of(kind)
    tokenizer.save(tmp_path)
    tokenizer.save(tmp_path / "named.json")
    assert (tmp_path / "named.json").read_bytes() == file.read_bytes()
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "nothing"))
    loaded = make_tokenizer(str(file), None)
    for name in ("kind", "vocab_size", "eot_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    ids = tokenizer.encode(LEARNT[1]).tolist()
    assert loaded.encode(LEARNT[1]).tolist() == ids
    assert tokenizers.Tokenizer.from_file(str(file)).encode(LEARNT[1]).ids == ids
    assert same_tokenizer(loaded, tokenizer)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such tokenizer file"),
        ("[]", "not a tokenizer file"),
        ('{"kind": "gpt2", "tokens": ["YQ==", "YQ=="]}', "not GPT-2's"),
        ('{"kind": "char"}', "unknown tokenizer 'char'; .* 'chars'"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "is empty"),
    ],
)
def test_missing_or_damaged_file_is_named(tmp_path, file, content, complaint):
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=rf"tokenizer\.json: .*{complaint}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "vocab_size", "word"),
    [
        ("byte", None, "unknown tokenizer 'byte'; did you mean 'bytes'"),
        ("docs", None, "unknown tokenizer 'docs'"),
        ("gpt2", 1000, "--vocab-size is 1000: the gpt2 tokenizer has its own vocabulary"),
        ("bpe", 256, "--vocab-size is 256: expected 257 to 1,048,576"),
        ("chars", None, "the chars tokenizer needs a text"),
    ],
)
def test_requests_that_cannot_be_are_found_before_any_work(kind, vocab_size, word):
    with pytest.raises(UserError, match=word):
        make_tokenizer(kind, None, vocab_size=vocab_size)


def test_ids_are_written_as_numbers():
    tokenizer = IdTokenizer(300)
    assert tokenizer.encode(" 17 4\n299 ").tolist() == [17, 4, 299]
    assert tokenizer.decode([17, 4, 299]) == "17 4 299"
    for wrong in ("300", "a"):
        with pytest.raises(UserError, match=f"'{wrong}' is not an id: expected 0 to 299"):
            tokenizer.encode(wrong)


def test_files_of_version_0_2_are_read(gpt2, file, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(file.with_name("nothing")))  # without the merges
    tokens = [base64.b64encode(gpt2.token_bytes(id)).decode() for id in range(50_256)]
    for saved, tokenizer in (
        ({"kind": "bytes"}, ByteTokenizer()),
        ({"kind": "chars", "chars": ["\n", "a", "\u00e9"]}, CharTokenizer("a\n\u00e9")),
        ({"kind": "ids", "vocab_size": 300}, IdTokenizer(300)),
        ({"kind": "gpt2", "tokens": tokens}, gpt2),
    ):
        file.write_text(json.dumps(saved))
        loaded = load_tokenizer(file)
        assert type(loaded) is type(tokenizer)
        assert loaded.to_json() == tokenizer.to_json()


@pytest.fixture(scope="module")
def theirs():
    from transformers import GPT2Tokenizer as TheirTokenizer

    files = gpt2_files()
    tokenizer = TheirTokenizer(str(files / "encoder.json"), str(files / "vocab.bpe"))
    return lambda text: tokenizer(text, split_special_tokens=True)["input_ids"]


def test_hard_texts_have_gpt2s_ids_and_round_trip(gpt2, theirs):
    assert (gpt2.kind, gpt2.vocab_size, gpt2.eot_id) == ("gpt2", 50_257, 50_256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.decode([50_256]) == "<|endoftext|>"
    for text in (*HARD, f"a{' ' * 1_000_000}b{' ' * 20_000}7 8"):  # too many for one match
        ids = gpt2.encode(text)
        assert ids.tolist() == theirs(text), text
        assert gpt2.decode(ids) == text


def test_code_points_of_every_class_have_gpt2s_ids(gpt2, theirs):
    points = [*range(0x3000), *range(0x3000, 0x30000, 23), *range(0x30000, 0x110000, 997)]
    chars = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    assert len({unicodedata.category(char) for char in chars}) == 29  # all but surrogates
    for i in range(0, len(chars), 1000):
        text = "".join(f"a{c}b1{c}2 {c} {c}{c}\n{c}!{c}?" for c in chars[i : i + 1000])
        assert gpt2.encode(text).tolist() == theirs(text), f"from U+{ord(chars[i]):04X}"


@given(TEXTS | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_has_gpt2s_ids(gpt2, theirs, text):
    assert gpt2.encode(text).tolist() == theirs(text)


def test_merges_are_the_published_ones(gpt2, tmp_path, monkeypatch):
    published = mock.Mock(return_value=(gpt2_files() / "vocab.bpe").read_bytes())
    monkeypatch.setattr(download, "_download", published)
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path))
    assert make_tokenizer("gpt2", None).to_json() == gpt2.to_json()
    assert published.call_args[0][:2] == (GPT2_URL, GPT2_SHA256)


def test_other_merges_are_not_taken_for_gpt2s(gpt2, file):
    saved = json.loads(gpt2.to_json())
    saved["model"]["merges"].reverse()
    file.write_text(json.dumps(saved))
    tokenizer, text = load_tokenizer(file), "Hello world, there"
    assert tokenizer.kind == "bpe"
    assert tokenizer.encode(text).tolist() != gpt2.encode(text).tolist()


def test_bpe_learns_the_words_of_the_text_and_keeps_hard_texts():
    bpe = tokenizer_of("bpe")
    assert (bpe.kind, bpe.vocab_size, bpe.eot_id) == ("bpe", 500, 0)
    ids = bpe.encode("the cat sat on the mat")
    assert ids.dtype == np.uint16
    assert [bpe.decode([i]) for i in ids] == ["the", " cat", " sat", " on", " the", " mat"]
    for text in (*HARD, "".join(map(chr, range(0x3000)))):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert bpe.eot_id not in ids
    assert bpe.decode([0]) == "<|endoftext|>"


def test_wordpiece_keeps_case_and_marks_the_unknown():
    wordpiece = tokenizer_of("wordpiece")
    assert (wordpiece.kind, wordpiece.vocab_size, wordpiece.eot_id) == ("wordpiece", 400, 1)
    ids = wordpiece.encode("The cat sat on  the log, naïve \u2603")
    assert wordpiece.decode(ids) == "The cat sat on the log, naïve [UNK]"
    assert wordpiece.encode("The")[0] != wordpiece.encode("the")[0]
    assert 1 not in wordpiece.encode("a [SEP] b")
    assert wordpiece.decode([1]) == "[SEP]"
    assert wordpiece.special == {"[UNK]": 0, "[SEP]": 1}


def test_training_is_deterministic():
    script = (
        "from tests.data.sets import tokenizer_of\n"
        "print(tokenizer_of('bpe').to_json() + tokenizer_of('wordpiece').to_json())"
    )
    done = python("-c", script, RAYON_NUM_THREADS="8", PYTHONHASHSEED="8")
    assert done.stdout == tokenizer_of("bpe").to_json() + tokenizer_of("wordpiece").to_json() + "\n"


def words(vocabulary, unk="?"):
    """A tokenizer of the tokenizers library that knows whole words only."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_foreign_file_neither_cuts_nor_pads_nor_adds_and_is_saved_as_it_was(file):
    theirs = words({"?": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4})
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    theirs.enable_truncation(3)
    theirs.enable_padding(length=8)
    theirs.save(str(file))
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("a b a b").tolist() == [3, 4, 3, 4]
    assert (tokenizer.kind, tokenizer.eot_id) == ("wordlevel", 2)
    assert tokenizer.to_json() == file.read_text()
    theirs.save(str(file), pretty=False)
    assert same_tokenizer(load_tokenizer(file), tokenizer)


def test_a_file_with_other_words_than_ours_is_read_as_it_is(file):
    saved = json.loads(CharTokenizer("ab").to_json())
    for found in ({"b": 0, "a": 1}, {"a": 0, "b": 5}):
        saved["model"]["vocab"] = found
        file.write_text(json.dumps(saved))
        tokenizer = load_tokenizer(file)
        assert tokenizer.kind == "wordlevel"
        assert tokenizer.encode("ab").tolist() == [found["a"], found["b"]]


def test_vocabulary_covers_gaps_and_added_tokens_and_may_lack_words():
    theirs = words({"?": 0, "a": 70_000})
    theirs.add_tokens(["added"])
    tokenizer = Tokenizer(theirs.to_str())
    ids = tokenizer.encode("a added")
    assert tokenizer.vocab_size == ids.max() + 1 > 70_000
    assert (ids.dtype, ids[0]) == (np.uint32, 70_000)
    both = words({"a": 0, "[SEP]": 1, EOT_TOKENS[0]: 2})
    assert Tokenizer(both.to_str()).eot_id == 2  # the more usual name
    with pytest.raises(UserError, match="wordlevel tokenizer cannot encode a text"):
        Tokenizer(words({"a": 0}, unk="missing").to_str()).encode("b")
