"""Bounds of messages that strangers write, also for a process that loads no torch."""

HEADER = 2**20
"""Bytes that the header of a question or an answer may have as JSON."""
DEEPEST = 32
"""How deep a tree, or the head of a message, may be nested."""
