"""Arguments that single ops refuse; `test_conformance` has wrong dtypes, devices and sizes.

Of a message the argument's name and the value are compared; `...` stands for any text.
"""

import math
import re
from functools import partial

import pytest
import torch

from fastgpt.kernels import (
    attention,
    attention_blocked,
    attention_packed,
    bias_act,
    cross_entropy,
    decode_attention,
    layer_norm,
    linear_cross_entropy,
    rotary,
)
from fastgpt.kernels.attention.plain import attention_ref
from tests.parity import launches

q, k, k3 = (torch.zeros(2, 6, heads, 8) for heads in (4, 2, 3))
ids, wide = torch.zeros(2, 6, dtype=torch.int32), torch.zeros(1, 2, 1, 257)
q1, n, table = q[:, :1], torch.ones(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
X, HEAD, T = torch.ones(2, 8), torch.ones(8, 8), torch.zeros(2, dtype=torch.int64)
Q, C = torch.ones(2, 5, 3, 8), torch.ones(5, 4)

REFUSED = [
    ("q: ...1 to 256, got 257", attention, wide, wide, wide),
    ("qkv: ...for 2 heads, got (2, 6, 4)", attention_packed, q[..., 0], 2),
    ("qkv: ...for 2 heads, got (2, 6, 3, 8)", attention_packed, k3, 2),
    ("qkv: ...for 4 heads, got (2, 6, 4, 8)", attention_packed, q, 4),
    ("q: ...at most 5 tokens as in k, got 6", attention_blocked, q, k[:, :5], k[:, :5]),
    ("q: ...1 to 256, got 257", decode_attention, wide[:, :1], wide, wide, n[:1]),
    ("k_cache: ...got (1, 6, 2, 8)", decode_attention, q1, k[:1], k, n),
    ("v_cache: ...", decode_attention, q1, k, k[:, :5], n),
    ("q: ...3 divides, got 4", decode_attention, q1, k3, k3, n),
    ("logits: ...got (2, 0)", cross_entropy, X[:, :0], T),
    ("x: ...got (2, 0)", linear_cross_entropy, X[:, :0], X[:, :0], T),
    ("x: ...got (2, 0)", layer_norm, X[:, :0], None),
    ("x: ...1 to 16384, got (1, 16385)", layer_norm, torch.ones(1, 16_385), None),
    ("bias: ...got (1, 8)", layer_norm, X, None, torch.ones(1, 8)),
    ("eps: ...got -1.0", layer_norm, X, None, None, -1.0),
    ("kind: ...got 'gelu'", bias_act, X, None, "gelu"),
    ("x: ...got (2, 0)", bias_act, X[:, :0], None, "relu"),
    ("x: ...got (2, 7)", bias_act, X[:, :7], None, "swiglu"),
    ("bias: ...got (4,)", bias_act, X, torch.ones(4), "swiglu"),
    ("q: ...got (5, 3, 8)", rotary, Q[0], Q, C, C),
    ("k: ...got (2, 5, 0, 8)", rotary, Q, Q[:, :, :0], C, C),
    ("q: ...got 7", rotary, Q[..., :7], Q[..., :7], C, C),
    ("q: ...2 to 256, got 258", rotary, *[torch.ones(1, 1, 1, 258)] * 4),
    ("cos: ...got (5, 2)", rotary, Q, Q, C[:, :2], C),
    ("sin: ...got (6, 4)", rotary, Q, Q, C, torch.ones(6, 4)),
    ("sin: ...got torch.float16", rotary, Q, Q, C, C.half()),
    ("cos: ...got meta", rotary, Q, Q, C.to("meta"), C),
    ("sin: ...requires...", rotary, Q, Q, C, C.clone().requires_grad_()),
]
for op in (attention, attention_ref, attention_blocked):
    REFUSED += [
        ("q: ...3 divides, got 4...", op, q, k3, k3),
        ("k: expected (2, Tk, K, 8)...", op, q, k[:1], k),
        ("v: ...got (2, 5, 2, 8)...", op, q, k, k[:, :5]),
        ("v: ...got (2, 6, 2, 4)...", op, q, k, k[..., :4]),
        ("k: ...got torch.bfloat16 on cpu", op, q, k.bfloat16(), k),
    ]

OPTIONS = [
    (attention, (q, k, k), "scale: ...got nan", {"scale": math.nan}),
    (attention, (q, k, k), "window: ...got 0", {"window": 0}),
    (attention, (q, k, k), "dropout_p: ...got 1.0", {"dropout_p": 1.0}),
    (attention, (q, k, k), "dropout_seed: ...got torch.int32", {"dropout_seed": ids[0, :1]}),
    (attention, (q, k, k), "dropout_seed: ...got 9223372036854775808", {"dropout_seed": 2**63}),
    (attention, (q, k, k), "doc_ids: ...got (2, 5)", {"doc_ids": ids[:, :5]}),
    (attention, (q, k, k), "doc_ids: ...got torch.float32", {"doc_ids": ids.float()}),
    (attention, (q, k, k), "doc_ids: ...got meta", {"doc_ids": ids.to("meta")}),
    (attention, (q, k[:, :3], k[:, :3]), "q: ...at most 3 ...got 6", {"doc_ids": ids[:, :3]}),
    (decode_attention, (q1, k, k, n), "starts: ...got (2,)", {"starts": n}),
    (decode_attention, (q1, k, k, n), "scale: ...got inf", {"scale": math.inf}),
    (decode_attention, (q1, k[0], k, n), "k_cache: ...", {"block_table": table}),
    (decode_attention, (q1, k, k, n), "block_table: ...got (2,)...", {"block_table": n.int()}),
    (decode_attention, (q1, k, k, n), "block_table: ...got (3, 3)...",
     {"block_table": table.new_zeros(3, 3)}),
    (decode_attention, (q1, k, k, n), "block_table: ...int64", {"block_table": table.long()}),
    (linear_cross_entropy, (X, HEAD, T), "chunk_tokens: ...got 0", {"chunk_tokens": 0}),
]  # fmt: skip
for op, given in ((cross_entropy, (X, T)), (linear_cross_entropy, (X, HEAD, T))):
    OPTIONS += [
        (op, given, "valid_vocab: ...1 to 8 columns, got 9", {"valid_vocab": 9}),
        (op, given, "valid_vocab: ...1 to 8 columns, got 0", {"valid_vocab": 0}),
        (op, given, "label_smoothing: ...got 1.5", {"label_smoothing": 1.5}),
        (op, given, "z_loss: ...got -1.0", {"z_loss": -1.0}),
        (op, given, "softcap: ...got 0.0", {"softcap": 0.0}),
        (op, given, "reduction: ...got 'avg'", {"reduction": "avg"}),
    ]
REFUSED += [(text, partial(op, **options), *given) for op, given, text, options in OPTIONS]


def name(refused):
    message, op, *_ = refused
    return f"{getattr(op, 'func', op).__name__} {message}"


@pytest.mark.parametrize("refused", REFUSED, ids=name)
def test_bad_arguments_are_named_before_anything_runs(refused):
    message, op, *given = refused
    with launches(), pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
        op(*given)
    pattern = ".*".join(map(re.escape, message.split("...")))
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)
