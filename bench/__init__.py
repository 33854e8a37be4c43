"""Measures ops, training steps and whole processes beside their peers; see docs/benchmarks.md."""
