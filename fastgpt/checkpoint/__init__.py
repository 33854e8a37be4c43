"""Checkpoints: written atomically, and verified when loaded."""
