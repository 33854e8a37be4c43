"""Data preparation and loading: text is tokenized, stored as shards, and read in batches."""
