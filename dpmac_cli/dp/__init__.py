"""The algorithm: geometry, per-sample clipping, mechanism, update rules."""
