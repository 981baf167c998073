"""Tracking: what records say, in TensorBoard, MLflow or Weights & Biases."""
