"""DP optimizers: clipping geometries, per-sample clipping, Gaussian mechanism, update rules.

Algorithm 1 of the DP-MacAdam paper (arXiv 2606.05435), line by line:

| lines | of step t | where |
|---|---|---|
| 1 | m, v, s and b before step 1 | ``moments.Moments.before``, ``geometry.Geometry.start`` |
| 3 | draw the batch | :class:`dpmac_cli.randomness.sampling.KeyedSampler` |
| 5 | gradient g of each record | :class:`dpmac_cli.dp.clipping.per_sample.PerSample` |
| 6, 7 | centre, scale and clip it | :class:`dpmac_cli.dp.clipping.clipped_sum.ClippedChunkSum` |
| 9 to 11 | noise, and the private mean g~ | :class:`dpmac_cli.dp.mechanism.GaussianMechanism` |
| 12 to 15 | moments, and the step of theta | :func:`dpmac_cli.optim.dp_adam.adam` |
| 16 to 20 | centre m-hat and scale b of step t + 1 | ``geometry.MacAdamEllipsoid.next`` |

:meth:`dpmac_cli.training.step.Step.step` puts them together. Lines 3 to 8 see records. What follows
sees g~ alone, so it has no privacy cost.
"""
