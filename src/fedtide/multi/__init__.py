"""Training of several models (clusters, branches, mixtures), and their personalization by clients."""
