"""Ranks: collectives, signals and failures, and how a model is shared out among them."""
