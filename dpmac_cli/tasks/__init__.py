"""Prediction tasks: outputs, targets, losses, metrics and covered scores."""
