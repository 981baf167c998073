"""Evaluation: measurements after a round, and numbers that sum up curves of them."""
