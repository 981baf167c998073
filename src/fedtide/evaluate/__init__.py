"""Judging: what is measured after a round, and what a curve of such measurements says."""
