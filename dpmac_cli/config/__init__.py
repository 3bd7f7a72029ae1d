"""Settings as given and the plan as resolved. Never imports torch."""
