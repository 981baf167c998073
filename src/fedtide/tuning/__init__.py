"""Tuning: search of method hyperparameters by accuracy on validation rows."""
