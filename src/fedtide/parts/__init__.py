"""Ingredients shared by several algorithms."""
