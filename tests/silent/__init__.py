"""Situations in which a trainer can be silently wrong, and a judge of each of its steps."""
