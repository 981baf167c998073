"""Where rows come from, which client holds which, and how that changes with time."""
