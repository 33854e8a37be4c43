"""Files that are not text are recognised: given one by one, in a folder or by a pattern."""

import pickle
import zipfile
from io import BytesIO

import numpy as np
import pytest
from safetensors.numpy import save

from fastgpt.data.prepare import documents, files
from fastgpt.data.prepare.documents import read_pieces
from fastgpt.data.prepare.sources import find_source
from fastgpt.errors import UserError
from tests.data.sets import PACKERS, write_documents

ENGLISH = "One two three,\nfour five.\n" * 9
CHINESE = "天地玄黃、宇宙洪荒。\n日月盈昃、辰宿列張。\n" * 9
ACCENTS = "Zwölf Boxkämpfer jagen.\n" * 9


def docx():
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("word/document.xml", ENGLISH)
    return content.getvalue()


NO_TEXTS = {
    "pdf": (b"%PDF-1.7\n" + ENGLISH.encode(), "a PDF document: extract its text first"),
    "docx": (docx(), "a zip archive, as .docx"),
    "gzip": (
        PACKERS[".gz"](ENGLISH.encode()),
        "compressed by gzip: give it a name that ends in .gz",
    ),
    "zst": (PACKERS[".zst"](ENGLISH.encode()), "compressed by Zstandard: give it a name"),
    "png": (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    "elf": (b"\x7fELF\2\1\1" + bytes(9), "a compiled program"),
    "pickle": (pickle.dumps([ENGLISH], protocol=4), "a Python pickle"),
    "safetensors": (save({"w": np.zeros(3)}), "a safetensors file"),
    "tar": (b"name".ljust(257, b"\0") + b"ustar\0", "a tar archive: unpack it first"),
    "utf-16": (ENGLISH.encode("utf-16"), "(byte 0xFF at offset 0): it seems to be UTF-16, pass"),
    "utf-16-le": (ENGLISH.encode("utf-16-le"), "seems to be UTF-16-LE, pass --encoding utf-16-le"),
    "utf-16-be": (CHINESE.encode("utf-16-be"), "seems to be UTF-16-BE, pass --encoding utf-16-be"),
    "latin-1": (ACCENTS.encode("latin-1"), "is not UTF-8 (byte 0xF6 at offset 2): it may be in an"),
    "random": (np.random.default_rng(0).bytes(999), "seems to be binary data, expected text"),
    "controls": (b"a few words\1\2" * 99, "is not text (15% control characters from offset 11 on)"),
}


@pytest.mark.parametrize("kind", [*NO_TEXTS, "parquet"])
def test_what_is_no_text_is_named_with_what_to_do(tmp_path, kind):
    path = tmp_path / "x.txt"
    if kind == "parquet":
        write_documents(tmp_path / "x.parquet", [ENGLISH]).rename(path)
        said = "a Parquet file: give it a name that ends in .parquet"
    else:
        content, said = NO_TEXTS[kind]
        path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        find_source(str(path))
    assert all(part in str(raised.value) for part in (f"{path} is not ", said))
    (tmp_path / "good.txt").write_text(ENGLISH)
    for source in (tmp_path, tmp_path / "*.txt"):
        assert find_source(str(source)).skipped == (str(raised.value),)


@pytest.mark.parametrize(
    "text", [CHINESE, ACCENTS, "\x1b[1mbold\x1b[0m\f\x1c\b\r\n", ENGLISH + "\0\x7f"]
)
def test_text_with_a_few_control_characters_is_text(tmp_path, text):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    assert find_source(str(tmp_path)).skipped == ()


@pytest.mark.parametrize("raw", [False, True])
def test_what_turns_into_something_else_is_named_with_the_place(tmp_path, monkeypatch, raw):
    monkeypatch.setattr(files, "SNIFFED_BYTES", 100)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 100)
    (tmp_path / "x.txt").write_bytes(ENGLISH.encode() + bytes(9) + b"more")
    place = len(ENGLISH)
    with pytest.raises(UserError, match=rf"x\.txt is not text \(\d+% control .* offset {place} on"):
        list(read_pieces(find_source(str(tmp_path / "x.txt")), raw=raw))
