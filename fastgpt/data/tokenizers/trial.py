"""Reading a `tokenizer.json` with the package tokenizers, and the trial of a foreign one."""

import json
from contextlib import suppress

import tokenizers

EVERY = "".join(map(chr, (*range(0xD800), *range(0xE000, 2**16))))
"""All characters of two bytes in UTF-16."""
GROWTH, PROBE = 64, 2000
"""Most characters that one may become (18 in Unicode's normal forms), and length of most probes."""


def opened(content: str) -> tokenizers.Tokenizer:
    """Parses a tokenizer.json, without truncation and padding; special tokens in texts are text."""
    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def try_out(content: str) -> None:
    """Reads a tokenizer, encodes probes and decodes tokens.

    Probes are every character once, the file's own steps as text, and repetitions of each character
    in them, as regular expressions may take time without end for those.

    Raises:
        ValueError: a step makes texts much longer.
        Exception: it cannot be read.
    """
    tokenizer, steps = opened(content), json.loads(content) | {"model": None}
    named = json.dumps(steps, ensure_ascii=False)[: len(EVERY)]
    for probe in (EVERY, named, *(char * PROBE + "!" for char in set(named))):
        change = tokenizer.normalizer
        if change is not None and len(change.normalize_str(probe)) > GROWTH * len(probe):
            raise ValueError(f"it makes a text over {GROWTH} times as long")
        with suppress(Exception):  # a vocabulary may lack a character; a panic is no Exception
            tokenizer.encode(probe, add_special_tokens=False)
    with suppress(Exception):
        tokenizer.decode([*tokenizer.get_vocab().values()][:PROBE], skip_special_tokens=False)
