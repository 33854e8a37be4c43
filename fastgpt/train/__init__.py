"""Training: the loop, the step, optimizers, logs, and checks of the numbers."""
