"""Local training on one client (trainers, losses, gradient terms) and server optimizers."""
