"""`scaled_dot_product_attention` beside PyTorch's, and tensors in the wrong layout."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.kernels import attention, attention_dropout_mask, scaled_dot_product_attention
from tests.parity import awkward, forward_backward, launches

KERNELS = ("_attention_fwd_kernel", "_attention_bwd_dq_kernel")
SHAPE = (2, 4, 7, 16)


def shapes(query=SHAPE, key=SHAPE):
    return [awkward(*shape) for shape in (query, key, key)]


@pytest.mark.parametrize(
    ("given", "options", "ours"),
    [
        ({}, {"is_causal": True}, True),
        ({}, {"scale": 0.3}, True),
        ({"key": (2, 4, 9, 16)}, {}, True),
        ({"key": (2, 2, 7, 16)}, {"is_causal": True, "enable_gqa": True}, True),
        ({"key": (2, 4, 9, 16)}, {"is_causal": True}, False),  # PyTorch aligns the first keys
        ({}, {"attn_mask": torch.eye(7, dtype=torch.bool)}, False),
        ({"key": (1, 4, 7, 16)}, {"is_causal": True}, False),
        ({"query": (4, 7, 16), "key": (4, 7, 16)}, {"is_causal": True}, False),
    ],
)
def test_results_and_gradients_are_pytorchs(given, options, ours):
    inputs = shapes(**given)

    def both():
        for op in (scaled_dot_product_attention, F.scaled_dot_product_attention):
            yield forward_backward(lambda *qkv, op=op: op(*qkv, **options), inputs)

    with launches(*KERNELS * ours):
        found, expected = both()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_dropout_keeps_the_weights_of_the_generators_seed():
    q, k, v = shapes()
    torch.manual_seed(2)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(2)
    kept = attention_dropout_mask((2, 4, 7, 7), 0.5, torch.randint(2**63 - 1, (1,)), "cpu")
    weights = (q @ k.mT / 4).softmax(-1) * kept * 2
    torch.testing.assert_close(out, weights @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("T", "Tk", "K"), [(7, 9, 4), (6, 9, 2)])
def test_heads_before_tokens_are_refused_where_that_is_certain(T, Tk, K):
    inputs = shapes((2, 4, T, 16), (2, K, Tk, 16))
    with (
        launches(),
        pytest.raises(ValueError, match=r"look like \(B, H, T, D\).*transpose\(1, 2\)"),
    ):
        attention(*inputs)
    assert attention(*(x.transpose(1, 2) for x in inputs)).shape == (2, T, 4, 16)
    with pytest.raises(ValueError, match=r"divides, got 5$"):
        attention(*shapes((2, 7, 5, 16), (2, 6, 2, 16)))  # wrong in both layouts
