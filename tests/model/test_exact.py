"""Batch-invariant models: generation gives the bits of scoring, alone or in a batch."""

import pytest
import torch

import fastgpt
from fastgpt import kernels
from fastgpt.kernels.decode_attention import op as decode_attention_op
from fastgpt.ops.kv_cache import Cache

MODELS = {
    "gpt2": {},
    "post-norm": {"norm": "post-layernorm", "activation": "gelu_erf", "window": 13},
    "llama": {
        "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2,
        "bias": False, "qk_norm": True, "softcap": 15.0,
    },
    "documents": {"document_mask": True, "eot_id": 3},
}  # fmt: skip


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request, monkeypatch) -> fastgpt.GPT:
    # without the interpreter, whose products depend on the place of a row
    monkeypatch.setattr(decode_attention_op, "runs_kernels", lambda device: False)
    model = fastgpt.GPT.from_config(
        num_layers=2, num_heads=4, dim=64, vocab_size=65, context=48, **request.param
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@torch.no_grad()
def test_scoring_does_not_depend_on_the_batch(model):
    tokens = torch.randint(65, (5, 34))
    with kernels.batch_invariant():
        alone = [model(row[None])[0] for row in tokens]
        for rows in ([0, 1], [4, 2, 3], range(5)):
            for row, found in zip(rows, model(tokens[list(rows)])):
                assert torch.equal(found, alone[row])
        for length in (1, 7, 33):
            assert torch.equal(model(tokens[:3, :length])[1], alone[1][:length])
    torch.testing.assert_close(model(tokens)[0], alone[0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_generation_gives_the_bits_of_scoring(model):
    tokens, lengths, rows = torch.randint(65, (3, 30)), torch.tensor([17, 3, 11]), torch.arange(3)
    cache = Cache(model.config, 3, 30, "cpu")
    with kernels.batch_invariant():
        scored = [model(row[None])[0] for row in tokens]
        model(tokens[:, :17], cache=cache)
        cache.lengths = lengths
        for step in range(13):
            places = lengths + step
            found = model(tokens[rows, places][:, None], cache=cache)[:, 0]
            for row, place in enumerate(places.tolist()):
                assert torch.equal(found[row], scored[row][place])


def test_prompts_continue_alike_alone_and_together(model):
    """Also beyond the context, where each step computes a window of the last tokens."""
    prompts = [torch.randint(65, (length,)) for length in (44, 4, 30)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    options = {"max_new_tokens": 8, "temperature": 0.0, "exact": True}
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    together = fastgpt.generate(model, padded, lengths=lengths, **options)
    for row, prompt in zip(together, prompts):
        alone = fastgpt.generate(model, prompt[None], **options)[0]
        assert row[: len(alone)].tolist() == alone.tolist()
    assert not kernels.is_batch_invariant()
