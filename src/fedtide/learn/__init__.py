"""What one client does with a model: local solvers, losses, gradient terms; and what a server does with an update."""
