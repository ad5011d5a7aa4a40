"""How gradients are packed for an all-reduce: by pd-train, and by pd-profile to measure it."""

BUCKET_BYTES = 4 * 2**20
"""A sum of more bytes is several sums of about so many, all of them under way at once."""
