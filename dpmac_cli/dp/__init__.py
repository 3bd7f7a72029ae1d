"""DP optimizers: clipping geometries, per-sample clipping, Gaussian mechanism, update rules."""
