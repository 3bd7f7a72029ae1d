"""Per-sample gradient norms and sums of clipped gradients, layer by layer."""
