"""Evaluation: measurements after a round, and numbers that sum up curves of them."""

from fedtide.core.base import Scores
from fedtide.evaluate.metrics import AUC, AUC_BOUND, MACRO_F1, METRICS, Metric

__all__ = ["AUC", "AUC_BOUND", "MACRO_F1", "METRICS", "Metric", "Scores"]
