"""Logs of a run: metrics.jsonl, TensorBoard events and loss.png, written in their own thread."""
