"""Real clients: sites with roster and tickets, the server, the nodes, and a study as an app for Flower.

No simulation imports anything here. `cryptography` and `grpcio`, of the extra `deploy`, are imported late.
"""
