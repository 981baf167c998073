"""Flower as the carrier between a server and its nodes.

`server_app` and `client_app` alone import Flower. They are programs that Flower starts, and know nothing of Fedtide.
"""
