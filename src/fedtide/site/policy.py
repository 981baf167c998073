"""A node's own rules: what its owner forbids, whatever the study asks.

    reveals = []                     # no extra values of a client by itself
    questions = ["train", "score"]   # the works that are done here; "score" judges what was sent on the rows here
    fewest = 3                       # clients that are asked the same question, and so are in its sum
    rows_at_least = 20               # rows that a client needs to be judged on them
    secure = true                    # only masked sums, which the server can open together alone
    peers = ["SHA256:..."]           # fingerprints of the other nodes' keys, as their owners tell them
    epsilon = 4.0                    # what a client's answers may come to in a private study, by the node's own ledger
    clip = { delta = 0.5 }           # bounds of a private study are no larger here, whatever it says

A rule that the file does not have forbids nothing. How many clients are in a sum is the server's word: where answers
are not masked it could look at each of them. Where they are, it is the word of the keys that masks are shared with.

Some things hold without a file, as no study needs more: a client is judged on test and validation rows alone, with few
models in a round, and the server is told its mean loss to three digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError, shown
from fedtide.fields.types import Count, Flag, Positive, Strict, checked
from fedtide.site.budget import Budget
from fedtide.site.files import read_toml
from fedtide.wire.clip import within
from fedtide.wire.pipeline import Wire

SCORE = "score"
"""Name of the question that judges what was sent on the clients' own rows."""

LARGEST = 64 * 1024
"""Bytes that a file of rules may have."""

COLUMNS = ("choice", "weights", "density")
"""What a server is told of an evaluation beside rows, hits and loss, where rules let it; `others` by their names."""

MODELS = 3
"""Models with which a client is judged in a round on the same rows: one, and others where the round is played again."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]


def _fingerprint(value: str) -> str:
    if not re.fullmatch("SHA256:[A-Za-z0-9+/]{43}", value):
        raise ValueError(f"found {shown(value)}, allowed: a fingerprint as fedtide join prints it, SHA256:...")
    return value


Print = Annotated[str, AfterValidator(_fingerprint)]


class Policy(Strict):
    """The rules of a node.

    Args:
        reveals: names of what the server may be shown client by client; None allows what the study asks.
        questions: names of the works that are done here; None allows what the study asks.
        fewest: how many clients there must be in a sum.
        rows_at_least: how many rows of a part a client must have to be judged on it.
        secure: whether sums must be masked.
        peers: fingerprints of the keys of nodes that masks may be shared with; None takes the first key that comes with
            a node's name, and no other one after it.
        epsilon: what all answers of a client may come to, at the delta of the study; None allows what it plans.
        clip: by name of a summed value, the largest bound to which answers are cut.
    """

    reveals: tuple[Name, ...] | None = None
    questions: tuple[Name, ...] | None = None
    fewest: Count = 1
    rows_at_least: Count = 1
    secure: Flag = False
    peers: tuple[Print, ...] | None = None
    epsilon: Positive | None = None
    clip: dict[Name, Positive] = Field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Policy:
        """Read the rules from a TOML file.

        Raises:
            FedtideError: it cannot be read, or has something that is no rule.
        """
        return checked(Policy, read_toml(path, LARGEST), str(path))

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
            members: how many clients are in the sum; None where that is not known yet.
        """
        if self.questions is not None and question not in self.questions:
            return f"its owner does not allow the question '{question}'; allowed: {_listed(self.questions)}"
        hidden = [name for name in reveal if self.reveals is not None and name not in self.reveals]
        if hidden:
            return f"its owner does not reveal '{hidden[0]}'; allowed: {_listed(self.reveals or ())}"
        if members is not None and members < self.fewest:
            return f"its owner does not answer for a sum of {members}; allowed: {self.fewest} clients or more"
        return None

    def shows(self, name: str) -> bool:
        """Tell whether the server may be shown a value of a client by itself."""
        return self.reveals is None or name in self.reveals

    def shown(self, scores: Scores) -> Scores:
        """Return what the server is told of an evaluation: losses to three digits, and no more than may be shown.

        >>> one = torch.ones(1)
        >>> told = Policy(reveals=()).shown(Scores(one, 8 * one, 4 * one, 3.14159 * one, density=one))
        >>> told.loss.tolist(), told.density
        ([3.144], None)
        """
        pairs = zip(scores.loss.tolist(), scores.rows.tolist(), strict=True)
        coarse = torch.tensor([float(f"{loss / max(rows, 1):.3g}") * rows for loss, rows in pairs], dtype=torch.float64)
        others = {name: column for name, column in scores.others.items() if self.shows(name)}
        hidden: dict[str, Any] = {name: None for name in COLUMNS if not self.shows(name)}
        return replace(scores, loss=coarse, others=others, **hidden)


