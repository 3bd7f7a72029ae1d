"""Estimators of scikit-learn: fit, predict and score, under one budget for all fits."""
