"""Measures ops, training steps and whole processes beside their peers; see docs/benchmarks.md."""

import fastgpt  # noqa: F401 - it stops a command whose Python has no torch
