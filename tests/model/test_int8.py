"""Weights of 8 bits give nearly the logits of the same model."""

import pytest
import torch

from fastgpt.errors import UserError
from fastgpt.model.int8 import to_int8
from tests.models import OPTIONS, build


@pytest.mark.parametrize(
    ("name", "bound"),  # of eight seeds the largest were 0.023 and, with SwiGLU's products, 0.105
    [("gpt2", 0.04), ("untied", 0.04), ("softcap", 0.04), ("post-norm", 0.04), ("modern", 0.15)],
)
def test_logits_are_nearly_those_of_fp32(name, bound):
    model, tokens = build(**OPTIONS[name]).eval(), torch.randint(50, (2, 16))
    expected = model(tokens)
    error = to_int8(model)(tokens) - expected
    assert 0 < error.norm() < bound * expected.norm()
    assert model.generate(tokens[:, :4], max_new_tokens=3).shape == (2, 7)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(UserError, match=r"--weights is int8: expected no --exact"):
        to_int8(build(), exact=True)
    with pytest.raises(UserError, match=r"--weights is int8: expected --device cpu, not meta"):
        to_int8(build().to("meta"))
