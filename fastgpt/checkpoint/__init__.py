"""Checkpoints: written atomically, whole or in parts, and verified when loaded."""
