"""Training: the plan of a run, its parts, the loop, optimizers, and what a run writes."""
