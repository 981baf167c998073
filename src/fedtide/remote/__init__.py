"""The protocol to real clients: their fleet, nodes, messages and questions, over any carrier."""
