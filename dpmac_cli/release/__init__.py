"""Outputs of a run: published model, report, card, predictions, scores, audit."""
