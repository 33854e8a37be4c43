"""Directory of a run: its files, lock and manifest."""
