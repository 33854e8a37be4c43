"""Timed trials that choose the implementation of each op."""
