"""Chooses the block sizes of attention's kernels: `python -m bench.tune`."""
