"""Federated learning when the data will not hold still."""

__version__ = "0.1.0"
