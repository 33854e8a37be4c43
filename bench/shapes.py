"""The shapes at which ops are measured, by device and label.

GPT-2's four sizes, long sequences at both head dimensions, and some that divide no block.
"""

from typing import Any

Shape = dict[str, Any]
Shapes = dict[str, dict[str, Shape]]
"""By `cuda`, `cpu` and `tiny`; by label."""


def _attention(B: int, T: int, H: int, D: int) -> Shape:
    return {"B": B, "T": T, "H": H, "D": D}


ATTENTION: Shapes = {
    "cuda": {
        "gpt2-124m": _attention(16, 1024, 12, 64),
        "4k-d128": _attention(4, 4096, 16, 128),
        "16k-d128": _attention(1, 16384, 16, 128),
        "gpt2-355m": _attention(16, 1024, 16, 64),
        "gpt2-774m": _attention(8, 1024, 20, 64),
        "gpt2-1558m": _attention(8, 1024, 25, 64),
        "4k-d64": _attention(4, 4096, 16, 64),
        "16k-d64": _attention(1, 16384, 16, 64),
        "awkward-t1000-d80": _attention(5, 1000, 7, 80),
        "awkward-t257-d64": _attention(33, 257, 5, 64),
    },
    "cpu": {
        "gpt2-124m": _attention(2, 1024, 12, 64),
        "shakespeare-char": _attention(16, 256, 6, 64),
        "shakespeare-cpu": _attention(24, 64, 4, 32),
        "awkward": _attention(3, 257, 5, 40),
    },
    "tiny": {"tiny": _attention(1, 48, 2, 16)},
}
WIDTHS = {"gpt2-124m": 768, "gpt2-355m": 1024, "gpt2-774m": 1280, "gpt2-1558m": 1600}
NORM: Shapes = {
    "cuda": {
        "n768": {"M": 65536, "N": 768},
        "n1600": {"M": 65536, "N": 1600},
        "n4096": {"M": 65536, "N": 4096},
        **{name: {"M": 16384, "N": C} for name, C in WIDTHS.items()},
        "n16384": {"M": 8192, "N": 16384},
        "awkward": {"M": 10007, "N": 777},
    },
    "cpu": {
        "gpt2-124m": {"M": 2048, "N": 768},
        "awkward": {"M": 1003, "N": 777},
    },
    "tiny": {"tiny": {"M": 9, "N": 48}},
}
LOGITS: Shapes = {
    "cuda": {
        "gpt2": {"M": 16384, "V": 50304},
        "awkward": {"M": 4099, "V": 50257},
        "wide": {"M": 4096, "V": 128256},
    },
    "cpu": {"gpt2": {"M": 256, "V": 50304}, "characters": {"M": 4096, "V": 65}},
    "tiny": {"tiny": {"M": 5, "V": 100}},
}
HEADS: Shapes = {
    "cuda": {
        "gpt2-124m": {"M": 16384, "C": 768, "V": 50304},
        "gpt2-1558m": {"M": 8192, "C": 1600, "V": 50304},
        "awkward": {"M": 4099, "C": 777, "V": 50257},
    },
    "cpu": {"gpt2-124m": {"M": 256, "C": 768, "V": 50304}},
    "tiny": {"tiny": {"M": 20, "C": 16, "V": 100}},
}
ACTIVATIONS: Shapes = {
    "cuda": {
        **{name: {"M": 16384, "N": 4 * C} for name, C in WIDTHS.items()},
        "awkward": {"M": 10007, "N": 777},
    },
    "cpu": {"gpt2-124m": {"M": 1024, "N": 3072}, "awkward": {"M": 1003, "N": 777}},
    "tiny": {"tiny": {"M": 9, "N": 48}},
}
GATED: Shapes = {
    "cuda": {"gpt2-124m": {"M": 16384, "N": 4096}, "awkward": {"M": 10007, "N": 1554}},
    "cpu": {"gpt2-124m": {"M": 1024, "N": 4096}},
    "tiny": {"tiny": {"M": 9, "N": 48}},
}
ROTARY: Shapes = {
    "cuda": {name: ATTENTION["cuda"][name] for name in ("gpt2-124m", "4k-d128", "16k-d64")},
    "cpu": {"gpt2-124m": _attention(1, 1024, 12, 64)},
    "tiny": ATTENTION["tiny"],
}
DECODING: Shapes = {
    "cuda": {
        "b64-1k": _attention(64, 1024, 12, 64),
        "b1-16k": _attention(1, 16384, 12, 64),
        "b16-4k": _attention(16, 4096, 12, 64),
        "b8-16k-d128": _attention(8, 16384, 16, 128),
        "awkward": _attention(3, 1001, 7, 80),
    },
    "cpu": {"b4-1k": _attention(4, 1024, 12, 64)},
    "tiny": {"tiny": _attention(2, 40, 2, 16)},
}
