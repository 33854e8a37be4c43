"""Text from a model: samples and conversations."""
