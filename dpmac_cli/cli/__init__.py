"""What a person types and sees. Only this package imports typer and rich."""
