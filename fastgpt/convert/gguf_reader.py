"""Reading GGUF files of llama.cpp: a Llama or Qwen3, and its tokenizer.

Source of the format: `convert_hf_to_gguf.py` of llama.cpp, and `llama-vocab.cpp` for where words
are cut.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import Weights, in_memory
from fastgpt.commands import install_command
from fastgpt.config.model import ModelConfig, bias_of
from fastgpt.convert.families import Fields, model_type, tensors_of, to_theirs
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError, brief, shown

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {"gpt-2": "(?!)", "smollm": r"\p{N}", "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""Name of a way to cut text -> its words; the first two cut as GPT-2 does, after the digits."""


def package() -> Any:
    """Returns the package `gguf`; raises `UserError` if it is missing."""
    try:
        import gguf
    except ImportError as error:
        how = install_command("gguf", "gguf")
        raise UserError(f"a GGUF file needs the package gguf: {how}") from error
    return gguf


def names(gguf: Any, config: ModelConfig) -> dict[str, str]:
    """Returns the names of a model's tensors at Hugging Face -> in a GGUF file."""
    kind = gguf.MODEL_ARCH[model_type(config).upper()]
    known = gguf.get_tensor_name_map(kind, config.num_layers)
    theirs = to_theirs(in_memory(tensors_of(config)), config)
    return {name: known.get_name(name, (".weight", ".bias")) or name for name in theirs}


def rotated(name: str, x: Tensor, config: ModelConfig, *sizes: int) -> Tensor:
    """Reorders the rows of a Llama's queries or keys, in each head as a matrix of these sizes.

    llama.cpp rotates neighbours; we and its Qwen3 rotate elements half a head apart.
    """
    if model_type(config) != "llama" or ("q_proj" not in name and "k_proj" not in name):
        return x
    return x.unflatten(0, (-1, *sizes)).transpose(1, 2).reshape(x.shape)


def read_gguf(path: Path) -> tuple[ModelConfig, Weights, Tokenizer, dict[str, str]]:
    """Reads a Llama or Qwen3: (settings, weights by Hugging Face's names, tokenizer, files).

    Raises:
        UserError: the package `gguf` is missing, the file is damaged, or it holds something else.
    """

    gguf = package()
    try:
        reader = gguf.GGUFReader(path)
        said = {name: x.contents() for name, x in reader.fields.items()}
        config = _config(said, {x.name: x.shape.tolist() for x in reader.tensors})
        theirs = {ours: name for name, ours in names(gguf, config).items()}
        tokenizer, hf_files = Tokenizer(_tokenizer(said)), _hf_files(said)
    except Exception as error:  # the package checks little
        why = str(error) if isinstance(error, UserError) else brief(error)
        raise UserError(f"{path} cannot be read as GGUF: {why}") from error
    stored = {str(theirs.get(x.name, x.name)): x for x in reader.tensors}
    plan = {name: torch.empty(x.shape.tolist()[::-1], device="meta") for name, x in stored.items()}

    def tensor(name: str) -> Tensor:
        try:
            x = torch.tensor(gguf.dequantize(stored[name].data, stored[name].tensor_type))
        except NotImplementedError as error:
            known = "F32, F16, BF16, Q8_0, Q4_0 or Q4_1"
            raise UserError(f"{path}: {name}: {error}: expected {known}") from error
        return rotated(name, x, config, config.head_dim // 2, 2)

    return config, Weights(plan, tensor), tokenizer, hf_files


def _config(said: Fields, shapes: dict[str, list[int]]) -> ModelConfig:
    """Translates the metadata of a file, and the shapes of its tensors, to settings."""
    kind = said["general.architecture"]
    if kind not in ("llama", "qwen3"):
        raise UserError(f"general.architecture is {shown(kind)}: expected llama or qwen3")
    scaling = said.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{kind}.rope.scaling.type is {shown(scaling)}: expected none")

    def get(name: str, default: Any = None) -> Any:
        x = said.get(f"{kind}.{name}", default)
        return float(f"{x:.7g}") if isinstance(x, float) else x  # it has 32 bits there

    attention = "blk.0.attn_q.bias" in shapes
    heads, dim = get("attention.head_count"), get("embedding_length")
    return ModelConfig(
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv"),
        head_size=get("attention.key_length", dim // heads),
        dim=dim,
        ffn_dim=get("feed_forward_length"),
        context=get("context_length"),
        vocab_size=shapes["token_embd.weight"][1],
        norm="rmsnorm",
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        bias=bias_of(qkv=attention, projection=attention, mlp="blk.0.ffn_up.bias" in shapes),
        activation="swiglu",
        position="rotary",
        rotary_base=get("rope.freq_base", 10_000.0),
        qk_norm="weighted" if kind == "qwen3" else False,
        tied="output.weight" not in shapes,
    )


def _hf_files(said: Fields) -> dict[str, str]:
    """Returns the files of Hugging Face with the chat template and the ids of begin and end."""
    ids = {x: said.get(f"tokenizer.ggml.{x}") for x in ("bos_token_id", "eos_token_id")}
    tokens = said["tokenizer.ggml.tokens"]
    fields: Fields = {x.removesuffix("_id"): tokens[i] for x, i in ids.items() if i is not None}
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    fields["chat_template"] = said.get("tokenizer.chat_template")
    return {"tokenizer_config.json": json.dumps(fields), "config.json": json.dumps(ids)}


def _tokenizer(said: Fields) -> str:
    """Returns a tokenizer.json with the vocabulary of a file."""
    import tokenizers
    from gguf import TokenType
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    fields = {x.removeprefix("tokenizer.ggml."): value for x, value in said.items()}
    cut = fields.get("pre")
    if fields.get("model") != "gpt2" or cut not in CUTS:
        found = f"{shown(fields.get('model'))}, cut as {shown(cut)}"
        raise UserError(f"the tokenizer is {found}: expected gpt2, cut as {' or '.join(CUTS)}")
    tokens, kinds = fields["tokens"], fields["token_type"]
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] != TokenType.UNUSED}
    pairs = [tuple(x.split(" ", 1)) for x in fields["merges"]]
    merges = [x for x in pairs if "".join(x) in ids]
    made = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=cut == "llama-bpe"))
    made.add_special_tokens([x for x, kind in zip(tokens, kinds) if kind == TokenType.CONTROL])
    made.add_tokens([x for x, kind in zip(tokens, kinds) if kind == TokenType.USER_DEFINED])
    split = pre_tokenizers.Split(tokenizers.Regex(CUTS[cut]), "isolated")
    letters = pre_tokenizers.ByteLevel(False, use_regex=cut in ("gpt-2", "smollm"))
    made.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    made.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        made.normalizer = normalizers.NFC()
    if fields.get("add_bos_token", cut == "llama-bpe"):
        begin = tokens[fields["bos_token_id"]]
        made.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, fields["bos_token_id"])]
        )
    return made.to_str()
