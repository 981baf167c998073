"""What happens to sums between clients and server: vectors of declared form, steps on them, fixed point, masks."""
