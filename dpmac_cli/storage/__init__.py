"""Files, checksums and folders. Knows nothing of runs."""
