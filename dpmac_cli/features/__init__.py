"""Features of records: prepared before training by public networks and functions."""
