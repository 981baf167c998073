"""Accounts of privacy in a study of real clients: the server's, and the one that each node keeps by itself.

The server is trusted to add noise, of which a node sees nothing. A node counts by itself in which rounds its clients
were. These have to be as few and as far from each other as its ticket says. From them follows the epsilon so far.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtide.cohorts import Poisson
from fedtide.config import Experiment
from fedtide.core.atomic import flush
from fedtide.core.base import Algorithm
from fedtide.core.errors import refused
from fedtide.core.record import LEDGER
from fedtide.draw.prose import counted
from fedtide.fleets.engines import Host
from fedtide.remote.policy import SCORE, Policy
from fedtide.runs.privacy import ledger_with, plan_without_sampling, warn_of_blur, warn_of_epsilon
from fedtide.site.site import Site
from fedtide.wire.clip import SLACK, WHOLE, Clip, check_private
from fedtide.wire.ledger import Ledger, Line, Place, Safe, read, safe_of
from fedtide.wire.noise import Recorded, Release, SystemNoise, deviations, groups_of, stream_of, with_noise
from fedtide.wire.pipeline import Wire
from fedtide.wire.vector import Form

SEEDS = "noise.jsonl"
"""File in a site's private folder."""
OWN = "privacy"
"""Folder in a node's folder with a ledger for each of its clients."""
MASKED = 200
"""Maximum number of masked answers of a client in a round, because none of their lines may be forgotten."""
OTHER = "it answered this before, of another model, or asked in another way"
SAME = "question", "purpose", "reveal"
"""Keys of a question that must be the same when it comes once more, beside its model and the client's memory."""


def ledger_for(experiment: Experiment, algorithm: Algorithm, path: Path | None = None) -> Ledger | None:
    """Return the ledger of a study with real clients, the same at its server and at its nodes; None without privacy.

    Raises:
        FedtideError: the method shows what noise would not cover, whatever its site or ticket says.
    """
    if (privacy := experiment.privacy) is None:
        return None
    if isinstance(experiment.method[0].settings().get("cohort"), Poisson):
        but = "of real clients it is known who comes"
        raise refused(f"method '{experiment.method[0].name}'.cohort", "poisson", "uniform with wire.privacy", but)
    check_private(privacy.step, algorithm, False, f"method '{experiment.method[0].name}'")
    plan = plan_without_sampling(privacy, experiment.rounds, len(algorithm.works))
    return ledger_with(privacy, plan, experiment, algorithm, path)


def warn_of_budget(study: Ledger | None, clients: int) -> Iterator[str]:
    """Say in lines that the budget of a study promises little, or hides the scores of so many clients."""
    if study is not None:
        how = f" at delta {study.delta:g} in {counted(study.plan.times, 'round')}"
        yield from filter(None, [warn_of_epsilon(study.whole, how), warn_of_blur(study, clients)])


# -- the server --------------------------------------------------------------------------------------------------------


def private_wire(site: Site, host: Host) -> Wire:
    """Return the wire of a server of real clients, with noise of the system if the study has privacy."""
    ledger = ledger_for(site.experiment, host.algorithm, site.record / LEDGER)
    if ledger is None:
        return host.wire
    safe = open_safe(site)
    safe.check(ledger)
    for number, clients in safe.offered():
        ledger.offer(number, clients)
    noise = SystemNoise(site.private / SEEDS if ledger.plan.bands > 1 else None)
    last = max((line.round for line in ledger.lines), default=-1)
    released = {stream_of(line.question, line.ask, line.slot) for line in ledger.of(last)}
    # If a person has put an older ledger back, it has no lines of later sums: their noise must not come again.
    noise.forget(lambda stream, number: number > last or (number == last and stream not in released))
    return with_noise(host.wire, ledger, noise, safe)


def recorded_sums(site: Site, host: Host) -> Recorded | None:
    """Return the released sums of a site's server, in place of its noise, for a replay; None without privacy.

    Raises:
        FedtideError: the ledger has lines that the budget of the study does not cover.
    """
    ledger, clip = ledger_for(site.experiment, host.algorithm), host.wire.clip
    if ledger is None or clip is None:
        return None
    for line in read(site.record / LEDGER):
        if line.z < (least := ledger.part(line.question).z) * (1 - SLACK):
            raise refused(f"{site.record / LEDGER}: round {line.round}: z", line.z, f"{least:.6g}, by the study")
        ledger.add(line)
    return Recorded(Release(clip, ledger, _no_noise), safe_of(site.record))


def _no_noise(stream: str, number: int, size: int) -> Tensor:
    raise RuntimeError("a replay draws no noise")


def open_safe(site: Site) -> Safe:
    """Return the safe of released sums, which keeps them until a checkpoint counts on them; make its folder."""
    site.private.mkdir(mode=0o700, exist_ok=True)
    flush(site.private.parent)
    return safe_of(site.record)


