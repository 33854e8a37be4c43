"""Learning rate schedules, as pure functions of the step."""

import math

from fastgpt.config.config import OptimConfig


def lr_ratio(step: int, steps: int, config: OptimConfig) -> float:
    """Returns the share of the peak learning rate, in [0, 1], for `step` (0-based) of `steps`.

    A linear warmup, then: `cosine` and `linear` fall to `min_lr_ratio` over the rest; `wsd`
    (warmup, stable, decay; Hu et al. 2024, arXiv:2404.06395) holds the peak and falls linearly over
    the last `decay_fraction` of all steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, steps - round(config.decay_fraction * steps))
    left = 1.0 - min(1.0, max(0, step - start) / max(1, steps - start))
    if config.schedule == "cosine":
        return low + (1.0 - low) * 0.5 * (1.0 - math.cos(math.pi * left))
    if config.schedule in ("linear", "wsd"):
        return low + (1.0 - low) * left
    return 1.0
