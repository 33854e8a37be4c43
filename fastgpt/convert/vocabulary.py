"""Tokenizers in the files of Hugging Face, which AutoTokenizer loads with the same ids."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgpt.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, CharTokenizer, Tokenizer
from fastgpt.data.tokenizers.gpt2 import EOT, LETTERS, GPT2Tokenizer


def write(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into a folder.

    Args:
        context: longest text of the model, in tokens.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eot_id is not None:
        end = tokenizer.decode([tokenizer.eot_id])
        settings |= {"bos_token": end, "eos_token": end}
    (folder / TOKENIZER_FILE).write_text(to_json(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def to_json(tokenizer: Tokenizer) -> str:
    """Returns a `tokenizer.json` in Hugging Face's format."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    if isinstance(tokenizer, CharTokenizer):
        ids = {char: i for i, char in enumerate(tokenizer.chars)}
        made = Theirs(models.WordLevel(ids, unk_token=""))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made.to_str()
    gpt2 = isinstance(tokenizer, GPT2Tokenizer)
    if gpt2:
        words = [*map(_spelled, tokenizer.tokens), EOT]
        pairs = [(_spelled(a), _spelled(b)) for a, b in merges(tokenizer.tokens)]
    elif isinstance(tokenizer, ByteTokenizer):
        words, pairs = [LETTERS[byte] for byte in range(256)], []
    else:
        return tokenizer.to_json()
    made = Theirs(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    # GPT-2's pattern cuts the text first
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOT, normalized=False)] if gpt2 else [])
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
