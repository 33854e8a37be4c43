"""Every op at sizes that fill a GPU, and at its awkward ones; `test_conformance` has small ones."""

import pytest
import torch

from fastgpt.kernels.attention.spec import problem as attention
from fastgpt.kernels.decode_attention.spec import problem as decode
from fastgpt.kernels.rotary.spec import shape as rotary
from fastgpt.kernels.specs import SPECS
from tests.kernels import conformance
from tests.kernels.cuda.proof import fitting

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Tiles of every head dimension at lengths that fill a GPU, and the masks that change a tile.
ATTENTION = {
    "odd-length": attention(3, 1000, 12, 64),
    "d128-grouped": attention(2, 2048, 16, 128, K=4),
    "d256": attention(1, 1024, 8, 256),
    "d32": attention(4, 1024, 8, 32),
    "d16": attention(4, 1024, 8, 16),
    "d80": attention(2, 512, 8, 80),
    "d96": attention(2, 512, 8, 96),
}
MASKS = {"window": 256}, {"window": 100, "docs": 300}, {"docs": 300, "causal": False}
ATTENTION |= {f"{name}-full": {**s, "causal": False} for name, s in ATTENTION.items()}
ATTENTION |= {f"d{D} {m}": attention(4, 1024, 6, D, K=2, **m) for D in (64, 128) for m in MASKS}
DECODE = {
    "gpt2-one-sequence": decode(16_384, 12, 64, (16_384,)),
    "gpt2-batch": decode(1024, 12, 64, (1024, 1000, 1, 513, 7, 64, 65, 0)),
    "grouped-128": decode(8192, 32, 128, (8192, 5000), K=8),
    "grouped-128-paged": decode(8192, 32, 128, (8192, 5000), K=8, page=16),
    "four-new-paged": decode(4096, 32, 128, (4096, 77, 1024), Tq=4, K=4, page=64),
    "d256": decode(2048, 8, 256, (2048, 99), Tq=2, K=1),
    "d80": decode(2048, 8, 80, (2048, 99), page=16),
}
ROTARY = [(2, 4096, 16, 4, 128), (1, 1001, 25, 5, 64), (3, 65, 3, 1, 80), (2, 200, 8, 8, 256)]
PADDED = {"M": 512, "V": 50_304, "valid_vocab": 50_257, "ignored": True}
LOSSES = [
    ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}),
    ("cross_entropy", {"inplace_grad": True}),
    ("linear_cross_entropy", {"C": 64}),
    ("linear_cross_entropy", {"C": 64, "chunk_tokens": 200}),
]
REAL = [
    *(("attention", label, s) for label, s in ATTENTION.items()),
    *(("decode_attention", label, s) for label, s in DECODE.items()),
    *(("rotary", str(sizes), rotary(*sizes)) for sizes in ROTARY),
    *((name, "narrow", {"M": 100_001, "N": 64}) for name in SPECS if name.endswith("_norm")),
    *(
        (name, f"{options} {reduction}", {**PADDED, **options, "reduction": reduction})
        for name, options in LOSSES
        for reduction in ("mean", "none")
    ),
]
IDS = [f"{name} {label}" for name, label, _ in REAL]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "label", "problem"), REAL, ids=IDS)
def test_errors_at_real_sizes(name, label, problem, dtype):
    spec = conformance.careful(SPECS[name])
    conformance.parity(spec, fitting(problem), "cuda", DTYPES[dtype])
