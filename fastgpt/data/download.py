"""Downloads of small published files, verified by sha256 and written atomically."""

import hashlib
import itertools
from pathlib import Path

import requests
from filelock import FileLock
from requests.adapters import HTTPAdapter
from urllib3 import BaseHTTPResponse, Retry
from urllib3.exceptions import HTTPError

from fastgpt.errors import UserError, writing
from fastgpt.files import cache_dir, data_dir, sha256_of, write_atomically

LARGEST, PIECE = 2**28, 2**16
"""Bytes after which a body is cut off, however much the server sends, and bytes read at once."""
LONGEST_WAIT_S = 300
"""Longest pause before another attempt, however long the server asks for."""
TIMEOUTS_S = (15, 60)
"""Timeouts: to connect, and between two pieces of the body."""


class _Retry(Retry):
    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        asked = super().get_retry_after(response)
        return asked and min(asked, LONGEST_WAIT_S)


RETRY = _Retry(
    4, backoff_factor=1, status_forcelist=(408, 425, 429, 500, 502, 503, 504), raise_on_status=False
)
"""Four more attempts, after 0, 2, 4 and 8 seconds or when the server asks us to come back."""


def published_file(name: str, url: str, *, sha256: str, what: str, instead: str) -> Path:
    """Finds or downloads a published file, and returns its path.

    It is taken from `data_dir()`, else from `cache_dir()`, where it is downloaded if necessary.

    Args:
        sha256: expected hash, as hexadecimal digits.
        what: description of the file for error messages, such as `tiny shakespeare`.
        instead: files that can be put into `data_dir()` by hand, for the message of a failed
            download.
    Raises:
        UserError: the file in `data_dir()` has another sha256, or as `fetch`.
    """
    local, cached = data_dir() / name, cache_dir() / name
    if local.is_file():
        if (found := sha256_of(local)) != sha256:
            raise UserError(f"{local} is not {what}: its sha256 is {found}, expected {sha256}")
        return local
    by_hand = f"can be put into {data_dir()} by hand, or into a folder that FASTGPT_DATA names"
    fetch(url, cached, sha256=sha256, instead=f"{instead} {by_hand}")
    return cached


def fetch(url: str, path: Path, *, sha256: str, instead: str) -> None:
    """Downloads `url` to the file `path`, unless that file is there already.

    Meant for files of a few megabytes, which are held in memory until they are verified. If several
    processes need the same file, one downloads it and the others wait.

    Args:
        url: http or https; redirects are followed.
        path: its folder is created if it is missing.
        sha256: expected hash, as hexadecimal digits; a file with another one is replaced.
        instead: how to get the file by hand, for the message of a failed download.
    Raises:
        UserError: the server refused or cannot be reached, it sent a different file, or `path`
            cannot be written.
    """

    def is_there() -> bool:
        return path.is_file() and sha256_of(path) == sha256

    if is_there():
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if is_there():
                return
            try:
                data = _download(url)
                if (found := hashlib.sha256(data).hexdigest()) != sha256:
                    reason = f"the file received has sha256 {found}, expected {sha256}"
                    raise requests.RequestException(reason)
            except (requests.RequestException, HTTPError) as error:
                raise UserError(f"cannot download {url}: {_reason(error)}; {instead}") from error
            write_atomically(path, data)


def _download(url: str) -> bytes:
    retries = RETRY
    with requests.Session() as session:
        session.headers["Accept-Encoding"] = "identity"
        while True:
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=retries))
            with session.get(url, stream=True, timeout=TIMEOUTS_S) as response:
                if not response.ok:
                    raise requests.HTTPError(f"HTTP {response.status_code} {response.reason}")
                try:
                    pieces = response.iter_content(PIECE)
                    return b"".join(itertools.islice(pieces, LARGEST // PIECE))
                except requests.RequestException as error:  # the adapter retries up to the headers
                    retries = retries.increment("GET", url, error=error)
            retries.sleep()


def _reason(error: BaseException) -> str:
    """Returns the innermost cause: the libraries wrap "connection refused" four times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
