"""The path of sums from clients to the server: vectors of a declared form, steps, masks, noise and its ledger."""
