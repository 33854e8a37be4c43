"""Comparison of two runs: what they recorded, and the first tensor in which their steps differ."""
