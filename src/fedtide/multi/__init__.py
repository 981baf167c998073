"""How several models are trained: clusters, branches and mixtures, and what clients make of them for themselves."""
