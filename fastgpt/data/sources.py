"""Finds the files of a source by its name or path.

Two kinds of corpora. A *text* is files read one after the other (the built-in corpus, shakespeare,
a text file, a folder of them); its end is held out. A set of *documents* (JSON lines, Parquet,
Arrow, texts cut at a separator, a dataset of the Hugging Face hub) holds out documents by their
hash. Files whose names say train and validation are split as they say.
"""

import codecs
import glob
import os
import platform
import re
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastgpt.data.download import published_file
from fastgpt.data.reading import OPENERS, UTF_8, Source, SourceFile, load_splits
from fastgpt.errors import UserError, unknown_name
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
PREPARED = {
    "tinystories-char": ("TinyStories-valid.txt", "--tokenizer chars "),
    "pubmed": ("abstracts.jsonl", "--tokenizer wordpiece --vocab-size 28996 --val-fraction 0.1 "),
}
"""File and flags that the datasets `prepared:NAME` of the recipes are prepared with."""
SEPARATORS = {"tinystories": "<|endoftext|>"}
"""Separator between the documents of a named set that is on disk as text."""
ABOUT = re.compile(r"(readme|licen[sc]e|notice|citation)\b.*|.*\.(json|ya?ml)", re.I)
"""Names of texts about a dataset, which are left out beside its documents."""
NAMES = ("builtin", "shakespeare", *HUB)
FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
"""Formats of documents, by suffix; all other files are texts."""
SPLIT_NAMES = {"train": "train", "valid": "val", "validation": "val", "val": "val", "test": "test"}

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


