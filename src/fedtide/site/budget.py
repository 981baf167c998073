"""What clients of a node have said in a private study, by the node's own account.

The server is trusted to add noise, and a node sees nothing of that. What it can do is to count by itself: in which
rounds its clients were, whether these are as far apart and as few as its ticket says, and what they come to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtide.config import Experiment
from fedtide.core.atomic import flush
from fedtide.core.base import Algorithm
from fedtide.core.errors import FedtideError
from fedtide.runs.private import ledger_with, plan_without_sampling
from fedtide.wire.clip import SLACK, WHOLE, Clip, check_private, clip_of
from fedtide.wire.ledger import Ledger, Line, read
from fedtide.wire.pipeline import Wire

OWN = "privacy"
"""Folder in a node's folder with a ledger for each of its clients."""

MASKED = 10_000
"""Answers under masks of which a node knows the question: the oldest cannot be opened any more."""

OTHER = "it answered this before, of another model, or asked in another way"

SAME = "question", "purpose", "reveal"
"""What a question that comes once more has in common with the one before, beside its model and the client's memory."""

Place = tuple[int, int, int | None]
"""Round, number of the question in it, slot."""


def ledger_for(experiment: Experiment, algorithm: Algorithm, path: Path | None = None) -> Ledger | None:
    """Return the ledger of a study with real clients, the same at its server and at its nodes; None without privacy.

    Raises:
        FedtideError: the method shows what noise would not cover, whatever its site or ticket says.
    """
    privacy = None if experiment.wire is None else experiment.wire.privacy
    if privacy is None:
        return None
    check_private(privacy.step, algorithm, False, f"method '{experiment.method[0].name}'")
    return ledger_with(privacy, plan_without_sampling(privacy, experiment.rounds, len(algorithm.works)), path)


@dataclass
class Budget:
    """What a node's clients have said in one study, by the node's own account: a ledger for each of them.

    A question to several of its clients is refused for all of them where one may not answer it.

    Args:
        study: ledger of the study without lines: its plan and noise, as the ticket says.
        clip: how answers are cut by the ticket.
        folder: of the ledgers.
    """

    study: Ledger
    clip: Clip
    folder: Path
    _ledgers: dict[int, Ledger] = field(default_factory=dict, init=False, repr=False)
    _asked: dict[tuple[int, Place, str], Line] = field(default_factory=dict, init=False, repr=False)

    def ledger(self, client: int) -> Ledger:
        """Return the ledger of a client."""
        if client not in self._ledgers:
            study = self.study
            self._ledgers[client] = Ledger(study.plan, study.z, study.delta, self._file(client))
        return self._ledgers[client]

    def refuses(self, header: Mapping[str, Any], model: str, most: float | None) -> str | None:
        """Return the reason why clients do not answer a question; where they do, it is written down before.

        What is masked says nothing until its sum is opened, and is written down then.

        Args:
            header: what is asked.
            model: digest of what came with it.
            most: epsilon that the owner allows.
        """
        number, ask = header["version"]
        if number != header["moment"]["round"]:
            return f"it is asked in round {header['moment']['round']} what leaves behind memory of round {number}"
        if why := self._objection_to_bounds(header, number):
            return why
        slots, mask, lines = header.get("slot"), header.get("mask"), []
        for client in header["clients"]:
            place = number, ask, None if slots is None else slots[str(client)]
            key = client, place, "" if mask is None else str(mask["attempt"])
            if header["kind"] == "unmask":
                if key not in self._asked:
                    return "it has not answered what is to be opened"
                lines.append(self._asked[key])
                continue
            line = self._line(header, client, place, model)
            if why := self._objection(line, client, most):
                return why
            if mask is None:
                lines.append(line)
            elif self._asked.setdefault(key, line) != line:
                return OTHER
        while len(self._asked) > MASKED:
            self._asked.pop(next(iter(self._asked)))
        for line in lines:
            (client,) = line.clients
            if why := self._objection(line, client, most):
                return why
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700, parents=True)
                flush(self.folder.parent)
            self.ledger(client).add(line)
        return None

    def _line(self, header: Mapping[str, Any], client: int, place: Place, model: str) -> Line:
        number, ask, slot = place
        counted = header.get("counted", {}).get(str(client))
        bounds = _bounds(header, "0" if slot is None else str(slot))
        same = json.dumps([model, *(header.get(key) for key in SAME), counted, *([bounds] if bounds else [])])
        return Line(
            round=number,
            ask=ask,
            question=header["question"],
            slot=slot,
            z=self.study.z,
            bounds={},
            clients=(client,),
            epsilon=0.0,
            sha256=hashlib.sha256(same.encode()).hexdigest(),
        )

    def _objection_to_bounds(self, header: Mapping[str, Any], number: int) -> str | None:
        """Return why a question cannot say the bounds that it says: by the ticket they have not come so far."""
        for slot in header.get("forms") or ():
            for name, bound in _bounds(header, slot).items():
                most = self.clip.reached(name, number) if name in self.clip.adaptive else 0.0
                if bound > most * (1 + SLACK):
                    return f"it says a bound of {bound:g} for '{name}'; allowed: {most:.3g} at most, in round {number}"
        return None

    def _objection(self, line: Line, client: int, most: float | None) -> str | None:
        ledger, plan = self.ledger(client), self.study.plan
        known = [each for each in ledger.of(line.round) if each.place == line.place]
        if known:
            return None if known[0].sha256 == line.sha256 else OTHER
        then = ledger.epsilon(client, more=1)
        if most is not None and then > most:
            return f"its owner allows epsilon {most:g}, and with this answer it would be {then:.3g}"
        try:
            Ledger(plan, ledger.z, ledger.delta, lines=ledger.lines).add(line)
        except FedtideError:
            rounds = ", ".join(map(str, ledger.rounds(client)[-3:])) or "none"
            return (
                f"its own ledger has no room for round {line.round}: it was in {rounds}; allowed: each question once, "
                f"in {plan.times} of {plan.rounds} rounds, {plan.distance} apart"
            )
        return None

    def _file(self, client: int) -> Path:
        return self.folder / f"{client}.jsonl"


