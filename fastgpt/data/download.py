"""One file from the network to the disk: resumed where it broke off, checked, and whole or absent.

`requests` talks to the server. It is there already (tiktoken requires it), brings its own
certificates, knows proxies, and with urllib3 below it reports a body that ends early, which
`urllib` does not when it reads in pieces.

While `NAME` is fetched, three hidden files lie beside it: `.NAME.part` holds what has come so far,
`.NAME.part.json` what its server said of it, `.NAME.lock` keeps other processes waiting.
"""

import hashlib
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import requests
import urllib3
from filelock import FileLock

from fastgpt.errors import UserError, writing
from fastgpt.storage import sync_directory

Progress = Callable[[int, int | None], None]

ATTEMPTS = 5
"""In a row that bring nothing new; after four pauses, about 20 seconds in all."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 15, 60
LONGEST_WAIT_S = 300
"""However long a server asks us to wait."""
CHUNK_BYTES = 1 << 16
PASSING = (408, 425, 429)
"""Client errors that go away by themselves, as those from 500 up may."""

logger = logging.getLogger(__name__)


class _FetchError(Exception):
    def __init__(self, reason: str, *, final: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.final = final
        self.wait = wait


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str | None,
    instead: str,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Downloads `url` to the file `path`, unless it is there already.

    What an earlier call or process had received is kept, if the server or `sha256` can tell that
    it is of the same file. The name `path` appears, or is replaced, once the file is complete.

    Args:
        url: http or https; redirects are followed.
        path: the file; its folder is made where it is missing.
        sha256: of the whole file, as hexadecimal digits. A file at `path` with another one is
            replaced. Without it, what lies at `path` is trusted, and the length is all that is
            checked, where the server gives one.
        instead: how to get the file by hand; the end of every error message.
        progress: called with (bytes so far, bytes in all or None).
        sleep: waits between attempts.
    Raises:
        UserError: the server refused, five attempts in a row brought nothing new, the file has
            another sha256 (what was received is then removed), or `path` cannot be written.
    """
    path = Path(path)
    if _is_there(path, sha256):
        return
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{path.name}.lock")):
                if not _is_there(path, sha256):  # another process may just have fetched it
                    partial = _Partial(url, path, can_check=sha256 is not None)
                    _receive_all(partial, progress or (lambda *_: None), sleep)
                    partial.finish(sha256)
    except _FetchError as error:
        raise UserError(f"cannot download {url}: {error}; {instead}") from error


def _is_there(path: Path, sha256: str | None) -> bool:
    return path.is_file() and sha256 in (None, sha256_of(path))


def sha256_of(path: Path) -> str:
    """Of the whole file, as hexadecimal digits; read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what has come so far -------------------------------------------------------------------------


class _Partial:
    """The bytes received, and how to ask for those that follow."""

    def __init__(self, url: str, target: Path, *, can_check: bool) -> None:
        self.url = url
        self.data = target.with_name(f".{target.name}.part")
        self.total: int | None = None
        self.validator: str | None = None
        self._target = target
        self._state = target.with_name(f".{target.name}.part.json")
        self._can_check = can_check
        self._read_state()

    @property
    def size(self) -> int:
        return self.data.stat().st_size if self.data.exists() else 0

    @property
    def is_complete(self) -> bool:
        return self.total == self.size > 0

    @property
    def can_go_on(self) -> bool:
        """Whether it could be told if what follows were of another file."""
        return self.total is not None and (self._can_check or self.validator is not None)

    def range_headers(self) -> dict[str, str]:
        """The headers that ask for the rest; none where everything is to come again."""
        if not self.size or not self.can_go_on:
            return {}
        return {"Range": f"bytes={self.size}-"} | (
            {"If-Range": self.validator} if self.validator else {}
        )

    def is_continued_by(self, response: requests.Response) -> bool:
        """Whether the body is what follows `data`, of the same file."""
        found = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", response.headers.get("Content-Range", ""))
        return (
            response.status_code == 206
            and found is not None
            and int(found[1]) == self.size
            and found[2] in ("*", str(self.total))
            and _validator(response) in (None, self.validator)
        )

    def start_over(self, response: requests.Response | None = None) -> None:
        """Forgets what came; `response`, if any, is the one that brings it all again."""
        # in this order: bytes must never stand beside the description of another file
        self.data.unlink(missing_ok=True)
        self.total = self.validator = None
        if response is None:
            self._state.unlink(missing_ok=True)
            return
        length = response.headers.get("Content-Length", "")
        self.total = int(length) if length.isdecimal() else None
        self.validator = _validator(response)
        state = {"url": self.url, "total": self.total, "validator": self.validator}
        self._state.write_text(json.dumps(state), encoding="utf-8")

    def finish(self, sha256: str | None) -> None:
        """Gives the complete file its name."""
        if sha256 is not None and (found := sha256_of(self.data)) != sha256:
            self.start_over()
            raise _FetchError(f"it sent something else: sha256 {found}, expected {sha256}")
        with open(self.data, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.data, self._target)
        self._state.unlink(missing_ok=True)
        sync_directory(self._target.parent)

    def _read_state(self) -> None:
        try:
            state: dict[str, Any] = json.loads(self._state.read_text(encoding="utf-8"))
            same, self.total, self.validator = (
                state["url"] == self.url, state["total"], state["validator"],
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same or not self.can_go_on or self.size > (self.total or 0):
            self.start_over()


def _validator(response: requests.Response) -> str | None:
    """What `If-Range` may name: a strong ETag, else the date of the last change."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified")


