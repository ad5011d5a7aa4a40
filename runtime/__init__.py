"""Plan in, trained model out: `pd-train`."""
