"""Measures training beside its peers; raw records go to `bench/results/`."""
