"""The types, the sums, the keys, the loop and what is written down: everything that knows no algorithm by name."""
