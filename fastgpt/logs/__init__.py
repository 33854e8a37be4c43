"""Logs of a run: metrics.jsonl, samples.txt and loss.png, and trackers, which read these."""
