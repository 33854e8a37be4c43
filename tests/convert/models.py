"""Small random models of Hugging Face and of ours, and their tensors in files."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from fastgpt.checkpoint.tensors import Weights, in_memory
from fastgpt.cli import configure
from fastgpt.config.model import ModelConfig
from fastgpt.convert.__main__ import ConvertConfig, convert
from fastgpt.convert.source import OpenedModel, read
from fastgpt.convert.target import write_run
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.train.build import Run, build
from fastgpt.train.plan import resolve
from tests.runs import octets

V, CONTEXT = 100, 40
TEXTS = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n",
    "  two  spaces\t\ttabs\r\n", "don't won't I'm 12345 x=1;y+=2", "a", "",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600 \u00a0\u2003|", "\x00\x7f\ufffd",
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 20,
}  # fmt: skip

LLAMA = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": False}
OURS = {
    "gpt2": {},
    "gpt2-without-biases": {"bias": ("qkv",)},
    "gpt2-untied": {"tied": False, "activation": "relu_squared", "ffn_dim": 40},
    "llama": LLAMA,
    "qwen3": LLAMA | {"qk_norm": "weighted", "num_kv_heads": 2, "head_size": 16},
    "qwen3-without-weights": LLAMA | {"qk_norm": True, "tied": False, "norm_eps": 1e-5},
}


def moved(model: torch.nn.Module) -> None:
    with torch.no_grad():  # else norms would be 1 and biases 0
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)


def theirs(family: str, **options) -> PreTrainedModel:
    if family == "gpt2":
        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": CONTEXT, "vocab_size": V}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        sizes = {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "hidden_size": 32, "intermediate_size": 50, "vocab_size": V, "head_dim": 8,
            "max_position_embeddings": CONTEXT,
        }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes | options))
    moved(model)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    model.float()
    return folder


def saved_run(
    folder: Path, tokenizer: Tokenizer | None = None, dtype: torch.dtype = torch.float32, **options
) -> Path:
    sizes = {"num_layers": 2, "num_heads": 4, "dim": 32, "context": CONTEXT, "vocab_size": V}
    config = ModelConfig(**sizes | options)
    model = GPT.from_config(config)
    moved(model)
    weights = {name: x.detach().to(dtype) for name, x in model.state_dict().items()}
    write_run(OpenedModel(folder, config, in_memory(weights), tokenizer), folder)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Changes fields of a folder's config.json; None removes one."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: x for name, x in fields.items() if x is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def converted(source: Path, target: Path, to: str, **options) -> Path:
    convert(ConvertConfig(source=str(source), target=target, to=to, **options))
    return target


SUFFIX = {"nanogpt": ".pt", "llmc": ".bin"}


def foreign(run: Path, kind: str, file: Path) -> Path:
    """Writes a run's model as nanoGPT or llm.c does, by their formats' description alone."""
    source = read(str(run))
    config, ours = source.config, dict(source.weights)
    sizes = (config.context, config.vocab_size, config.num_layers, config.num_heads, config.dim)
    if kind == "nanogpt":
        names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
        args = dict(zip(names, sizes)) | {"bias": config.bias}
        state = {f"transformer.{name}": x for name, x in ours.items()}
        state["lm_head.weight"] = ours["wte.weight"]
        torch.save({"model": state, "model_args": args}, file)
        return file
    table = ours["wte.weight"]
    padded = -(-len(table) // 128) * 128
    ours["wte.weight"] = torch.nn.functional.pad(table, (0, 0, 0, padded - len(table)))
    version = 5 if table.dtype is torch.bfloat16 else 3
    header = torch.zeros(256, dtype=torch.int32)
    header[:8] = torch.tensor([20240326, version, *sizes, padded])
    order = ["wte.weight", "wpe.weight"]
    for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
        for kind in ("weight", "bias"):
            order += [f"h.{layer}.{part}.{kind}" for layer in range(config.num_layers)]
    parts = [header, *(ours[name] for name in (*order, "ln_f.weight", "ln_f.bias"))]
    file.write_bytes(b"".join(octets(x) for x in parts))
    return file


def started(argv: list[str]) -> Run:
    return build(resolve(configure(argv)))


def refused(argv: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        started(argv)


def weights(path: Path) -> Weights:
    return read(str(path)).weights


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if two sets of tensors have the same names, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def files(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
