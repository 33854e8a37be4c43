"""Attention where no kernel runs: the implementations that are fast on a CPU."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fastgpt.kernels import attention_blocked
from fastgpt.kernels.attention.plain import attention_ref
from fastgpt.kernels.attention.spec import eager
from tests.kernels.test_attention import ON_A_CPU, PLAIN, docs, dtypes, make
from tests.parity import assert_parity, awkward

# Around the block sizes: 64 rows up to T = 512, 128 beyond. T, H, K, options
LENGTHS = [1, 63, 64, 65, 200, 513]
HEADS_AND_WINDOWS = {
    "mha": (2, 2, None),
    "gqa-window-50": (4, 2, 50),
    "mqa-window-130": (3, 1, 130),
    "window-2": (2, 2, 2),
}


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("case", HEADS_AND_WINDOWS)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_a_cpu_it_is_the_same(name, T, case, dtype):
    H, K, window = HEADS_AND_WINDOWS[case]
    inputs = make(2 if T < 100 else 1, T, H, 8, K=K, dtype=dtype)
    assert_parity(ON_A_CPU[name], attention_ref, inputs, eager=eager, terms=T, window=window)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_a_cpu_a_window_of_one_sees_its_own_place(name):
    q, k, v = make(1, 130, 2, 8).values()
    torch.testing.assert_close(ON_A_CPU[name](q, k, v, window=1), v)


@pytest.mark.parametrize("options", [{"window": 50}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("lengths", [(64, 1, 65), (3, 597)], ids=str)
@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_a_cpu_documents_are_kept_apart(name, lengths, options):
    """Attention on a CPU keeps documents apart, wherever they end within its blocks of queries."""
    options = {**options, "doc_ids": torch.stack((docs(*lengths), docs(*reversed(lengths))))}
    T = sum(lengths)
    inputs = make(2, T, 4, 8, K=2)
    assert_parity(ON_A_CPU[name], attention_ref, inputs, eager=eager, terms=T, **options)


@pytest.mark.parametrize("T", [1, 63, 130])
@pytest.mark.parametrize(
    "options", [{}, {"window": 50}, {"doc_ids": docs(100, 100)[None]}], ids=str
)
@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_a_cpu_queries_may_be_those_of_the_last_tokens(name, options, T):
    inputs = make(1, T, 4, 8, K=2, Tk=200)
    assert_parity(ON_A_CPU[name], attention_ref, inputs, eager=eager, **options)


def dropped_weights(op, q: Tensor, k: Tensor, p: float, seed: int, **options) -> Tensor:
    """Returns the attention weights (B, H, T, T) after dropout: the output where v is the identity.

    So q and k are as wide as they are long.
    """
    eye = torch.eye(q.shape[1], dtype=q.dtype)[None, :, None].expand_as(k)
    torch.manual_seed(seed)
    return op(q, k, eye, dropout_p=p, **options).transpose(1, 2)


@pytest.mark.parametrize("name", PLAIN)
def test_dropped_weights_are_zero_or_scaled_up(name):
    p, T = 0.25, 130
    q, k = awkward(1, T, 2, T) / 8, awkward(1, T, 2, T) / 8
    whole, dropped = (dropped_weights(PLAIN[name], q, k, drop, seed=3) for drop in (0.0, p))
    visible = torch.ones(T, T).tril().bool().expand_as(whole)
    assert (dropped[~visible] == 0).all()
    kept = (dropped != 0)[visible]
    torch.testing.assert_close(
        dropped[visible][kept], whole[visible][kept] / (1 - p), rtol=1e-4, atol=1e-6
    )
    draws = kept.numel()
    assert abs(kept.float().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / draws)
    assert len({tuple(row.tolist()) for row in (dropped[0, 0, 100:] != 0)}) == T - 100


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("window", [None, 20])
def test_dropout_of_blocked_is_that_of_the_mask_it_draws(dtype, window):
    T, p = 130, 0.3
    inputs = {name: x / 4 for name, x in make(1, T, 2, T, dtype=dtype).items()}
    weights = dropped_weights(attention_blocked, inputs["q"], inputs["k"], p, 5, window=window)
    # its scale is that of the probability rounded to a multiple of 2**-16
    rounded = round(p * 65536) / 65536

    def op(q, k, v):
        torch.manual_seed(5)
        return attention_blocked(q, k, v, dropout_p=p, window=window)

    mask = {"dropout_mask": weights != 0, "dropout_p": rounded, "window": window}
    assert_parity(op, partial(attention_ref, **mask), inputs, eager=partial(eager, **mask))
