"""Secret randomness: key stream, Gaussian noise, batch samplers, layers."""
