"""Settings and the resolved plan of a run. Never imports torch."""
