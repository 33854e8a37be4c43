"""Finds the files of a source by its name or path.

Two kinds of corpora. A *text* is files read one after the other (the built-in corpus, shakespeare,
a text file, a folder of them); its end is held out. A set of *documents* (JSON lines, Parquet,
texts cut at a separator, a data set of the Hugging Face hub) holds out documents by their hash.
Files whose names say train and validation are split as they say.
"""

import codecs
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fastgpt.data.download import published_file
from fastgpt.data.hub import load_splits, revision_of
from fastgpt.data.local_files import list_files
from fastgpt.data.reading import UTF_8, File, Source
from fastgpt.errors import UserError, counted, unknown_name
from fastgpt.files import data_dir

SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)

HUB_PREFIX = "hf:"
HUB = {
    "tinystories": "hf:roneneldan/TinyStories",
    "openwebtext": "hf:Skylion007/openwebtext",
    "fineweb": "hf:HuggingFaceFW/fineweb/sample-10BT",
    "fineweb-edu": "hf:HuggingFaceFW/fineweb-edu/sample-10BT",
}
"""Named sets of documents: hf:owner/name[/configuration][@revision]."""
SEPARATORS = {"tinystories": "<|endoftext|>"}
"""Separator between the documents of a named set that is on disk as text."""
NAMES = ("builtin", "shakespeare", *HUB)

# Tests and installed packages are not the library; encodings and pydoc_data are nearly all
# generated tables, a large part of the bytes.
STDLIB_SKIPPED_FOLDERS = frozenset((
    "test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "__pycache__",
    "lib-dynload", "encodings", "pydoc_data",
))  # fmt: skip
STDLIB_SKIPPED_FILES = frozenset((
    "html/entities.py", "keyword.py", "token.py", "stringprep.py", "re/_casefix.py",
    "_opcode_metadata.py", "sitecustomize.py", "usercustomize.py",
))  # fmt: skip
# Written when Python itself is built: they differ between machines with the same version.
STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
STDLIB_MIN_BYTES = 1_000_000


def find_source(
    source: str, *, separator: str | None = None, field: str = "text", encoding: str = UTF_8
) -> Source:
    """Finds the files of a name or a path.

    Args:
        source: one of `NAMES`, `hf:owner/name[/configuration][@revision]`, a file, a folder, or a
            pattern with `*`, `?` or `**`.
        separator: text between the documents of a file; None: each file is one document.
        field: the field or column that holds the text.
        encoding: encoding of text files, by Python's name.
    Raises:
        UserError: the source does not exist, has no text, or cannot be downloaded.
    """
    encoding = _text_encoding(encoding)
    found = _find(source, separator, field, encoding)
    if encoding != UTF_8 and (source in NAMES or any(f.format != "text" for f in found.files)):
        raise UserError(f"encoding {encoding} is for text files only: {source} is always UTF-8")
    return found


def _text_encoding(name: str) -> str:
    """Returns the usual name of an encoding, such as `utf-8` for `UTF8`."""
    try:
        "a".encode(name)  # bytes may be no text of this encoding
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError) as error:
        raise UserError(
            f"encoding {name!r} is unknown: expected one of Python's text encodings, such as utf-8,"
            " utf-16 or cp1252"
        ) from error


def _find(source: str, separator: str | None, field: str, encoding: str) -> Source:
    if not source:
        raise UserError("the source is empty: expected builtin, shakespeare or a path")
    if separator == "":
        raise UserError("the separator is empty: expected the text between two documents")
    if separator and (source in ("builtin", "shakespeare") or source.startswith(HUB_PREFIX)):
        raise UserError(f"separator {separator!r} is for text files only, not for {source}")
    if source == "builtin":
        return stdlib_source(Path(sysconfig.get_path("stdlib")))
    if source == "shakespeare":
        path = published_file(
            SHAKESPEARE_FILE, SHAKESPEARE_URL, sha256=SHAKESPEARE_SHA256, what="tiny shakespeare",
            instead=f"that file, as {SHAKESPEARE_FILE},",
        )  # fmt: skip
        return Source(name=source, given=source, files=(File(path=str(path), format="text"),))
    if source in HUB:
        return _named_set(source, separator, field)
    if source.startswith(HUB_PREFIX):
        return _hub(source, _file_name(source.split("@")[0].split("/", 1)[-1]), field)
    found = _local(source, encoding)
    return replace(found, separator=separator, field=field)


