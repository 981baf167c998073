"""Types of configuration values, their checks and error lines, and code that a configuration names."""
