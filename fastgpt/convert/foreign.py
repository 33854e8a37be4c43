"""Models of nanoGPT (`ckpt.pt`), of llm.c (`.bin`) and of llama.cpp (`.gguf`).

nanoGPT's is a dictionary that PyTorch writes, read without running pickles. llm.c's has 256
numbers, then all weights of a kind, layer by layer. llama.cpp's becomes what a folder of Hugging
Face has: settings, tensors by the names there, and a tokenizer.

Source of llm.c's: `train_gpt2.py`, write_model, and `train_gpt2.cu`, gpt2_build_from_checkpoint;
of llama.cpp's: `convert_hf_to_gguf.py`, and `llama-vocab.cpp` for where words are cut.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import Weights, unpickle
from fastgpt.commands import install_command
from fastgpt.config.model import ModelConfig
from fastgpt.convert.architecture import HFConfig, either
from fastgpt.convert.architectures import LLAMA, QWEN3, config_from, tensor_maps
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError, brief, shown

PREFIX = "_orig_mod."
"""Prefix that torch.compile puts before the names of tensors."""
MASK = ".attn.bias"
"""End of the name of the causal mask, which old versions of PyTorch needed."""


def read_nanogpt(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a checkpoint: (settings, weights under our names).

    Raises:
        UserError: it is no checkpoint of nanoGPT, or a tensor is missing or unknown.
    """
    try:
        saved = unpickle(path, mmap=True)
        args, state = saved["model_args"], saved["model"]
        config = ModelConfig(
            num_layers=args["n_layer"],
            num_heads=args["n_head"],
            dim=args["n_embd"],
            context=args["block_size"],
            vocab_size=args["vocab_size"],
            bias=args["bias"],
            dropout=args.get("dropout", 0.0),
            activation="gelu_erf",
        )
        named = {
            name.removeprefix(PREFIX).removeprefix("transformer."): x for name, x in state.items()
        }
        if not all(isinstance(x, Tensor) and x.is_contiguous() for x in named.values()):
            raise TypeError("model holds something else than whole tensors")
        head = named.pop("lm_head.weight", None)
        tied = head is None or torch.equal(head, named["wte.weight"])
    except (UserError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no checkpoint of nanoGPT, a dictionary with model and model_args:"
            f" {brief(error)}"
        ) from error
    if not tied:
        raise UserError(f"{path}: lm_head.weight is not wte.weight, as in nanoGPT's models")
    return config, {name: x for name, x in named.items() if not name.endswith(MASK)}


MAGIC, NUMBERS = 20240326, 256
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
PADDING = 128
"""The vocabulary is padded to a multiple of this."""


def read_llmc(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a model file, fp32 (version 3) or bf16 (version 5): (settings, weights by our names).

    Raises:
        UserError: it is no such file, or is longer or shorter than its sizes say.
    """
    header = np.fromfile(path, "<i4", NUMBERS)
    if len(header) < NUMBERS or header[0] != MAGIC or header[1] not in VERSIONS:
        found = header[:2].tolist()
        raise UserError(
            f"{path} is no model of llm.c: it begins with {found}, expected {MAGIC} and version 3"
            " or 5"
        )
    T, V, layers, heads, C, padded = header[2:8].tolist()
    config = ModelConfig(
        num_layers=layers, num_heads=heads, dim=C, context=T, vocab_size=V, activation="gelu_tanh"
    )
    if padded != -(-V // PADDING) * PADDING:
        raise UserError(f"{path} pads {V} tokens to {padded}: expected a multiple of {PADDING}")
    shapes, dtype = dict(_shapes(config, padded)), VERSIONS[int(header[1])]
    sizes = [math.prod(shape) for shape in shapes.values()]
    expected = 4 * NUMBERS + sum(sizes) * dtype.itemsize
    if path.stat().st_size != expected:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes: expected {expected:,}")
    bits = np.memmap(path, f"<u{dtype.itemsize}", "c", offset=4 * NUMBERS)
    parts = torch.from_numpy(bits).view(dtype).split(sizes)
    weights = {name: x.view(shapes[name]) for name, x in zip(shapes, parts)}
    weights["wte.weight"] = weights["wte.weight"][:V]
    return config, weights


def _shapes(config: ModelConfig, padded: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields our name and the shape of each tensor in the order of the file."""
    C = config.dim
    yield "wte.weight", (padded, C)
    yield "wpe.weight", (config.context, C)
    of_layers = {
        "ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C),
        "ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C),
    }  # fmt: skip
    for part, shape in of_layers.items():
        for kind, size in (("weight", shape), ("bias", shape[:1])):
            for layer in range(config.num_layers):
                yield f"h.{layer}.{part}.{kind}", size
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)


# --- llama.cpp ------------------------------------------------------------------------------------

