"""Command line interface. Only this package imports typer and rich."""
