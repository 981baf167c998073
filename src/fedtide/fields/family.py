"""The families of methods; a file of its own, because the command line names them before anything heavy is imported."""

from typing import Literal

Family = Literal["global", "server-optimizer", "branches", "mixture", "clustered", "baseline"]
"""What a method trains: one model, one model with another step of the server, a network with a branch for each mode,
components that clients are mixtures of, a model for each cluster of clients, or as a baseline without a federation."""
