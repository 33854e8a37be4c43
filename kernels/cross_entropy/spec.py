"""What the losses are proved and measured by."""

from collections.abc import Iterator

import torch

from ..proof.compile import Case
from .plain import Options


def forms(arch: int) -> Iterator[Case]:
    """Each tile of the rule, and what changes the code: options, padding, unaligned rows."""
    every = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}
    for dtype in (torch.bfloat16, torch.float32):
        for V in (256, 2048, 50_304, 128_256):
            yield from forms_of(V, dtype, **every)
    yield from forms_of(50_304, torch.bfloat16)
    yield from forms_of(50_304, torch.float16, valid=50_257)
    yield from forms_of(50_304, torch.bfloat16, valid=50_257)
    yield from forms_of(50_257, torch.bfloat16)  # rows that are not aligned


def forms_of(
    V: int, dtype: torch.dtype, valid: int | None = None, **values: float
) -> Iterator[Case]:
    options = Options(valid or V, **values)
    logits = torch.empty(4096, V, dtype=dtype, device="meta")
    targets = torch.empty(4096, dtype=torch.int64, device="meta")
    scale = torch.empty((), device="meta")

    def apart() -> None:
        from .device import cross_entropy_bwd, cross_entropy_fwd

        _, stats = cross_entropy_fwd(logits, targets, options)
        cross_entropy_bwd(logits, targets, stats, scale, logits, options)

    def in_place() -> None:
        from .device import cross_entropy_fwd_bwd_, cross_entropy_scale_

        cross_entropy_fwd_bwd_(logits, targets, scale, options)
        if valid is None:
            cross_entropy_scale_(logits, scale)

    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    label = " ".join([f"V={V} {kind}", *[f"valid={valid}"] * bool(valid), *values])
    yield Case(label, apart)
    yield Case(f"{label} in place", in_place)