# --- talking to the server ------------------------------------------------------------------------


def _receive_all(partial: _Partial, progress: Progress, sleep: Callable[[float], None]) -> None:
    failures, most = 0, partial.size
    while not partial.is_complete:
        try:
            _receive(partial, progress)
            return
        except _FetchError as error:
            failures = 1 if partial.size > most else failures + 1
            most = max(most, partial.size)
            if error.final:
                raise
            if failures == ATTEMPTS:
                raise _FetchError(f"{error} ({ATTEMPTS} attempts)") from error
            # processes that failed together must not all come back together
            wait = error.wait or 2 ** (failures - 1) * random.SystemRandom().uniform(1, 1.5)
            logger.warning("%s: %s; trying again in %.0f s", partial.url, error, wait)
            sleep(wait)


def _receive(partial: _Partial, progress: Progress) -> None:
    """One request, whose body is added to `partial` as far as it comes."""
    asked = partial.range_headers()
    try:
        with requests.get(
            partial.url,
            headers={"Accept-Encoding": "identity", **asked},
            stream=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        ) as response:
            if not asked or response.status_code not in (206, 416):
                _check_status(response)
                partial.start_over(response)
            elif not partial.is_continued_by(response):
                partial.start_over()
                return _receive(partial, progress)
            _append(response, partial, progress)
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise _FetchError(_reason(error)) from error
    if partial.total not in (None, partial.size):
        raise _FetchError(f"it ended after {partial.size:,} of {partial.total:,} bytes")
    return None


def _append(response: requests.Response, partial: _Partial, progress: Progress) -> None:
    with open(partial.data, "ab") as file:
        progress(file.tell(), partial.total)
        # as they are sent: some servers call a .gz file an encoding and would have us unpack it
        for chunk in response.raw.stream(CHUNK_BYTES, decode_content=False):
            file.write(chunk)
            progress(file.tell(), partial.total)


def _check_status(response: requests.Response) -> None:
    status = response.status_code
    if status != 200:
        raise _FetchError(
            f"HTTP {status} {response.reason}",
            final=status < 500 and status not in PASSING,
            wait=_retry_after(response.headers.get("Retry-After", "")),
        )


def _retry_after(value: str) -> float | None:
    """Seconds, which the header gives as such or as a date; None where it gives neither."""
    if value.isdecimal():
        seconds = float(value)
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0), LONGEST_WAIT_S)


def _reason(error: BaseException) -> str:
    """The innermost cause: the libraries wrap "connection refused" four times."""
    while (inner := error.__cause__ or error.__context__) and not isinstance(inner, _FetchError):
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