def stdlib_source(root: Path) -> Source:
    """Returns the built-in corpus: the source of a Python standard library, about 10 MB.

    Files are ordered by their POSIX path, so one installation always gives the same bytes.

    Raises:
        UserError: the library's source is missing (a zipped or an embedded Python).
    """
    paths = [str(root / path) for path in sorted(_stdlib_files(root))]
    size = sum(os.path.getsize(path) for path in paths)
    if size < STDLIB_MIN_BYTES:
        raise UserError(
            f"the built-in corpus is the source of Python's standard library, but {root} holds"
            f" only {size:,} bytes of it; use a text file or a folder instead"
        )
    files = tuple(File(path=path, format="text") for path in paths)
    return Source(name="builtin", given="builtin", files=files, python=platform.python_version())


def _stdlib_files(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in STDLIB_SKIPPED_FOLDERS and not name.startswith(STDLIB_SKIPPED_PREFIXES)
        ]
        for name in files:
            path = Path(folder, name).relative_to(root).as_posix()
            if (
                name.endswith(".py")
                and path not in STDLIB_SKIPPED_FILES
                and not name.startswith(STDLIB_SKIPPED_PREFIXES)
            ):
                yield path


def _named_set(name: str, separator: str | None, field: str) -> Source:
    """Finds the files of a named set in the data folder, else its data set on the hub."""
    folder = data_dir() / name
    if folder.is_dir():
        return replace(
            _local(str(folder), UTF_8), separator=separator or SEPARATORS.get(name), field=field
        )
    return _hub(HUB[name], name, field)


def _hub(source: str, name: str, field: str) -> Source:
    try:
        splits = load_splits(source)
    except UserError as error:
        raise UserError(
            f"{error}; or get its files another way (Parquet, .jsonl or .txt), put them into"
            f" {data_dir() / name} and use that folder"
        ) from error
    named = ("train", "val") if "val" in splits else (None,)
    files = tuple(File(path=source, format="hub", split=split) for split in named)
    revision = revision_of(splits["train"])
    return Source(name=name, given=source, files=files, field=field, revision=revision)


def _local(source: str, encoding: str) -> Source:
    path = Path(source).expanduser()
    if path.is_dir() and any(path.glob("*train*.bin")):
        raise UserError(
            f"{path} has token shards already: pass it to --data.source; only text can be prepared"
        )
    files, skipped = list_files(source, encoding)
    if not files:
        raise _nothing_in(source, path, skipped)
    return Source(
        name=_file_name(path.resolve().name if path.is_dir() else path.name),
        given=source,
        files=tuple(files),
        ends_lines=path.is_dir() or len(files) > 1,
        encoding=encoding,
        skipped=tuple(skipped),
    )


def _nothing_in(source: str, path: Path, skipped: list[str]) -> UserError:
    if skipped:
        count = counted(len(skipped), "file")
        return UserError(f"source {source!r}: no text in it; {count} skipped: {skipped[0]}")
    if path.exists():
        return UserError(f"source {source!r} is empty")
    if len(path.parts) > 1 or path.suffix:
        return UserError(f"source {source!r}: no such file or folder (train.py: --data.source)")
    return unknown_name("corpus", source, NAMES, also="a file or a folder")


def _file_name(name: str) -> str:
    """Returns `name` without its suffixes, in letters, digits, `-` and `_`."""
    stem = name.lstrip(".").split(".")[0].lower()
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)
    return kept.strip("-")[:40] or "corpus"
