"""Tuning: searching values of methods by their accuracy on validation rows."""
