"""What is predicted for a record: outputs, targets, losses, metrics and covered scores."""
