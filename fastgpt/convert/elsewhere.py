"""Warnings about models that llama.cpp or vLLM cannot take, although transformers can.

Sources: llama.cpp as in llama-cpp-python 0.3.36 (`conversion/gpt2.py`, `conversion/base.py`,
`src/models/gpt2.cpp`); vLLM 0.33.0 (`vllm/model_executor/models/qwen3.py`).
"""

from collections.abc import Iterator

from fastgpt.convert.families import GPT2, QWEN3, family_for
from fastgpt.convert.source import Source


def warnings(source: Source) -> Iterator[str]:
    """Yields a line for each part of a model that llama.cpp or vLLM refuses or computes otherwise.

    Raises:
        UserError: no family of models can express it.
    """
    config, family, tokenizer = source.config, family_for(source.config), source.tokenizer
    # tokenizers are known by a hash of what they make of a text; foreign ones may be known
    if (
        tokenizer is not None
        and tokenizer.kind != "gpt2"
        and "config.json" not in source.hf_sidecars
    ):
        yield f"llama.cpp's converter does not know the tokenizer ({tokenizer.kind})"
    if family is GPT2 and config.activation != "gelu_tanh":
        yield f"llama.cpp computes gelu_tanh in a GPT-2: --model.activation is {config.activation}"
    if family is GPT2 and config.ffn_width != 4 * config.dim:
        yield f"llama.cpp expects 4 x {config.dim} in a GPT-2: --model.ffn-dim is {config.ffn_dim}"
    if family is QWEN3 and config.bias_at("projection"):
        yield "vLLM's Qwen3 lacks the bias of --model.projection-bias"
