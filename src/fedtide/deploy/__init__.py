"""Real clients: a site with its roster and tickets, what a node needs, and the server's and the nodes' processes.

Nothing here is imported by a simulation. `cryptography` and `flwr` come with the extra `deploy` and are imported late.
"""
