"""Detects and decodes text, by file formats, encodings and control characters."""

import codecs

from fastgpt.errors import UserError

UTF_8 = "utf-8"
EXTRACT, UNPACK = "extract its text first", "unpack it first"
SIGNATURES = {
    b"%PDF-": f"a PDF document: {EXTRACT}",
    b"{\\rtf": f"an RTF document: {EXTRACT}",
    b"PK\x03\x04": f"a zip archive, as .docx, .xlsx, .epub and .pt are: {EXTRACT}",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": f"an old Office document: {EXTRACT}",
    b"\x1f\x8b": f"compressed by gzip: give it a name that ends in .gz, or {UNPACK}",
    b"\x28\xb5\x2f\xfd": f"compressed by Zstandard: give it a name that ends in .zst, or {UNPACK}",
    b"BZh91AY&SY": f"compressed by bzip2: {UNPACK}",
    b"\xfd7zXZ\0": f"compressed by xz: {UNPACK}",
    b"7z\xbc\xaf\x27\x1c": f"a 7z archive: {UNPACK}",
    b"PAR1": "a Parquet file: give it a name that ends in .parquet",
    b"SQLite format 3\0": f"an SQLite database: {EXTRACT}",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x7fELF": "a compiled program (ELF)",
    b"\x93NUMPY": "a NumPy array",
    **{bytes([0x80, protocol]): "a Python pickle" for protocol in range(2, 6)},
}
"""File formats by their first bytes, each with what to do about it."""
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins as UTF-16's does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
CONTROLS = bytes([*range(0x08), *range(0x0E, 0x1B), 0x7F])
"""Control characters that texts do not use for white space, colours or overstriking."""
MOST_CONTROLS = 0.01
"""The largest share of control characters in a text."""


def text_encoding(name: str) -> str:
    """Returns the usual name of an encoding, such as `utf-8` for `UTF8`.

    Raises:
        UserError: Python has no text encoding of that name.
    """
    try:
        "a".encode(name)  # bytes may be no text of this encoding
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError) as error:
        raise UserError(
            f"encoding {name!r} is unknown: expected one of Python's text encodings, such as utf-8,"
            " utf-16 or cp1252"
        ) from error


def check_format(path: str, head: bytes) -> None:
    """Raises `UserError` for a file that begins with the signature of another format."""
    if what := _known_format(head):
        raise UserError(f"{path} is not text but {what}")


def _known_format(head: bytes) -> str | None:
    for signature, what in SIGNATURES.items():
        if head.startswith(signature):
            return what
    if head[257:262] == b"ustar":
        return f"a tar archive: {UNPACK}"
    # the length of a JSON header, then that header
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "a safetensors file"
    return None


class TextDecoder:
    """Decodes a file block by block, and raises `UserError` for content that cannot be text.

    Args:
        path: the file, for error messages.
        encoding: from `text_encoding`.
    """

    def __init__(self, path: str, encoding: str) -> None:
        self.path, self.encoding = path, encoding
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.offset = 0
        self.controls = self.length = 0

    def decode(self, block: bytes, *, final: bool = False) -> str:
        """Returns the characters that `block` completes.

        Raises:
            UserError: bytes are invalid in the encoding, or too many are control characters; the
                message names the place, the probable format and what to do.
        """
        waiting = self.decoder.getstate()[0]
        try:
            text = self.decoder.decode(block, final)
        except UnicodeError as error:
            data, start = waiting + block, getattr(error, "start", 0)
            place = f"byte 0x{data[start]:02X} at offset {self.offset - len(waiting) + start:,}"
            raise UserError(
                f"{self.path} is not {self.encoding.upper()} ({place}): {_what_else(data)}"
            ) from error
        self._count_controls(block, text)
        self.offset += len(block)
        return text

    def _count_controls(self, block: bytes, text: str) -> None:
        """Raises `UserError` for too many in this block and the one before (the last is short)."""
        data = block if self.encoding == UTF_8 else text.encode(errors="replace")
        controls, length = _controls(data), len(data)
        if controls and controls + self.controls > MOST_CONTROLS * (length + self.length):
            first = next(i for i, byte in enumerate(data) if byte in CONTROLS)
            place = self.offset + (first if data is block else 0)
            raise UserError(
                f"{self.path} is not text ({controls / length:.0%} control characters from offset"
                f" {place:,} on): {_what_else(block)}"
            )
        self.controls, self.length = controls, length


def _controls(data: bytes) -> int:
    return len(data) - len(data.translate(None, CONTROLS))


def _what_else(data: bytes) -> str:
    """Guesses the format of bytes that are not text in the given encoding, and says what to do."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "")
    even, odd = data[::2].count(0), data[1::2].count(0)
    # in UTF-16, one of the two bytes of a space, a line feed or a letter of English is zero
    if not encoding and max(even, odd) * 256 > len(data) and 4 * min(even, odd) < max(even, odd):
        encoding = "utf-16-le" if odd > even else "utf-16-be"
    if encoding:
        return f"it seems to be {encoding.upper()}, {_pass(encoding)}"
    if _controls(data) > MOST_CONTROLS * len(data):
        return "it seems to be binary data, expected text"
    return f"it may be in an older encoding, for Western European text {_pass('cp1252')}"


def _pass(encoding: str) -> str:
    return f"pass --encoding {encoding} (train.py: --data.encoding {encoding})"
