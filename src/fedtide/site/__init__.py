"""A deployment: its roster, tickets, policies, and what serves and joins it."""
