"""Where text comes from: the built-in corpus, a named one, or a path; and where files are kept.

A source is read whole, as bytes, before anything is tokenized: what it was is then one sha256.
"""

import hashlib
import http.client
import os
import platform
import sysconfig
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastgpt.errors import UserError, unknown_name
from fastgpt.shards import write_atomically

NAMES = ("builtin", "shakespeare")

SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
DOWNLOAD_TIMEOUT_S = 30

# Tests and what pip puts there are not the library; encodings and pydoc_data are nearly all
# generated tables, which are dull to learn and a large part of the bytes.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The bytes of a corpus, and what it takes to say where they came from."""

    name: str
    """Short and fit for a file name."""
    data: bytes
    """All files, in order, one after the other."""
    files: int = 1
    """Files that `data` holds."""
    skipped: int = 0
    """Files of a folder that were left out: hidden, binary or not UTF-8."""
    python: str | None = None
    """The Python version whose library this is; None for every other source."""

    @property
    def sha256(self) -> str:
        """Of `data`, as hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


def data_dir() -> Path:
    """Where people put the files they have: `$FASTGPT_DATA`, else `./data`."""
    return Path(os.environ.get("FASTGPT_DATA") or "data")


def cache_dir() -> Path:
    """Where downloads and prepared corpora are kept: `$FASTGPT_CACHE`, else `~/.cache/fastgpt`."""
    return Path(os.environ.get("FASTGPT_CACHE") or Path.home() / ".cache" / "fastgpt")


def read_source(source: str) -> Source:
    """Reads `builtin`, `shakespeare`, a file, or a folder of text files.

    Raises:
        UserError: nothing of that name, nothing in it, or a download that failed.
    """
    if source == "builtin":
        return read_stdlib(Path(sysconfig.get_path("stdlib")))
    if source == "shakespeare":
        return Source(name=source, data=_read_shakespeare())
    if not source:
        raise UserError("the corpus is an empty name: expected builtin, shakespeare or a path")
    path = Path(source).expanduser()
    if path.is_dir():
        if any(path.glob("train_*.bin")):
            raise UserError(f"{path} has token shards but no manifest.json: prepare it again")
        found = _read_folder(path)
    elif path.is_file():
        found = Source(name=_file_name(path), data=_read_file(path))
    elif len(path.parts) > 1 or path.suffix:
        raise UserError(f"corpus {source!r}: no such file or folder")
    else:
        raise unknown_name("corpus", source, NAMES, also="a file or a folder")
    if not found.data:
        skipped = f" ({found.skipped} hidden, binary or non-UTF-8 skipped)" if found.skipped else ""
        raise UserError(f"corpus {source!r} is empty: no text in it{skipped}")
    return found


def read_stdlib(root: Path) -> Source:
    """The built-in corpus: the source of a Python standard library, about 10 MB.

    Files are ordered by their POSIX path, so one installation always gives the same bytes.

    Raises:
        UserError: the library is not there as source (a zipped or an embedded Python).
    """
    paths = sorted(_stdlib_files(root))
    data = b"".join((root / path).read_bytes() for path in paths)
    if len(data) < STDLIB_MIN_BYTES:
        raise UserError(
            f"the built-in corpus is the source of Python's standard library, but {root} holds"
            f" only {len(data):,} bytes of it; give a text file or a folder instead"
        )
    return Source(name="builtin", data=data, files=len(paths), python=platform.python_version())


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


def _read_folder(root: Path) -> Source:
    """Text files only, whatever the tokenizer: nobody means a project's images and .pyc files."""
    texts, skipped = [], 0
    for path in _folder_files(root):
        hidden = any(part.startswith(".") for part in path.split("/"))
        data = b"" if hidden else _read_file(root / path)
        if hidden or not _is_text(data):
            skipped += 1
        elif data:
            # a file need not end its last line, and the next one must not continue it
            texts.append(data if data.endswith(b"\n") else data + b"\n")
    name = _file_name(root.resolve())
    return Source(name=name, data=b"".join(texts), files=len(texts), skipped=skipped)


def _folder_files(root: Path) -> list[str]:
    """Every regular file below `root`, as sorted POSIX paths; hidden folders are not entered."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = (Path(folder, name) for name in files)
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _file_name(path: Path) -> str:
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in path.stem.lower())
    return kept.strip("-")[:40] or "corpus"


def _read_shakespeare() -> bytes:
    local, cached = data_dir() / SHAKESPEARE_FILE, cache_dir() / SHAKESPEARE_FILE
    for path in (local, cached):
        if path.is_file():
            return _checked(path.read_bytes(), f"{path} is not tiny shakespeare")
    data = _checked(_download(SHAKESPEARE_URL, local), f"{SHAKESPEARE_URL} sent something else")
    cached.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(cached, data)
    return data


def _checked(data: bytes, complaint: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise UserError(f"{complaint}: its sha256 is {found}, expected {SHAKESPEARE_SHA256}")
    return data


def _download(url: str, instead: Path) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"cannot download {url} ({error}): get that file another way and put it at"
            f" {instead}, or set FASTGPT_DATA to the folder that has {instead.name}"
        ) from error
