"""Running experiments: from a configuration to run folders."""
