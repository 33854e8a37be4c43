"""Report of runs as one HTML page: curves, samples, a text coloured by the loss of its tokens."""
