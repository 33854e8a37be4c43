"""Serving of a model to programs and browsers; needs the extra `serve`."""
