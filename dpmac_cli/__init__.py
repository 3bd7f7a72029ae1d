"""dpmac: train image classifiers under differential privacy, and price that privacy."""

__version__ = "0.1.0"
