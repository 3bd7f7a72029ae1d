"""What leaves a run: published model, report, card, predictions, scores, audit."""
