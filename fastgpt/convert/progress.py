"""How far another program has trained a model."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Progress:
    """Step and optimizer of another program's run, with tensors under our names."""

    step: int
    """Number of steps taken."""
    updates: int
    """Number of updates that AdamW has counted; steps that fp16 skipped are not among them."""
    moments: dict[str, tuple[Tensor, Tensor]]
    """AdamW's running means of the gradient and of the squared gradient of each weight."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights in fp32, if those of the model's file were rounded from them."""
    settings: dict[str, float] = field(default_factory=dict)
    """Settings of the optimizer, by the names in `OptimConfig`, as far as the file has them."""
    lr: float | None = None
    """Learning rate of the last step, if the file has it."""
