"""Files, checksums and folders. Independent of runs."""
