"""Downloads of small published files, verified by sha256 and written atomically."""

import hashlib
from pathlib import Path

import requests

from fastgpt.errors import UserError, reason, writing
from fastgpt.files import cache_dir, data_dir, sha256_of, write_atomically

TIMEOUTS_S = (15, 60)
"""Timeouts: to connect, and between two pieces of the body."""


def published_file(name: str, url: str, *, sha256: str, what: str, instead: str) -> Path:
    """Finds or downloads a published file of a few megabytes, and returns its path.

    It is taken from `data_dir()`, else from `cache_dir()`, where it is downloaded if necessary.

    Args:
        sha256: expected hash, as hexadecimal digits.
        what: description of the file for error messages, such as `tiny shakespeare`.
        instead: files that can be put into `data_dir()` by hand, for the message of a failed
            download.
    Raises:
        UserError: the file in `data_dir()` has another sha256, the server refused or cannot be
            reached, it sent a different file, or the cache cannot be written.
    """
    local, cached = data_dir() / name, cache_dir() / name
    if local.is_file():
        if (found := sha256_of(local)) != sha256:
            raise UserError(f"{local} is not {what}: its sha256 is {found}, expected {sha256}")
        return local
    if not (cached.is_file() and sha256_of(cached) == sha256):
        with writing(cached):
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cached, _download(url, sha256, instead))
    return cached


def _download(url: str, sha256: str, instead: str) -> bytes:
    try:
        response = requests.get(url, timeout=TIMEOUTS_S)
        response.raise_for_status()
        if (found := hashlib.sha256(response.content).hexdigest()) != sha256:
            raise requests.RequestException(f"it has sha256 {found}, expected {sha256}")
    except requests.RequestException as error:
        first: BaseException = error  # what urllib3 and requests wrap, which says it in few words
        while first.__context__ is not None:
            first = first.__context__
        raise UserError(
            f"put {instead} into {data_dir()} by hand, or into a folder that FASTGPT_DATA names:"
            f" cannot download {url}: {reason(first)}"
        ) from error
    return response.content