KEYS = {
    "num_layers": "block_count", "num_heads": "attention.head_count", "dim": "embedding_length",
    "num_kv_heads": "attention.head_count_kv", "head_size": "attention.key_length",
    "ffn_dim": "feed_forward_length", "context": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""Our setting -> its key in a GGUF file, after the architecture."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {"gpt-2": "(?!)", "smollm": r"\p{N}", "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""Name of a way to cut text -> its words; the first two cut as GPT-2 does, after the digits."""
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Kinds of tokens in a GGUF file that are no parts of words."""


def gguf_package() -> Any:
    """Returns the package `gguf`; raises `UserError` if it is missing."""
    try:
        import gguf
    except ImportError as error:
        how = install_command("gguf", "gguf")
        raise UserError(f"a GGUF file needs the package gguf: {how}") from error
    return gguf


def read_gguf(path: Path) -> tuple[HFConfig, Weights, Tokenizer, dict[str, str]]:
    """Reads a Llama or Qwen3: (config.json, weights in fp32, tokenizer, other files by name).

    Raises:
        UserError: the package `gguf` is missing, the file is damaged, or it holds something else.
    """
    gguf = gguf_package()
    try:
        reader = gguf.GGUFReader(path)
        said = {name: x.contents() for name, x in reader.fields.items()}
        settings = _settings(said, {x.name: x.shape for x in reader.tensors})
        config, architecture, _ = config_from(settings)
        names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[architecture.model_type.upper()], config.num_layers
        )
        theirs: dict[Any, str] = {
            names.get_name(name, (".weight", ".bias")): name
            for x in tensor_maps(architecture, config).values()
            for name in x.names
        }
        tokenizer, hf_files = Tokenizer(_tokenizer(said)), _hf_files(said)
    except Exception as error:  # the package checks little
        why = str(error) if isinstance(error, UserError) else brief(error)
        raise UserError(f"{path} cannot be read as GGUF: {why}") from error
    stored = {theirs.get(x.name) or x.name: x for x in reader.tensors}
    plan = {name: torch.empty(x.shape.tolist()[::-1], device="meta") for name, x in stored.items()}

    def tensor(name: str) -> Tensor:
        try:
            x = torch.tensor(gguf.dequantize(stored[name].data, stored[name].tensor_type))
        except NotImplementedError as error:
            known = "F32, F16, BF16, Q8_0, Q4_0 or Q4_1"
            raise UserError(f"{path}: {name}: {error}: expected {known}") from error
        if architecture is LLAMA and ("q_proj" in name or "k_proj" in name):  # see write_gguf
            pairs = x.unflatten(0, (-1, config.head_dim // 2, 2))
            return pairs.transpose(1, 2).reshape(x.shape)
        return x

    return settings, Weights(plan, tensor), tokenizer, hf_files


def _settings(said: HFConfig, shapes: dict[str, Any]) -> HFConfig:
    """Translates the metadata of a file to a config.json."""
    kind = said["general.architecture"]
    architecture = {"llama": LLAMA, "qwen3": QWEN3}.get(kind)
    if architecture is None:
        raise UserError(f"general.architecture is {shown(kind)}: expected llama or qwen3")
    fields = {name.removeprefix(f"{kind}."): value for name, value in said.items()}
    for name, value in fields.items():
        if isinstance(value, float):  # it has 32 bits there
            fields[name] = float(f"{value:.7g}")
    found: HFConfig = {
        theirs: fields.get(KEYS.get(ours, "")) for theirs, (ours, *_) in architecture.table.items()
    }
    scaling = fields.get("rope.scaling.type", "none")
    return found | {
        "model_type": kind,
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "head_dim": found["head_dim"] or found["hidden_size"] // found["num_attention_heads"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": fields.get("rope.freq_base"),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
    }


def _hf_files(said: HFConfig) -> dict[str, str]:
    """Returns the files of Hugging Face with the chat template and the ids of begin and end."""
    ids = {x: said.get(f"tokenizer.ggml.{x}") for x in ("bos_token_id", "eos_token_id")}
    tokens = said["tokenizer.ggml.tokens"]
    fields: HFConfig = {
        x.removesuffix("_id"): tokens[id] for x, id in ids.items() if id is not None
    }
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    fields["chat_template"] = said.get("tokenizer.chat_template")
    return {"tokenizer_config.json": json.dumps(fields), "config.json": json.dumps(ids)}


def _tokenizer(said: HFConfig) -> str:
    """Returns a tokenizer.json with the vocabulary of a file."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    fields = {x.removeprefix("tokenizer.ggml."): value for x, value in said.items()}
    cut = fields.get("pre")
    if fields.get("model") != "gpt2" or cut not in CUTS:
        found = f"{shown(fields.get('model'))}, cut as {shown(cut)}"
        raise UserError(f"the tokenizer is {found}: expected gpt2, cut as {either(tuple(CUTS))}")
    tokens, kinds = fields["tokens"], fields["token_type"]
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    pairs = [tuple(x.split(" ", 1)) for x in fields["merges"]]
    merges = [x for x in pairs if "".join(x) in ids]
    made = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=cut == "llama-bpe"))
    made.add_special_tokens([x for x, kind in zip(tokens, kinds) if kind == CONTROL])
    made.add_tokens([x for x, kind in zip(tokens, kinds) if kind == USER_DEFINED])
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
