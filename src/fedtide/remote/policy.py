"""A node's own policy: rules that its owner sets, whatever the study asks.

    reveals = []                     # no extra values of a client by itself
    questions = ["train", "score"]   # the works that are done here; "score" judges what was sent on rows, exactly
    fewest = 3                       # clients that are asked the same question, and so are in its sum
    rows_at_least = 20               # rows that a client needs to be judged on them
    secure = true                    # only masked sums, which the server cannot open for a single client
    peers = ["SHA256:..."]           # fingerprints of the other nodes' keys, from their owners
    epsilon = 4.0                    # limit for a client's answers in a private study, by the node's own ledger
    clip = { delta = 0.5 }           # bounds of a private study are no larger here, whatever it says
    tells = ["load", "memory"]       # facts of this machine that come with answers; "log" adds lines of the log

A missing rule forbids nothing, and without `tells` nothing is told of the machine. The number of clients in a sum is
the server's word: if answers are not masked, it could look at each of them. If they are masked, it is the word of the
keys that masks are shared with.

Some rules hold without a file, because no study needs more. A client is judged on test and validation rows alone, with
few models in a round. The server receives its mean loss to three digits. With `epsilon` no answer to "score" leaves the
node unless `questions` names it, because it has no noise. If a study is private or sums scores no exact answer leaves
the node at all, and "score" stands for the sum.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.fields.types import Count, Flag, Positive, Strict, spelled
from fedtide.wire.scores import SCORE, is_score

COLUMNS = ("choice", "weights", "density")
"""Columns of an evaluation that a policy can hide, beside `others` by their names."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
Fingerprint = Annotated[str, spelled("SHA256:[A-Za-z0-9+/]{43}", "a fingerprint as fedtide join prints it, SHA256:...")]


class Unreadable(FedtideError):
    """The owner's rules cannot be read: nothing is answered meanwhile."""

    def __init__(self) -> None:
        super().__init__("its owner's rules cannot be read now")


class Policy(Strict):
    """The rules of a node.

    Args:
        reveals: names of values that the server may see client by client; None allows what the study asks.
        questions: names of the works that are done here; None allows what the study asks. With `epsilon`, "score" has
            to be named.
        fewest: minimum number of clients in a sum.
        rows_at_least: minimum number of rows of a part for a client to be judged on it.
        secure: whether sums must be masked.
        peers: fingerprints of the keys of nodes that masks may be shared with. None takes the first key that comes with
            a node's name, and no other one after it.
        epsilon: limit for all answers of a client, at the delta of the study; None allows what it plans.
        clip: by name of a summed value, the largest bound to which answers are cut.
        tells: facts of this machine that the server is told with answers.
    """

    reveals: tuple[Name, ...] | None = None
    questions: tuple[Name, ...] | None = None
    fewest: Count = 1
    rows_at_least: Count = 1
    secure: Flag = False
    peers: tuple[Fingerprint, ...] | None = None
    epsilon: Positive | None = None
    clip: dict[Name, Positive] = Field(default_factory=dict)
    tells: tuple[Literal["load", "memory", "log"], ...] = ()

    def refuses(self, header: Mapping[str, Any]) -> str | None:
        """Return the reason why the owner does not allow a question, by its header; None if it is allowed.

        >>> Policy(reveals=(), fewest=3).refuses({"kind": "ask", "question": "train", "reveal": ["utility"]})
        "its owner does not reveal 'utility'; allowed: nothing"
        """
        question = SCORE if header.get("kind") == SCORE or is_score(header["question"]) else header["question"]
        return self.objection(question, header.get("reveal", ()), header.get("members", 0))

    def objection(self, question: str, reveal: Any, members: int | None = None) -> str | None:
        """Return the reason why a question is not allowed.

        Args:
            question: its name.
            reveal: names of the values that it shows to the server.
            members: number of clients in the sum; None if it is not known yet.
        """
        if self.questions is not None and question not in self.questions:
            return f"its owner does not allow the question '{question}'; allowed: {_listed(self.questions)}"
        hidden = [name for name in reveal if not self.shows(name)]
        if hidden:
            return f"its owner does not reveal '{hidden[0]}'; allowed: {_listed(self.reveals or ())}"
        if members is not None and members < self.fewest:
            return f"its owner does not answer for a sum of {members}; allowed: {self.fewest} clients or more"
        return None

    def withholds_score(self, private: bool) -> str | None:
        """Return the reason why no answer to an evaluation leaves the node; None if it does.

        Args:
            private: whether the study is private.

        >>> Policy(epsilon=4.0).withholds_score(False)
        "its owner limits epsilon, and the owner's `questions` do not name 'score', which has no noise"
        >>> Policy(epsilon=4.0, questions=("train", "score")).withholds_score(True)
        'its study is private, and an exact score has no noise'
        """
        if private:
            return "its study is private, and an exact score has no noise"
        if self.epsilon is None or SCORE in (self.questions or ()):
            return None
        return f"its owner limits epsilon, and the owner's `questions` do not name '{SCORE}', which has no noise"

    def shows(self, name: str) -> bool:
        """Tell whether the server may see a value of a client by itself."""
        return self.reveals is None or name in self.reveals

    def shown(self, scores: Scores) -> Scores:
        """Return the scores that the server receives: losses to three digits, and no columns that are hidden.

        >>> one = torch.ones(1)
        >>> scores = Policy(reveals=()).shown(Scores(one, 8 * one, 4 * one, 3.14159 * one, density=one))
        >>> scores.loss.tolist(), scores.density
        ([3.144], None)
        """
        pairs = zip(scores.loss.tolist(), scores.rows.tolist(), strict=True)
        coarse = torch.tensor([float(f"{loss / max(rows, 1):.3g}") * rows for loss, rows in pairs], dtype=torch.float64)
        others = {name: column for name, column in scores.others.items() if self.shows(name)}
        hidden: dict[str, Any] = {name: None for name in COLUMNS if not self.shows(name)}
        return replace(scores, loss=coarse, others=others, **hidden)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
