"""Tokenizers in the files of Hugging Face, which AutoTokenizer loads with the same ids."""

import json
from pathlib import Path
from typing import Any

from fastgpt.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, CharTokenizer, Tokenizer
from fastgpt.data.tokenizers.gpt2 import GPT2Tokenizer
from fastgpt.data.tokenizers.huggingface import LETTERS, byte_level


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
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    if isinstance(tokenizer, CharTokenizer):
        ids = {char: i for i, char in enumerate(tokenizer.chars)}
        made = Theirs(models.WordLevel(ids, unk_token=""))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made.to_str()
    if isinstance(tokenizer, ByteTokenizer):
        ids = {LETTERS[byte]: byte for byte in range(256)}
        return byte_level(models.BPE(ids, []), use_regex=False).to_str()
    return (
        tokenizer.slower.to_json() if isinstance(tokenizer, GPT2Tokenizer) else tokenizer.to_json()
    )
