"""Private training across silos, with Flower."""
