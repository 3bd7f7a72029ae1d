"""What training does to its records and what that costs. Never imports torch."""
