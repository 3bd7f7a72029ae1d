"""Command line interface. Only this package imports click and rich."""
