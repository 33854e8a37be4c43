"""Documents packed into one window do not see each other, in training as in evaluation."""

import pytest
import torch
from torch import Tensor

from fastgpt.data.tokenizer import ByteTokenizer, CharTokenizer
from fastgpt.errors import UserError
from fastgpt.model import GPT
from fastgpt.run import with_vocabulary
from tests.trainer.models import each_attention, on_cpu, sharp

EOT = 49
# Rows of 150 places: more than two of the blocks of 64 queries. The first document of the first row
# began before the window; the second row has an empty one.
ROWS = [[40, 24, 1, 85], [63, 1, 2, 84]]


def build(attention: str, **options) -> GPT:
    """The same model for each way of attention."""
    config = {"num_kv_heads": 2, "context": 150, "eot_id": EOT, "document_mask": True}
    torch.manual_seed(0)
    return sharp(chosen=on_cpu(attention=attention), **{**config, "position": "none", **options})


def draw() -> tuple[Tensor, list[list[Tensor]]]:
    """(2, 150) tokens, and the documents in each row."""
    generator = torch.Generator().manual_seed(1)
    rows = [[torch.randint(EOT, (n,), generator=generator) for n in row] for row in ROWS]
    for number, row in enumerate(rows):
        for document in row[number == 0 :]:
            document[0] = EOT
    return torch.stack([torch.cat(row) for row in rows]), rows


@each_attention
@pytest.mark.parametrize("options", [{}, {"position": "rotary"}, {"window": 30}], ids=str)
def test_packed_documents_give_what_each_gives_alone(attention, options):
    """Logits and every gradient, in fp32; rotary positions are relative, so they agree as well."""
    model = build(attention, **options)
    tokens, rows = draw()
    targets = tokens.roll(3, 1)
    packed = model(tokens)
    loss = model(tokens, targets)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    alone = torch.stack([torch.cat([model(d[None])[0] for d in row]) for row in rows])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    by_document = torch.nn.functional.cross_entropy(alone.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(by_document.item(), rel=1e-5)
    expected = torch.autograd.grad(by_document, [*model.parameters()])
    for (name, _), got, wanted in zip(model.named_parameters(), gradients, expected):
        error = (got - wanted).norm() / wanted.norm()
        assert error < 1e-4, f"{name}: {error}"


@each_attention
def test_tokens_of_another_document_change_nothing(attention):
    """With learned positions, which go on over the documents of a window."""
    tokens, _ = draw()
    other = tokens.clone()
    other[0, 41:64] = (other[0, 41:64] + 7) % EOT  # in the second document
    for masked in (True, False):
        model = build(attention, document_mask=masked, position="learned")
        before, after = model(tokens), model(other)
        changed = (before != after).any(-1)
        assert changed[0, 41:64].all()
        assert not changed[0, :41].any()
        assert not changed[1].any()
        assert bool(changed[0, 64:].any()) is not masked


def test_masked_model_is_one_graph():
    """Under torch.compile attention is PyTorch's fused one."""
    model = build("sdpa")
    tokens, _ = draw()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("abc")])
def test_tokenizer_without_end_of_text_is_refused(tokenizer, tiny):
    from fastgpt.cli import parse

    complaint = f"model.document_mask: the {tokenizer.kind} tokenizer has no end-of-text token"
    with pytest.raises(UserError, match=complaint):
        with_vocabulary(parse(tiny("--model.document-mask")), tokenizer)
    assert with_vocabulary(parse(tiny()), tokenizer).model.eot_id is None
