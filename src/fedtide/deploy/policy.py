"""A node's own rules: what its owner forbids, whatever the study asks.

    reveals = []                     # nothing is shown to the server client by client, only sums
    questions = ["train", "score"]   # the works that are done here; "score" judges what was sent on the rows here
    fewest = 3                       # clients that are asked the same question, and so are in its sum

A rule that the file does not have forbids nothing. How many clients are in a sum is the server's word: as long as
answers are not masked it could look at each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fedtide.core.config_types import Count
from fedtide.core.errors import FedtideError
from fedtide.core.explain import explained
from fedtide.core.strict import Strict
from fedtide.deploy.files import read_toml

SCORE = "score"
"""Name of the question that judges what was sent on the clients' own rows."""

LARGEST = 64 * 1024
"""Bytes that a file of rules may have."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]


class Policy(Strict):
    """The rules of a node.

    Args:
        reveals: names of what the server may be shown client by client; None allows what the study asks.
        questions: names of the works that are done here; None allows what the study asks.
        fewest: how many clients there must be in a sum.
    """

    reveals: tuple[Name, ...] | None = None
    questions: tuple[Name, ...] | None = None
    fewest: Count = 1

    @staticmethod
    def read(path: Path) -> Policy:
        """Read the rules from a TOML file.

        Raises:
            FedtideError: it cannot be read, or has something that is no rule.
        """
        values = read_toml(path, LARGEST)
        try:
            return Policy.model_validate(values)
        except ValidationError as error:
            raise FedtideError(f"{path}: {explained(error, Policy, values)}") from None

    def refuses(self, header: Mapping[str, Any]) -> str | None:
        """Say why the owner does not allow a question, by its header; None where it is allowed.

        >>> Policy(reveals=(), fewest=3).refuses({"kind": "ask", "question": "train", "reveal": ["utility"]})
        "its owner does not reveal 'utility'; allowed: nothing"
        """
        question = SCORE if header.get("kind") == SCORE else header["question"]
        return self.objection(question, header.get("reveal", ()), header.get("members", 0))

    def objection(self, question: str, reveal: Any, members: int | None = None) -> str | None:
        """Say why a question is not allowed.

        Args:
            question: its name.
            reveal: names of what it shows to the server.
            members: how many clients are in the sum; None where nobody knows yet.
        """
        if self.questions is not None and question not in self.questions:
            return f"its owner does not allow the question '{question}'; allowed: {_listed(self.questions)}"
        hidden = [name for name in reveal if self.reveals is not None and name not in self.reveals]
        if hidden:
            return f"its owner does not reveal '{hidden[0]}'; allowed: {_listed(self.reveals or ())}"
        if members is not None and members < self.fewest:
            return f"its owner does not answer for a sum of {members}; allowed: {self.fewest} clients or more"
        return None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
