"""Model in, measured graph out: `pd-profile`."""
