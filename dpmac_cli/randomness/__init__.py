"""Secret random draws: key stream, Gaussian noise, batch samplers, layers."""
