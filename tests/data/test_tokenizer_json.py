import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from fastgpt.data.tokenizers import (
    EOT_TOKENS,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    same_tokenizer,
)
from fastgpt.errors import UserError
from tests.data.sets import tokenizer_of
from tests.processes import python


@pytest.fixture(scope="module")
def bpe():
    return tokenizer_of("bpe")


@pytest.fixture(scope="module")
def wordpiece():
    return tokenizer_of("wordpiece")


def words(vocabulary, **more):
    """A tokenizer of the tokenizers library that knows whole words only."""
    model = models.WordLevel(vocabulary, unk_token=more.pop("unk", "?"))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, value in more.items():
        setattr(tokenizer, name, value)
    return tokenizer


# --- trained --------------------------------------------------------------------------------------


def test_bpe_learns_the_words_of_the_text(bpe):
    assert (bpe.kind, bpe.vocab_size, bpe.eot_id) == ("bpe", 500, 0)
    ids = bpe.encode("the cat sat on the mat")
    assert ids.dtype == np.uint16
    assert [bpe.decode([i]) for i in ids] == ["the", " cat", " sat", " on", " the", " mat"]


def test_bpe_round_trips_hard_texts(bpe):
    many = "".join(map(chr, range(0x3000)))
    for text in ("  a\r\n\t b" + " " * 3000 + "c 's", "a <|endoftext|>", many):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert bpe.eot_id not in ids
    assert bpe.decode([0]) == "<|endoftext|>"


def test_wordpiece_keeps_case_and_marks_the_unknown(wordpiece):
    assert (wordpiece.kind, wordpiece.vocab_size, wordpiece.eot_id) == ("wordpiece", 400, 1)
    ids = wordpiece.encode("The cat sat on  the log, naïve \u2603")
    assert wordpiece.decode(ids) == "The cat sat on the log, naïve [UNK]"
    assert wordpiece.encode("The")[0] != wordpiece.encode("the")[0]
    assert 1 not in wordpiece.encode("a [SEP] b")
    assert wordpiece.decode([1]) == "[SEP]"
    special = [token["content"] for token in json.loads(wordpiece.to_json())["added_tokens"]]
    assert special == ["[UNK]", "[SEP]"]


@pytest.mark.parametrize(("kind", "fewest"), [("bpe", 257), ("wordpiece", 2)])
def test_small_texts_give_small_vocabularies(kind, fewest):
    assert make_tokenizer(kind, list).vocab_size == fewest
    assert fewest < make_tokenizer(kind, lambda: ["ab ab"]).vocab_size < fewest + 10


@pytest.mark.parametrize("threads", ["1", "2", "8"])
def test_training_is_deterministic(bpe, wordpiece, threads):
    script = (
        "from tests.data.sets import tokenizer_of\n"
        "print(tokenizer_of('bpe').to_json() + tokenizer_of('wordpiece').to_json())"
    )
    done = python("-c", script, RAYON_NUM_THREADS=threads, PYTHONHASHSEED=threads)
    assert done.stdout == bpe.to_json() + wordpiece.to_json() + "\n"


# --- files ----------------------------------------------------------------------------------------


def test_saved_file_is_read_by_the_package_itself(bpe, wordpiece, tmp_path):
    text = "the dog's mat: 東京!"
    for tokenizer in (bpe, wordpiece):
        tokenizer.save(tmp_path)
        theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert theirs.encode(text).ids == tokenizer.encode(text).tolist()
    assert not same_tokenizer(bpe, wordpiece)


def test_foreign_file_neither_cuts_nor_pads_nor_adds_and_is_saved_as_it_was(tmp_path):
    theirs = words({"?": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4})
    theirs.add_special_tokens(["<s>", "</s>"])
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    theirs.enable_truncation(3)
    theirs.enable_padding(length=8)
    theirs.save(str(tmp_path / "foreign.json"))
    assert theirs.encode("a b a b").ids == [1, 3, 2, 0, 0, 0, 0, 0]
    tokenizer = load_tokenizer(tmp_path / "foreign.json")
    assert tokenizer.encode("a b a b").tolist() == [3, 4, 3, 4]
    assert tokenizer.encode("").tolist() == []
    assert (tokenizer.kind, tokenizer.eot_id) == ("wordlevel", 2)
    tokenizer.save(tmp_path / "saved.json")
    assert (tmp_path / "saved.json").read_text() == (tmp_path / "foreign.json").read_text()
    theirs.save(str(tmp_path / "tight.json"), pretty=False)
    assert same_tokenizer(load_tokenizer(tmp_path / "tight.json"), tokenizer)


def test_vocabulary_covers_gaps_and_added_tokens():
    theirs = words({"?": 0, "a": 70_000})
    theirs.add_tokens(["added"])
    tokenizer = Tokenizer(theirs.to_str())
    ids = tokenizer.encode("a added")
    assert tokenizer.vocab_size == ids.max() + 1 > 70_000
    assert ids.dtype == np.uint32
    assert ids[0] == 70_000


@pytest.mark.parametrize(
    ("names", "eot"),
    [
        *(([name], name) for name in EOT_TOKENS),
        (["[SEP]", EOT_TOKENS[0]], EOT_TOKENS[0]),
        ([], None),
    ],
)
def test_first_of_the_usual_names_ends_a_text(names, eot):
    vocabulary = {"?": 0, "a": 1} | {name: i for i, name in enumerate(names, start=5)}
    assert Tokenizer(words(vocabulary).to_str()).eot_id == vocabulary.get(eot)


def test_text_without_ids_is_an_error():
    tokenizer = Tokenizer(words({"a": 0}, unk="missing").to_str())
    with pytest.raises(UserError, match=r"wordlevel tokenizer cannot encode a text: .*UNK"):
        tokenizer.encode("b")
