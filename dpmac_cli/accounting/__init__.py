"""Privacy accounting: events on records and their privacy cost. Never imports torch."""
