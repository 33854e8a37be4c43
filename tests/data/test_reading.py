import hashlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.data import reading
from fastgpt.data.reading import opened, read_chunks
from fastgpt.data.sources import find_source
from fastgpt.data.tokenizers import make_tokenizer
from fastgpt.data.writing import scan
from fastgpt.errors import UserError
from tests.data.sets import PACKERS, tokenizer_of, write_documents

DOCUMENTS = [
    "One two three.", "Zwölf Boxkämpfer\njagen.\r\n", "京都の\U0001f469‍\U0001f467 寺 ", "",
    "Four " * 30, "\x1c\x1d five \xa0 six", "--" * 3 + "7", "One two three.",
]  # fmt: skip
# White space of every sort beside words: \x1c-\x1f are white space for Python, not for GPT-2.
SPACES = " \n\r\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u200b\u180e"
MIXED = st.lists(
    st.sampled_from([*SPACES, "\r\n", "   ", " \n \n", "a", "word", "don't", "'", "12345", "é", "—",
                     "東京", "\U0001f469‍\U0001f467", "<|endoftext|>", "...", "...\x1c ", "\0"]),
    max_size=60,
).map("".join)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Makes every buffer so small that documents are cut wherever they can be."""
    for name, value in {"CHUNK_BYTES": 7, "BATCH_ROWS": 2, "MAX_CHUNK": 25}.items():
        monkeypatch.setattr(reading, name, value)


@pytest.fixture(scope="module", params=["gpt2", "bpe", "wordpiece"])
def tokenizer(request):
    if request.param == "gpt2":
        return tokenizer_of("gpt2")
    # with merges over what is white space for Python alone
    text = "word don't a word 12345 ... a é — <|endoftext|> \n ...\x1c \x1d'\x1e\r\n" * 3
    return make_tokenizer(request.param, lambda: [text], vocab_size=400)


def chunks(path, raw=False, **options):
    return list(read_chunks(find_source(str(path), **options), raw=raw))


def texts(path, **options):
    return [chunk.text for chunk in chunks(path, **options)]


@given(text=MIXED, chunk=st.integers(1, 9))
@settings(max_examples=100)
def test_parts_of_a_text_have_the_tokens_of_the_whole(tokenizer, tmp_path_factory, text, chunk):
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_text("x" + text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_BYTES", chunk)
        patch.setattr(reading, "MOST_NULS", 1)
        parts = texts(path)
    assert "".join(parts) == "x" + text
    expected = tokenizer.encode("x" + text).tolist()
    assert np.concatenate([tokenizer.encode(part) for part in parts]).tolist() == expected


def test_text_is_cut_into_many_parts_of_bounded_length(tmp_path, small):
    (tmp_path / "x.txt").write_text("some words " * 50 + "y" * 100 + " " * 100 + "words")
    parts = texts(tmp_path / "x.txt")
    assert len(parts) > 60
    assert max(map(len, parts)) < 25 + 7  # MAX_CHUNK, and what was read to pass it


@pytest.mark.parametrize("raw", [False, True])
def test_folder_is_read_as_one_text_whose_files_end_their_lines(tmp_path, small, raw):
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, content in {"a": "no newline", "b": "", "c": "two words\n", "d": "naïve"}.items():
        (folder / name).write_text(content, encoding="utf-8")
    found = chunks(folder, raw=raw)
    text = "no newline\ntwo words\nnaïve\n"
    whole = text.encode() if raw else text
    assert whole[:0].join(chunk.text for chunk in found) == whole
    assert sum(chunk.begins for chunk in found) == 3
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert scan(find_source(str(folder)), raw=raw) == (len(whole), digest)
    assert texts(folder / "a")[-1].endswith("newline")  # alone: as it is


ENGLISH = "One two three,\nfour five.\n" * 9
NO_TEXTS = {
    "gzip": PACKERS[".gz"](ENGLISH.encode()),
    "utf-16-le": ENGLISH.encode("utf-16-le"),
    "latin-1": "Zwölf Boxkämpfer jagen.\n".encode("latin-1"),
    "cut": "é京".encode()[:-1],
}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", NO_TEXTS)
def test_what_is_no_text_is_named(tmp_path, monkeypatch, kind, raw):
    (tmp_path / "x.txt").write_bytes(NO_TEXTS[kind])
    for chunk in (2**18, 1) if kind != "utf-16-le" else (2**18,):
        monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
        with pytest.raises(UserError, match=r"x\.txt is not UTF-8 .* --encoding utf-16"):
            chunks(tmp_path / "x.txt", raw=raw)


def test_text_with_a_few_control_characters_is_text(tmp_path):
    text = "天地玄黃\x1b[1mb\x1b[0m\f\x1c\b\r\n\0"
    (tmp_path / "x.txt").write_text(text, encoding="utf-8", newline="")
    assert "".join(texts(tmp_path / "x.txt")) == text


PACKED = [f"{kind}{suffix}" for kind in ("jsonl", "txt") for suffix in ("", *PACKERS)]


@pytest.mark.parametrize("name", ["ndjson", "parquet", "arrow", "feather.arrow", *PACKED])
def test_every_format_gives_the_same_documents(tmp_path, small, name):
    expected, separator = list(filter(None, DOCUMENTS)), None
    if name.startswith("txt"):  # a separator stands on a line of its own
        separator, expected = "<|end|>", [text.strip("\r\n") for text in expected]
    path = write_documents(tmp_path / f"x.{name}", DOCUMENTS, separator=f"\n{separator}\n")
    found = chunks(path, separator=separator)
    assert [chunk.text for chunk in found] == expected
    assert all(chunk.begins for chunk in found)


def test_missing_texts_are_passed_over_and_broken_pairs_replaced(tmp_path, small):
    path = write_documents(tmp_path / "x.parquet", ["a", None, "", None, "b"], field="content")
    assert texts(path, field="content") == ["a", "b"]
    lines = ['\ufeff{"text": "one"}\r\n', "\n", '{"n": 1, "text": "\\ud83d\\ude00\\ud800"}']
    (tmp_path / "x.jsonl").write_text("".join(lines), encoding="utf-8", newline="")
    assert texts(tmp_path / "x.jsonl") == ["one", "\U0001f600?"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b'{"text": "cut', '{"text": "cut'),
        (b'{"text": "caf\xe9"}', '{"text": "caf\N{REPLACEMENT CHARACTER}"}'),
        (b'{"a":' * 10**5, '{"a":' * 40 + "..."),
        (b'{"txt": "x", "n": 1}', '{"txt": "x", "n": 1}'),
        (b'["text"]', '["text"]'),
        (b'{"text": "%s"}' % (b"x" * 10**6), '{"text": "x'),  # no end before memory is full
    ],
)
def test_line_that_is_no_document_is_named(tmp_path, monkeypatch, line, shown):
    monkeypatch.setattr(reading, "MAX_LINE", 6 * 10**5)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=r"x\.jsonl line 3: .* the field 'text'") as raised:
        chunks(tmp_path / "x.jsonl")
    assert shown in str(raised.value)


def test_separator_that_never_comes_is_named_before_memory_is_full(tmp_path, monkeypatch, small):
    monkeypatch.setattr(reading, "MAX_DOCUMENT", 100)
    (tmp_path / "x.txt").write_text("one--two--" + "three" * 30)
    with pytest.raises(UserError, match=r"x\.txt: no '--' in 100 characters:"):
        chunks(tmp_path / "x.txt", separator="--")


@pytest.mark.parametrize("suffix", PACKERS)
def test_damaged_compressed_file_is_named(tmp_path, suffix):
    path, packed = tmp_path / f"x.txt{suffix}", PACKERS[suffix](ENGLISH.encode())
    damaged = [ENGLISH.encode(), packed[:-6], packed + packed[:-6]]
    if suffix == ".gz":  # a bit of its checksum
        damaged.append(packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"^cannot read {path}: \w[^\n]+$"):
            chunks(path)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather.arrow"])
def test_damaged_parquet_or_arrow_is_named(tmp_path, name):
    path = write_documents(tmp_path / name, ["first"] * 9)
    with pytest.raises(UserError, match="has no column 'body'"):
        chunks(path, field="body")
    content = path.read_bytes()
    for damaged in (content[:100], content[:-300], content.replace(b"first", b"fir\xff\xfe")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^cannot read .*{name}: [^\n]+$"):
            chunks(path)


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=f"{tmp_path}: Is a directory"), opened(str(tmp_path)):
        pass
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.zst").write_bytes(b"x")
    with pytest.raises(UserError, match="needs pyarrow"):
        chunks(tmp_path / "x.zst")
