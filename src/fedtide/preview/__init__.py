"""Preview: who holds what, who is there when and how the mix moves, before anything is run."""
