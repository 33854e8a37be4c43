"""Faults of a job: if a rank fails or stalls, or torchrun dies, all ranks end in seconds."""
