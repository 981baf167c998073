"""Carry questions to the nodes where clients live, and bring back what they answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Question:
    """What one node is asked.

    Attributes:
        id: A name that no other question of the run has, "round.ask.try.node".
        node: The node's name in the roster.
        header: What is asked and of which of the node's clients, as plain JSON.
        payload: A sealed tree, the same object for all nodes that get it.
        expires: Seconds from now within which an answer counts.
        largest: Bytes that the payload of an answer may have.
    """

    id: str
    node: str
    header: Mapping[str, Any]
    payload: bytes
    expires: float
    largest: int


@dataclass(frozen=True)
class Response:
    """What one node answered, or why it did not.

    Attributes:
        id: The question's name.
        node: The node's name in the roster.
        header: What became of each client, as plain JSON; empty with an error.
        payload: A sealed tree of what the clients answered; empty with an error.
        seconds: From the push to the arrival.
        error: One sentence of the carrier: the node died, was late, cannot be reached.
    """

    id: str
    node: str
    header: Mapping[str, Any]
    payload: bytes
    seconds: float
    error: str = ""


class Carrier(Protocol):
    """A way to nodes. What is pushed is answered once at most, and nothing of it ever blocks."""

    def present(self) -> frozenset[str]:
        """Return the names of the nodes that can be asked now."""
        ...

    def removed(self) -> frozenset[str]:
        """Return the names of nodes of which no answer counts from now on, since the last call."""
        ...

    def push(self, questions: Sequence[Question]) -> None:
        """Send questions on their way."""
        ...

    def drop(self, questions: Sequence[str]) -> None:
        """Wait for answers to some questions, by their names, no longer."""
        ...

    def pull(self) -> list[Response]:
        """Return what came since the last pull."""
        ...
