"""Ingredients used by many algorithms: who is asked, which model, which prior, which cluster."""
