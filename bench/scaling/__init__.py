"""Account of training on many GPUs: bytes that are exchanged, memory and time."""
