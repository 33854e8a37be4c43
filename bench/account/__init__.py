"""Account of a training step on GPUs that need not be there."""
