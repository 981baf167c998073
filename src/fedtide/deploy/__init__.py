"""Real clients: a site with its roster and tickets, what a node needs, and the server's and the nodes' processes.

Nothing here is imported by a simulation. `cryptography` and `grpcio`, of the extra `deploy`, are imported late.
"""
