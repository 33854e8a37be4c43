"""Benchmarks of ops, training steps and runs beside other software; see docs/benchmarks.md."""

import fastgpt  # noqa: F401 - it stops a command whose Python has no torch
