"""Evaluation of a model: validation loss, samples, tasks and bits per byte."""