def forget(site: Site) -> None:
    """Remove the secrets of a run that is over: with the seeds of its noise, sums could be read without noise."""
    if site.private.is_dir():
        open_safe(site).settle(site.experiment.rounds, read(site.record / LEDGER))
    shutil.rmtree(site.private, ignore_errors=True)


def describe_spent(site: Site, algorithm: Algorithm) -> Iterator[str]:
    """Say in lines what has been spent, for each node by the client that spent most; nothing without privacy."""
    study = ledger_for(site.experiment, algorithm)
    if study is None:
        return
    ledger = study.fresh(lines=read(site.record / LEDGER))  # its server may be writing
    yield _describe_whole(ledger)
    for node in site.roster.node:
        most = max(node.clients, key=ledger.epsilon)
        yield f"privacy: client {most} of {node.name} {_so_far(ledger, most)}"


# -- a node ------------------------------------------------------------------------------------------------------------


@dataclass
class Budget:
    """Account of the answers of a node's clients in one study: a ledger for each of them.

    A question to several clients is refused for all of them if one may not answer it.

    Args:
        study: ledger of the study without lines: its plan and noise, as the ticket says.
        clip: bounds of answers, as the ticket says.
        folder: folder of the ledgers.

    By client it remembers the last round in which its answers were masked, and the line that each of them will cost.
    """

    study: Ledger
    clip: Clip
    folder: Path
    _ledgers: dict[int, Ledger] = field(default_factory=dict, init=False, repr=False)
    _masked: dict[int, tuple[int, dict[Any, Line]]] = field(default_factory=dict, init=False, repr=False)

    def ledger(self, client: int) -> Ledger:
        """Return the ledger of a client."""
        if client not in self._ledgers:
            self._ledgers[client] = self.study.fresh(self.folder / f"{client}.jsonl")
        return self._ledgers[client]

    def refuses(self, header: Mapping[str, Any], model: str, most: float | None) -> str | None:
        """Return the reason why clients do not answer a question; if they do, it is written down before.

        A masked answer says nothing until its sum is opened, and is written down then. If shares of its secrets were
        dealt, others may open it, and it is written down at once.

        Args:
            header: the question.
            model: digest of the payload.
            most: epsilon that the owner allows.
        """
        number, ask = header["version"]
        if number != header["moment"]["round"]:
            return f"it is asked in round {header['moment']['round']} for work whose memory is of round {number}"
        if why := self._objection_to_bounds(header, number):
            return why
        slots, mask, lines = header.get("slot"), header.get("mask"), []
        for client in header["clients"]:
            slot = None if slots is None else slots[str(client)]
            key = ask, slot or 0, "" if mask is None else mask["attempt"]  # no slots are masked as slot 0 is
            newest, masked = self._masked.get(client, (number, {}))
            masked = {} if number > newest else masked  # nothing of an earlier round is opened any more
            if header["kind"] == "unmask":
                if number < newest or key not in masked or masked[key].question != header["question"]:
                    return "it has not answered what is to be opened"
                lines.append(masked[key])
                continue
            line = self._line(header, client, (number, ask, slot), model)
            if why := self._objection(line, client, most):
                return why
            if mask is None:
                lines.append(line)
                continue
            if number < newest:
                return f"it was asked in round {newest}, so nothing of round {number} is masked"
            if key not in masked and len(masked) >= MASKED:
                return f"it masks {MASKED} answers in a round, and no more"
            if masked.setdefault(key, line) != line:
                return OTHER
            self._masked[client] = number, masked
            if str(client) in mask.get("drawn", ()):
                lines.append(line)
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
        rounds = header["moment"]["rounds"]  # rates follow it, and so would another answer
        same = json.dumps([model, *(header.get(key) for key in SAME), rounds, counted, *([bounds] if bounds else [])])
        return Line(
            round=number,
            ask=ask,
            question=header["question"],
            slot=slot,
            z=self.study.part(header["question"]).z,
            bounds={},
            clients=(client,),
            sha256=hashlib.sha256(same.encode()).hexdigest(),
        )

    def _objection_to_bounds(self, header: Mapping[str, Any], number: int) -> str | None:
        """Return the reason why the bounds of a question cannot be: by the ticket they have not come so far."""
        for slot in header.get("forms") or ():
            for name, bound in _bounds(header, slot).items():
                most = self.clip.largest_bound(name, number) if name in self.clip.adaptive else 0.0
                if bound > most * (1 + SLACK):
                    return f"it says a bound of {bound:g} for '{name}'; allowed: {most:.3g} at most, in round {number}"
        return None

    def _objection(self, line: Line, client: int, most: float | None) -> str | None:
        ledger, part = self.ledger(client), self.ledger(client).part(line.question)
        more, plan = ({"more": 1} if part is ledger else {"judged": 1}), part.plan
        why, epsilon = ledger.objection(line), ledger.epsilon(client, **more)
        if any(answer.place == line.place for answer in ledger.of(line.round)):
            return why and OTHER
        if most is not None and epsilon > most:
            return f"its owner allows epsilon {most:g}, and with this answer it would be {epsilon:.3g}"
        if why:
            rounds = ", ".join(map(str, part.rounds(client)[-3:])) or "none"
            allowed = f"each question once, in {plan.times} of {plan.rounds} rounds, {plan.distance} apart"
            return f"its own ledger has no room for round {line.round}: it was in {rounds}; allowed: {allowed}"
        return None


