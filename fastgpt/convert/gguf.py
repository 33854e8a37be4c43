"""Writing a model as a GGUF file, which llama.cpp and Ollama read."""

import json
from pathlib import Path
from typing import Any

from fastgpt.convert.families import is_transposed, settings_for, to_theirs
from fastgpt.convert.gguf_reader import names, package, rotated
from fastgpt.convert.source import OpenedModel
from fastgpt.convert.target import begin_and_end
from fastgpt.data.tokenizers import LETTERS
from fastgpt.errors import UserError, shown
from fastgpt.sampling.chat import text_elsewhere

KINDS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}
"""Value of --dtype -> GGUF's name."""


def write_gguf(source: OpenedModel, target: Path, dtype: str) -> None:
    """Writes a model with its tokenizer and chat template into one file.

    Args:
        dtype: key of `KINDS`; norms, biases and position embeddings are fp32.

    Raises:
        UserError: the package `gguf` is missing, or GGUF lacks the model or its tokenizer.
    """
    gguf, config, kind = package(), source.config, KINDS[dtype]
    family = settings_for(config)["model_type"]
    biased = family == "qwen3" and config.bias
    if config.activation not in ("gelu_tanh", "swiglu") or config.rotary_scaling or biased:
        raise UserError(
            f"llama.cpp cannot express this model: --model.activation is {config.activation},"
            " expected gelu_tanh or swiglu; no --model.rotary-scaling; --model.qk-norm without bias"
        )
    writer = gguf.GGUFWriter(target, family, use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    if family == "gpt2":
        writer.add_layer_norm_eps(config.epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.epsilon)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(config.rotary_base)
    _add_vocabulary(writer, source, gguf.TokenType)

    weights = to_theirs(source.weights, config)
    for theirs, name in names(gguf, config).items():
        x = rotated(theirs, weights[theirs], config, 2, config.head_dim // 2).float()
        if is_transposed(theirs, config):  # at Hugging Face, but not here
            x = x.T
        exact = x.dim() == 1 or name == "position_embd.weight"
        form = gguf.GGMLQuantizationType["F32" if exact else kind]
        try:
            data = gguf.quantize(x.contiguous().numpy(), form)
        except gguf.QuantError as error:
            raise UserError(f"{error}: expected rows of a multiple of 32 weights") from error
        writer.add_tensor(name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, source: OpenedModel, types: Any) -> None:
    tokenizer = source.tokenizer
    spec = {} if tokenizer is None else json.loads(tokenizer.to_json())
    model, cut = spec.get("model") or {}, spec.get("pre_tokenizer") or {}
    merges = model.get("merges") or []
    begin, end = begin_and_end(source).values()
    end = end[0] if isinstance(end, list) and end else end
    changed = cut.get("add_prefix_space") or spec.get("normalizer") or model.get("ignore_merges")
    cannot = changed or (merges and (end is None or not cut.get("use_regex", True)))
    if (model.get("type"), cut.get("type")) != ("BPE", "ByteLevel") or cannot:
        raise UserError(
            "GGUF needs a tokenizer that merges bytes within GPT-2's words and has an end of text,"
            f" or bytes alone: this model has {'none' if tokenizer is None else tokenizer.kind}"
        )
    tokens = {i: (token, types.NORMAL) for token, i in model["vocab"].items()}
    for x in spec.get("added_tokens") or []:
        tokens[x["id"]] = x["content"], types.CONTROL if x["special"] else types.USER_DEFINED
    size = source.config.vocab_size or 0
    for id in (begin, end):
        if id is not None and not (type(id) is int and 0 <= id < size):
            raise UserError(
                f"the model begins or ends with {shown(id)}: expected an id below {size}"
            )
    rows = [tokens.get(i, (f"[PAD{i}]", types.UNUSED)) for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    # llama.cpp asks for a merge even of bytes; this one makes no token, and so changes nothing
    pairs = [x if isinstance(x, str) else " ".join(x) for x in merges]
    writer.add_token_merges(pairs or [f"{LETTERS[0]} {LETTERS[0]}"])
    # without an end it takes id 11; byte 0 is in no text
    end = end or 0
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end if begin is None else begin)
    writer.add_add_bos_token(bool(tokenizer and tokenizer.begin_ids))
    if (template := text_elsewhere(source.hf_files, tokenizer)) is not None:
        writer.add_chat_template(template)
