"""Clients in clusters: rounds of several models, distances, clusterers, representations, and their drift."""