def _bounds(header: Mapping[str, Any], slot: str) -> dict[str, float]:
    """Return the bounds of a slot that a question says, of leaves whose bound adapts."""
    form = (header.get("forms") or {}).get(slot, {"leaves": []})
    return {leaf["name"] or WHOLE: leaf["bound"] for leaf in form["leaves"] if leaf.get("bound") is not None}


def describe_budget(
    study: Ledger | None, wire: Wire, clients: tuple[int, ...], folder: Path, policy: Policy
) -> Iterator[str]:
    """Say in lines what a study costs and has cost a node's clients.

    Args:
        study: ledger of the study without lines; None if its sums are not private.
        wire: path of answers out of the node.
        clients: clients of the node.
        folder: folder of the node's own ledgers.
        policy: the owner's rules.
    """
    most = policy.epsilon
    if study is None:
        if most is not None:
            is_told = not wire.sums_scores and policy.withholds_score(private=False) is None
            which = f"questions but {SCORE}" if is_told else "all questions"
            yield f"will be refused: {which} (your policy allows epsilon {most:g}, and there is no noise)"
        return
    plan, z = study.plan, study.z
    yield from describe_plan(study)
    if (clip := wire.clip) is not None:
        yield f"privacy: answers are cut here to {', '.join(_cut(clip, name, plan.rounds) for name in clip.bounds)}"
    judged = "" if study.score_ledger is None else f", of scores {study.score_ledger.z:.3g}"
    yield f"privacy: the server says that it adds noise to sums (multiplier {z:.3g}{judged})"
    for client in clients:
        ledger = study.fresh(lines=read(folder / f"{client}.jsonl"))
        yield f"privacy: client {client} {_so_far(ledger, client)}, by this node's own ledger"
    if most is not None and study.whole > most and study.score_ledger is not None:
        yield f"will be refused: answers beyond your policy's epsilon {most:g}; the study plans {study.whole:.3g}"
    elif most is not None and study.whole > most:
        answers = plan.times * plan.releases
        enough = next(k for k in range(answers + 1) if k == answers or study.epsilon(more=k + 1) > most)
        yield f"will be refused: all answers of a client after {enough} (your policy allows epsilon {most:g})"


def describe_plan(study: Ledger) -> Iterator[str]:
    """Say in lines what a client may spend in a private study, and when it may answer."""
    yield _describe_whole(study)
    if study.plan.distance > 1:
        yield f"privacy: two answers of a client are at least {study.plan.distance} rounds apart"


def warn_of_noise(study: Ledger, clip: Clip, forms: Iterable[Form]) -> Iterator[str]:
    """Say in lines how much noise the server adds, and that it is large beside the mean of so few clients."""
    line, longest = f"privacy: the server adds noise to sums (multiplier {study.z:.3g})", (1.0, 0)
    for form in forms:
        groups = groups_of(form, clip.bounds_of(form))
        sizes = deviations(groups, study.z)
        for name, group in groups.items():
            longest = max(longest, (sizes[name] * math.sqrt(group.size) / (group.bound * form.people), form.people))
    yield line
    if longest[0] > 1:
        than = f"{longest[0]:.0f} times as long as the mean can be: more clients or a smaller model would help"
        yield f"warning: noise on the mean of {counted(longest[1], 'client')} is about {than}"


def _cut(clip: Clip, name: str, rounds: int) -> str:
    """Name the length to which a value is cut."""
    first, last = clip.largest_cut(name, 0), clip.largest_cut(name, rounds - 1)
    return f"{name} {first:g}" + (f", which adapts and comes to {last:.3g} at most" if last > first else "")


def _describe_whole(ledger: Ledger) -> str:
    """Describe the budget of a client in the whole study."""
    plan, epsilon = ledger.plan, f"epsilon {ledger.whole:.3g} at delta {ledger.delta:g}"
    judged = "" if ledger.score_ledger is None else f" and scores in {ledger.score_ledger.plan.times}"
    answers = f"answers in at most {plan.times} of {plan.rounds} rounds{judged}"
    return f"privacy: each client may spend {epsilon}, with {answers}"


def _so_far(ledger: Ledger, client: int) -> str:
    """Describe the spent budget of a client."""
    if not (rounds := ledger.released(client)):
        return "has spent nothing so far"
    epsilon = f"epsilon {ledger.epsilon(client):.3g} at delta {ledger.delta:g}"
    return f"has spent {epsilon} in {counted(len(rounds), 'round')}, the last in round {rounds[-1]}"
