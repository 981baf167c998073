"""Ingredients used by many algorithms."""