def _bounds(header: Mapping[str, Any], slot: str) -> dict[str, float]:
    """Return the bounds that a question says for a slot, of leaves whose bound adapts."""
    form = (header.get("forms") or {}).get(slot, {"leaves": []})
    return {leaf["name"] or WHOLE: leaf["bound"] for leaf in form["leaves"] if leaf.get("bound") is not None}


def in_words(
    study: Ledger | None, wire: Wire | None, clients: tuple[int, ...], folder: Path, most: float | None
) -> Iterator[str]:
    """Say what a study costs and has cost a node's clients, in lines for people.

    Args:
        study: ledger of the study without lines; None where its sums are not private.
        wire: how answers leave the node.
        clients: of the node.
        folder: of the node's own ledgers.
        most: epsilon that the owner allows.
    """
    if study is None:
        if most is not None:
            yield f"will be refused: every question but score, as its owner allows epsilon {most:g}, without noise"
        return
    plan, z, delta = study.plan, study.z, study.delta
    apart = f", {plan.distance} rounds apart" if plan.distance > 1 else ""
    yield (
        f"privacy: all {plan.rounds} rounds may come to epsilon {plan.epsilon(z, delta):.3g} (delta {delta:g}) for a "
        f"client, which answers in {plan.times} of them at most{apart}"
    )
    if (clip := clip_of(wire)) is not None:
        yield f"privacy: answers are cut here to {', '.join(_cut(clip, name, plan.rounds) for name in clip.bounds)}"
    yield f"privacy: the server adds noise to sums (multiplier {z:.3g}), which is its word; score has none"
    for client in clients:
        own = Ledger(plan, z, delta, lines=read(folder / f"{client}.jsonl"))
        yield f"privacy: client {client}, by this node's own ledger: {so_far(own, client)}"
    if most is not None and plan.epsilon(z, delta) > most:
        answers = plan.times * plan.releases
        enough = next(k for k in range(answers + 1) if k == answers or study.epsilon(more=k + 1) > most)
        yield f"will be refused: all answers of a client after {enough}, as its owner allows epsilon {most:g}"


def _cut(clip: Clip, name: str, rounds: int) -> str:
    """Say to what length a value is cut."""
    first, last = clip.cut(name, 0), clip.cut(name, rounds - 1)
    return f"{name} {first:g}" + (f", which adapts and comes to {last:.3g} at most" if last > first else "")


def so_far(ledger: Ledger, client: int) -> str:
    """Say in words what a client has spent."""
    rounds = ledger.rounds(client)
    if not rounds:
        return "epsilon 0 so far, in no round"
    times = f"{len(rounds)} {'round' if len(rounds) == 1 else 'rounds'}"
    return f"epsilon {ledger.epsilon(client):.3g} so far, in {times}, last in round {rounds[-1]}"
