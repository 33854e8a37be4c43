"""The model against the `transformers` library's GPT-2, with the same random weights."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models import each_attention, initial, on_cpu


def theirs() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=64, n_positions=80, vocab_size=50_257,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # GPT-2's own 0.02 would leave attention even and biases unseen
            scale = 0.02 if name.endswith("wte.weight") else 0.1
            weight.add_(torch.randn_like(weight), alpha=scale)
    return model


def to_our_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames their weights to ours; their linear layers hold (in, out), ours (out, in)."""
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {
        name.removeprefix("transformer."): x.T if name.endswith(linear) else x
        for name, x in named.items()
        if name != "lm_head.weight"
    }


@each_attention
def test_gpt2_matches_transformers(attention):
    hf = theirs()
    model = initial(chosen=on_cpu(attention=attention), dim=64, context=80, vocab_size=50_257)
    model.load_state_dict(to_our_names(hf.state_dict()))
    tokens = torch.randint(50_257, (2, 75))

    expected = hf(input_ids=tokens, labels=tokens)  # shifts its labels itself
    logits = model(tokens)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)

    expected.loss.backward()
    loss.backward()
    theirs_by_name = to_our_names({name: p.grad for name, p in hf.named_parameters()})
    ours_by_name = {name: p.grad for name, p in model.named_parameters()}
    ours_by_name["wte.weight"] = ours_by_name["wte.weight"][:50_257]
    assert ours_by_name.keys() == theirs_by_name.keys()
    for name, gradient in theirs_by_name.items():
        atol = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(ours_by_name[name], gradient, rtol=1e-5, atol=atol)
