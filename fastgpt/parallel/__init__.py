"""Ranks: collectives, signals, and how a model is shared out among them."""
