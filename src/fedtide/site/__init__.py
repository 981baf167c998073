"""A deployment: a site with its roster and tickets, the server and the nodes, and a study as an app for Flower.

Nothing here is imported by a simulation. `cryptography` and `grpcio`, of the extra `deploy`, are imported late.
"""
