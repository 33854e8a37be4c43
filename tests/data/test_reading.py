import hashlib
import io

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.data import reading
from fastgpt.data.reading import read_chunks
from fastgpt.data.sources import find_source
from fastgpt.data.tokenizers import make_tokenizer
from fastgpt.data.writing import scan
from fastgpt.errors import UserError
from tests.data.sets import PACKERS, gpt2_files, write_documents

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
        gpt2_files()
        return make_tokenizer("gpt2", None)
    # with merges over what is white space for Python alone
    text = "word don't a word 12345 ... a é — <|endoftext|> \n ...\x1c \x1d'\x1e\r\n" * 3
    return make_tokenizer(request.param, lambda: [text], vocab_size=400)


def chunks(path, raw=False, **options):
    return list(read_chunks(find_source(str(path), **options), raw=raw))


# --- texts ----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=MIXED, chunk=st.integers(1, 9))
def test_parts_of_a_text_have_the_tokens_of_the_whole(tokenizer, tmp_path_factory, text, chunk):
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_text("x" + text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_BYTES", chunk)
        patch.setattr(reading, "MOST_NULS", 1)
        parts = [chunk.text for chunk in chunks(path)]
    assert "".join(parts) == "x" + text
    expected = tokenizer.encode("x" + text).tolist()
    assert np.concatenate([tokenizer.encode(part) for part in parts]).tolist() == expected


def test_text_is_cut_into_many_parts_of_bounded_length(tmp_path, small):
    (tmp_path / "x.txt").write_text("some words " * 50 + "y" * 100 + " " * 100 + "words")
    parts = [chunk.text for chunk in chunks(tmp_path / "x.txt")]
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
    length, digest = scan(find_source(str(folder)), raw=raw)
    assert length == len(whole)
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert [chunk.text for chunk in chunks(folder / "a")][-1].endswith("newline")  # alone: as it is


# --- documents ------------------------------------------------------------------------------------

PACKED = [f"{kind}{suffix}" for kind in ("jsonl", "txt") for suffix in ("", *PACKERS)]


@pytest.fixture(params=["ndjson", "json", "parquet", "arrow", "feather.arrow", *PACKED])
def written(request, tmp_path):
    separator = "\n<|end|>\n" if request.param.startswith("txt") else ""
    path = write_documents(tmp_path / f"x.{request.param}", DOCUMENTS, separator=separator)
    return path, {"separator": "<|end|>"} if separator else {}


def test_every_format_gives_the_same_documents(written, small):
    path, options = written
    expected = list(filter(None, DOCUMENTS))
    if options:  # a separator stands on a line of its own
        expected = [text.strip("\r\n") for text in expected]
    found = chunks(path, **options)
    assert [chunk.text for chunk in found] == expected
    assert all(chunk.begins for chunk in found)


def test_missing_texts_of_parquet_are_passed_over(tmp_path, small):
    path = write_documents(tmp_path / "x.parquet", ["a", None, "", None, "b"], field="content")
    assert [chunk.text for chunk in chunks(path, field="content")] == ["a", "b"]


def test_json_lines_may_have_a_mark_blank_lines_and_broken_pairs(tmp_path):
    lines = ['\ufeff{"text": "one"}\r\n', "\n", '{"n": 1, "text": "\\ud83d\\ude00\\ud800"}']
    (tmp_path / "x.jsonl").write_text("".join(lines), encoding="utf-8", newline="")
    assert [chunk.text for chunk in chunks(tmp_path / "x.jsonl")] == ["one", "\U0001f600?"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b'{"text": "cut', '{"text": "cut'),
        (b'{"text": "caf\xe9"}', '{"text": "caf\N{REPLACEMENT CHARACTER}"}'),
        (b'{"a":' * 10**5, '{"a":' * 40 + "..."),
        (b'{"txt": "x", "n": 1}', '{"txt": "x", "n": 1}'),
        (b'{"text": 1}', '{"text": 1}'),
        (b'["text"]', '["text"]'),
    ],
)
def test_line_that_is_no_document_is_named(tmp_path, line, shown):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    said = r"x\.jsonl line 3: expected a JSON object with text in the field 'text', which --field"
    with pytest.raises(UserError, match=said) as raised:
        chunks(tmp_path / "x.jsonl")
    assert shown in str(raised.value)


@pytest.mark.parametrize("damage", ["end", "page", "not UTF-8"])
def test_damaged_parquet_is_named_in_one_line(tmp_path, damage):
    path = write_documents(tmp_path / "x.parquet", ["first"] * 5)
    content = path.read_bytes()
    if damage == "end":
        path.write_bytes(content[:-9])
    elif damage == "page":
        place = content.index(b"first")
        path.write_bytes(content[: place - 25] + b"x" * 30 + content[place + 5 :])
    else:
        ends, text = map(pyarrow.py_buffer, (np.array([0, 2, 4], "<i4"), b"ok\xff\xfe"))
        column = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, ends, text])
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(UserError, match=r"^cannot read .*x\.parquet: [^\n]+$"):
        chunks(path)


@pytest.mark.parametrize("name", ["x.arrow", "x.feather.arrow"])
def test_damaged_arrow_is_named_in_one_line(tmp_path, name):
    path = write_documents(tmp_path / name, ["first"] * 9)
    with pytest.raises(UserError, match=rf"{name} has no column 'body' of text"):
        chunks(path, field="body")
    for damaged in (path.read_bytes()[:100], path.read_bytes()[:-300], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^cannot read .*{name}: [^\n]+$"):
            chunks(path)


def test_separator_that_never_comes_is_named_before_memory_is_full(tmp_path, monkeypatch, small):
    monkeypatch.setattr(reading, "MAX_DOCUMENT", 100)
    (tmp_path / "x.txt").write_text("one--two--" + "three" * 30)
    with pytest.raises(UserError, match=r"x\.txt: no '--' in 100 characters:"):
        chunks(tmp_path / "x.txt", separator="--")


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.jsonl", "x.jsonl.zst"])
def test_no_more_is_read_than_is_asked_for(tmp_path, monkeypatch, name):
    noise = np.random.default_rng(0).bytes(4 * reading.CHUNK_BYTES).hex()  # it packs badly
    texts = [noise[i : i + 1000] for i in range(0, len(noise), 1000)]
    path = write_documents(tmp_path / name, texts, separator=" ")
    files = []

    def remembered(*args):
        files.append(io.open(*args))  # noqa: SIM115, UP020 - reading has another open
        return files[0]

    monkeypatch.setattr(reading, "open", remembered, raising=False)
    found = read_chunks(find_source(str(path)))
    next(found)
    [file] = files
    assert 0 < file.raw.tell() <= 3 * reading.CHUNK_BYTES < path.stat().st_size
    found.close()
    assert file.closed


def test_line_of_json_without_end_is_named_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_LINE", 100)
    write_documents(tmp_path / "x.jsonl.gz", ["short", "a" * 10**6])
    with pytest.raises(UserError, match=r"line 2: expected a JSON object"):
        chunks(tmp_path / "x.jsonl.gz")