@dataclass(frozen=True)
class Owner:
    """What the owner of a node allows now, and how often its clients were judged.

    Args:
        file: its rules, which may be edited while the node runs; None where there are none.
        record: file with a line for each model that a client was judged with.
        rounds: of the study.
        log: is told what is wrong with the file.
        budget: what its clients have said, where the study is private.
    """

    file: Path | None
    record: Path
    rounds: int
    log: Callable[[str], None] = print
    budget: Budget | None = None

    @property
    def policy(self) -> Policy:
        """The rules as they are now."""
        return Policy() if self.file is None else Policy.read(self.file)

    @property
    def fewest(self) -> int:
        """How many clients there must be in a sum."""
        return self.policy.fewest

    @property
    def rows_at_least(self) -> int:
        """How many rows of a part a client must have to be judged on it."""
        return self.policy.rows_at_least

    @property
    def secure(self) -> bool:
        """Whether sums must be masked."""
        return self.policy.secure

    def shown(self, scores: Scores) -> Scores:
        """Return what the server is told of an evaluation."""
        return self.policy.shown(scores)

    def within(self, wire: Wire) -> Wire:
        """Return the wire with bounds that are no larger than the owner's."""
        return within(wire, self.policy.clip)

    def refuses(self, header: Mapping[str, Any], model: str) -> str | None:
        """Return the reason why a question is not allowed, by its header and the digest of what came with it."""
        try:
            policy = self.policy
            why = policy.refuses(header)
        except FedtideError as error:
            self.log(str(error))
            return "its owner's rules cannot be read now"
        if why is None and header["kind"] == SCORE:
            return self._too_often(header, model)
        if why is None and header["kind"] in ("ask", "unmask"):
            return self._too_much(header, model, policy.epsilon)
        return why

    def _too_much(self, header: Mapping[str, Any], model: str, most: float | None) -> str | None:
        """Return the reason why clients would say too much; where they do not, what they say is written down."""
        if self.budget is None:
            return None if most is None else f"its owner allows epsilon {most:g}, and its study adds no noise"
        try:
            return self.budget.refuses(header, model, most)
        except FedtideError as error:
            self.log(str(error))
            return "its own ledger cannot be read now"

    def _too_often(self, header: Mapping[str, Any], model: str) -> str | None:
        """Return the reason why clients are not judged with a model; where they are, note it."""
        part, number, other = header.get("part", "test"), header["moment"]["round"], header.get("other", "")
        if part == "train" or not header.get("personal", True):
            return "it is judged on test and validation rows alone, with what it keeps"
        if not 0 <= number < self.rounds:
            return f"it is judged in rounds 0 to {self.rounds - 1}, and this is round {number}"
        new = []
        for client in header["clients"]:
            models = self._judged.setdefault((client, number, part, other), set())
            if model not in models:
                if len(models) >= MODELS:
                    return f"it was judged with {MODELS} models in round {number}, and with no more"
                new.append((client, number, part, other, model))
        if new:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            with open(self.record, "a", encoding="utf-8") as file:
                file.writelines("\n" + json.dumps(line) for line in new)  # after what a kill may have left half
        for *key, _ in new:
            self._judged[tuple(key)].add(model)
        return None

    @cached_property
    def _judged(self) -> dict[Any, set[str]]:
        """Digests of the models that each client was judged with, by round, part and use."""
        found: dict[Any, set[str]] = {}
        for line in self.record.read_text(encoding="utf-8").splitlines() if self.record.is_file() else []:
            with suppress(TypeError, ValueError):
                *key, model = json.loads(line)
                found.setdefault(tuple(key), set()).add(model)
        return found


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
