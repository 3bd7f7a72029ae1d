"""Sums of clipped per-sample gradients of a network, computed chunk by chunk.

Files, from the network to the sum:

- ``layers``: slices of theta by module.
- ``per_sample``, ``by_vmap``, ``layer_calls``, ``one_sample``: inputs and output gradients of each
  layer for each sample, or its gradients.
- ``layer_rules``, ``unfold``, ``recurrent``, ``recurrence``, ``computed_weights``: rules by type of
  layer.
- ``layer_gradients``, ``ghost_clipping``, ``outer_products``, ``looked_up``, ``tied_products``: the
  forms in which gradients are held, with norms and weighted sums.
- ``norms``, ``clipped_sum``: whitened norms with bounds on their rounding, and the clipped sum.
- ``batch_invariance``, ``order_of_sums``, ``matmul``: rows that are not rounded by other rows.
"""
