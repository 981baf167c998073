"""Messages over gRPC: nodes call the server and keep one stream open; questions go down it, answers come up it.

Nothing here imports torch but the server's end: a node's process that waits for questions is small. `grpcio` and
`cryptography` come with the extra `deploy` and are imported late.
"""
