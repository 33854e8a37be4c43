"""Tokenizers in the files of Hugging Face, which AutoTokenizer loads with the same ids."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgpt.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    huggingface_module,
)
from fastgpt.data.tokenizers.gpt2 import EOT, LETTERS, GPT2Tokenizer

NAMES = ("tokenizer.json", "tokenizer_config.json")


def write(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into a folder.

    Args:
        context: longest text of the model, in tokens.

    Raises:
        UserError: the package tokenizers is missing.
    """
    content = to_json(tokenizer)
    end = _name_of_end(content, tokenizer.eot_id)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if end is not None:
        settings |= {"bos_token": end, "eos_token": end}
    (folder / NAMES[0]).write_text(content, encoding="utf-8")
    (folder / NAMES[1]).write_text(json.dumps(settings, indent=1), encoding="utf-8")


def to_json(tokenizer: Tokenizer) -> str:
    """Returns a `tokenizer.json` in Hugging Face's format."""
    content = tokenizer.to_json()
    if "model" in json.loads(content):
        return content
    models = huggingface_module("a tokenizer.json").models
    if isinstance(tokenizer, ByteTokenizer):
        letters = {LETTERS[byte]: byte for byte in range(256)}
        return _byte_level(models.BPE(letters, []), [], words=False)
    if isinstance(tokenizer, CharTokenizer):
        return _of_characters(tokenizer.chars)
    assert isinstance(tokenizer, GPT2Tokenizer)
    vocabulary = {_spelled(token): i for i, token in enumerate(tokenizer.tokens)}
    pairs = [(_spelled(a), _spelled(b)) for a, b in merges(tokenizer.tokens)]
    model = models.BPE(vocabulary | {EOT: len(vocabulary)}, pairs)
    return _byte_level(model, [EOT], words=True)


def _byte_level(model: Any, special: Sequence[str], *, words: bool) -> str:
    """Returns the JSON of byte-level BPE; with `words` GPT-2's pattern cuts the text first."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return made.to_str()


def _of_characters(chars: Sequence[str]) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}, unk_token=""))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return made.to_str()


def merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Returns the pair that each token of BPE was merged from, in the order of the tokens.

    Single bytes have none. A token's pair is what merging its bytes with the earlier ones leaves.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for token in tokens:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
            parts[best : best + 2] = [pairs[best]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def _spelled(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)


def _name_of_end(content: str, eot_id: int | None) -> str | None:
    saved = json.loads(content)
    added = {token["id"]: token["content"] for token in saved.get("added_tokens", [])}
    vocabulary = saved["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        added = {i: name for name, i in vocabulary.items()} | added
    return None if eot_id is None else added.get(eot_id)
