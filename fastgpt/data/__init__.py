"""From text to batches."""
