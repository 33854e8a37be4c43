"""Models of `transformers` with random weights: our logits, loss and gradients are theirs."""

import pytest
import torch

import fastgpt
from fastgpt.checkpoint.tensors import in_memory
from fastgpt.config.config import OpsConfig
from fastgpt.convert.families import to_theirs
from tests.convert.models import CONTEXT, LLAMA3, V, saved, theirs


@pytest.mark.parametrize(("family", "attention"), [
    ("gpt2", "torch"), ("gpt2", "sdpa"), ("gpt2", "blocked"), ("llama", "auto"), ("qwen3", "auto"),
])  # fmt: skip
def test_logits_loss_and_gradients_are_those_of_transformers(family, attention, tmp_path):
    model = theirs(family, **({"rope_scaling": LLAMA3} if family == "llama" else {}))
    folder = saved(model, tmp_path / "hf")
    ours, tokenizer = fastgpt.load(folder, asked=OpsConfig(attention=attention))
    assert tokenizer is None
    tokens = torch.randint(V, (3, CONTEXT))
    expected = model(input_ids=tokens, labels=tokens)  # shifts its labels itself
    scale = expected.logits.abs().max().item()
    torch.testing.assert_close(ours(tokens), expected.logits, rtol=0, atol=1e-5 * scale)
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    loss.backward()
    expected.loss.backward()
    gradients = {}
    for name, weight in ours.named_parameters():
        rows = V if name in ("wte.weight", "lm_head.weight") else None
        gradients[name] = weight.grad[:rows]
    found = dict(to_theirs(in_memory(gradients), ours.config))
    for name, weight in model.named_parameters():
        error = (found.pop(name) - weight.grad).abs().max() / weight.grad.abs().max()
        assert error < 1e-5, name
    assert not found