def resolve_source(source: str, warn: Callable[[str], None]) -> str:
    """Resolves `data.source`: `prepared` is GPT-2's data, or with a warning the built-in corpus."""
    kind, _, name = source.partition(":")
    if kind != "prepared":
        return source
    folder = data_dir() / (name or "gpt2")
    if (folder / "manifest.json").exists():
        return str(folder)
    if name:
        what, flags = PREPARED.get(name, ("SOURCE", ""))
        raise UserError(
            f"--data.source is {source}, but {folder} is not a prepared directory: get {what}"
            f" and run python -m fastgpt.prepare {what} {flags}--out {folder}"
        )
    warn(
        f"no prepared data in {folder}: training on the built-in corpus as bytes. To prepare "
        f"real text: python -m fastgpt.prepare FILE_OR_FOLDER --tokenizer gpt2 --out {folder}"
    )
    return "builtin"


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
        UserError: the source does not exist, has no text or several kinds of files, or cannot be
            downloaded.
    """
    if not source:
        raise UserError("the source is empty: expected builtin, shakespeare or a path")
    if separator == "":
        raise UserError("the separator is empty: expected the text between two documents")
    try:
        "a".encode(encoding)  # bytes may be no text of this encoding
        codecs.getincrementaldecoder(encoding)
        encoding = codecs.lookup(encoding).name  # `utf-8` for `UTF8`
    except (LookupError, ValueError) as error:
        raise UserError(
            f"encoding {encoding!r} is unknown: expected one of Python's text encodings, such as"
            " utf-8, utf-16 or cp1252"
        ) from error
    known = source in ("builtin", "shakespeare") or source.startswith(HUB_PREFIX)
    for_text = separator is not None or encoding != UTF_8
    found = None if for_text and known else _find(source)
    if found is None or (for_text and found.format != "text"):
        given = f"encoding {encoding}" if separator is None else f"separator {separator!r}"
        raise UserError(f"{given} is for text files only, not for {source}")
    if source in SEPARATORS and found.format == "text":
        separator = separator or SEPARATORS[source]
    return replace(found, separator=separator, field=field, encoding=encoding)


def _find(source: str) -> Source:
    if source == "builtin":
        return stdlib_source(Path(sysconfig.get_path("stdlib")))
    if source == "shakespeare":
        path = published_file(
            SHAKESPEARE_FILE, SHAKESPEARE_URL, sha256=SHAKESPEARE_SHA256, what="tiny shakespeare",
            instead=f"that file, as {SHAKESPEARE_FILE},",
        )  # fmt: skip
        return Source(name=source, given=source, files=(SourceFile(str(path)),))
    if source in HUB and (data_dir() / source).is_dir():
        return _local(str(data_dir() / source))
    if source in HUB:
        return _hub(HUB[source], source)
    if source.startswith(HUB_PREFIX):
        return _hub(source, _file_name(source.split("@")[0].split("/", 1)[-1]))
    return _local(source)


def stdlib_source(root: Path) -> Source:
    """Returns the built-in corpus: the source of a Python standard library, about 10 MB.

    Files are ordered by their POSIX path, so one installation always gives the same bytes.

    Raises:
        UserError: the library's source is missing (a zipped or an embedded Python).
    """
    chosen: set[str] = set()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [x for x in subfolders if x not in STDLIB_SKIPPED_FOLDERS]
        found = [Path(folder, x).relative_to(root) for x in files if x.endswith(".py")]
        skipped = [x for x in found for part in x.parts if part.startswith(STDLIB_SKIPPED_PREFIXES)]
        chosen |= {path.as_posix() for path in found if path not in skipped}
    paths = [str(root / path) for path in sorted(chosen - STDLIB_SKIPPED_FILES)]
    size = sum(os.path.getsize(path) for path in paths)
    if size < STDLIB_MIN_BYTES:
        raise UserError(
            f"the built-in corpus is the source of Python's standard library, but {root} holds"
            f" only {size:,} bytes of it; use a text file or a folder instead"
        )
    files = tuple(map(SourceFile, paths))
    return Source(name="builtin", given="builtin", files=files, python=platform.python_version())


def _hub(source: str, name: str) -> Source:
    try:
        splits: Any = load_splits(source)
    except UserError as error:
        raise UserError(
            f"{error}; or get its files another way (Parquet, .jsonl or .txt), put them into"
            f" {data_dir() / name} and use that folder"
        ) from error
    files = tuple(SourceFile(source, split if len(splits) > 1 else None) for split in splits)
    return Source(name=name, given=source, files=files, format="hub")


def _local(source: str) -> Source:
    """Finds the files of a path or a pattern, sorted by path, without hidden and empty ones."""
    root = Path(source).expanduser()
    if root.is_dir():
        below = sorted(root.rglob("*"), key=Path.as_posix)
        shown = [x for x in below if not re.search(r"(^|/)\.", x.relative_to(root).as_posix())]
        paths = list(map(str, shown))
    else:
        paths = [str(root)] if root.is_file() else sorted(glob.glob(str(root), recursive=True))
    paths = [path for path in paths if os.path.isfile(path) and os.path.getsize(path)]
    if not paths:
        if root.exists():
            raise UserError(f"source {source!r} is empty")
        if len(root.parts) > 1 or root.suffix:
            raise UserError(f"source {source!r}: no such file or folder (train.py: --data.source)")
        raise unknown_name("corpus", source, NAMES, also="a file or a folder")
    formats = {_format(path): path for path in paths}
    if len(formats) > 1:  # as in a folder of the hub
        paths = [path for path in paths if not ABOUT.fullmatch(Path(path).name)] or paths
        formats = {_format(path): path for path in paths}
    if len(formats) > 1:
        kinds = (f"{kind} ({path})" for kind, path in formats.items())
        raise UserError(
            f"source {source!r} has files of several kinds, {' and '.join(kinds)}: choose one by a"
            " pattern, such as 'folder/**/*.txt'"
        )
    [form] = formats
    return Source(
        name=_file_name(root.resolve().name if root.is_dir() else root.name),
        given=source,
        files=_with_splits(paths, form),
        format=form,
        ends_lines=root.is_dir() or len(paths) > 1,
    )


def _format(path: str) -> Any:
    """Returns the format of a file by its suffix; suffixes of compression do not count."""
    suffixes = [suffix for suffix in Path(path.lower()).suffixes if suffix not in OPENERS]
    return FORMATS.get(suffixes[-1] if suffixes else "", "text")


def _with_splits(paths: list[str], form: str) -> tuple[SourceFile, ...]:
    """Adds the splits that files or folders are named for, if train and validation are both named;
    those named test are left out then."""
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) or "."
    splits: list[Any] = []
    for path in paths:
        words = re.findall("[a-z]+", os.path.relpath(path, folder).lower())
        named = [SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES]
        splits.append(named[-1] if named else None)
    if not {"train", "val"} <= {*splits} or (None in splits and form == "text"):
        return tuple(map(SourceFile, paths))  # also a project's sources: train.py beside val.py
    if None in splits:
        path = paths[splits.index(None)]
        raise UserError(
            f"{path} is named neither train nor validation, unlike others: prepare it separately"
        )
    return tuple(SourceFile(path, split) for path, split in zip(paths, splits) if split != "test")


def _file_name(name: str) -> str:
    """Returns `name` without its suffixes, in letters, digits, `-` and `_`."""
    stem = name.lstrip(".").split(".")[0].lower()
    cleaned = "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)
    return cleaned.strip("-")[:40] or "corpus"
