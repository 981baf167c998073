"""Evaluation: measurements after a round, and numbers that sum up curves of them."""

from fedtide.core.types import Scores
from fedtide.evaluate.metrics import METRICS, Metric

__all__ = ["METRICS", "Metric", "Scores"]
