"""Report of runs as one HTML page: curves, samples, settings."""
