"""Unlearning: a run folder is played again, beside it, as if a client had never taken part.

Choices:
    - ours: the client is drawn as before and answers nothing (`data.without_clients`). So draws of other clients stay,
      and rounds before its first answer are as they were.
    - ours: all rounds are played again, because evaluations before the first answer have rows of the client, too.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, slug, to_toml
from fedtide.config.writing import as_toml
from fedtide.core.atomic import sha256
from fedtide.core.checkpoint import file_of
from fedtide.core.errors import FedtideError, refused
from fedtide.core.record import ASKS, CLIENTS, LEDGER, first_work_in, read_lines
from fedtide.data.population import Population
from fedtide.data.population_builder import LEFT
from fedtide.draw.prose import counted, listed
from fedtide.runs import folder
from fedtide.runs.build import host_of, population_of, read_again
from fedtide.runs.experiment import check_runs
from fedtide.runs.folder import Planned, plan
from fedtide.runs.privacy import server_wire
from fedtide.wire.ledger import Ledger
from fedtide.wire.noise import simulated_noise

SAME = ("seconds", "answered", "trained", "facts")
"""Keys of a round that are equal if nothing of it has changed; evaluations are of other clients."""


@dataclass(frozen=True)
class Leaving:
    """A run folder, and a client that has to be forgotten.

    Args:
        root: the run folder.
        name: the client's name in the data, or its number.
        numbers: its number in each run.
        experiment: the experiment without it.
        runs: those with the client.
        scaled: whether features have scales, means or categories that its rows decided, too.
    """

    root: Path
    name: str
    numbers: list[int]
    experiment: Experiment
    runs: list[Planned]
    scaled: bool

    @staticmethod
    def of(root: Path, client: str) -> "Leaving":
        """Read a run folder, and look for the client.

        Raises:
            FedtideError: it is no run folder of simulated clients, is damaged or not finished, or the client is not
                registered or has left already.
        """
        read_again()
        settings = folder.load(root)
        runs = plan(settings, root)
        check_runs(runs)
        if any((run.folder / ASKS).exists() for run in runs):
            raise FedtideError(f"{root}: its clients are real; allowed: fedtide forget SITE NODE")
        if unfinished := sum(not run.finished for run in runs):
            mend = f"go on with: {folder.go_on(root)}; or begin anew with data.without_clients"
            raise FedtideError(f"{root}: {unfinished} of {len(runs)} runs are not finished; {mend}")
        numbers: list[int] = []
        for run in runs:
            before = _population(run)
            where = f"{run.title}: CLIENT" if numbers else "CLIENT"  # it may be there with some seeds alone
            numbers.append(int(before.without([client], where).left))
        name = before.names[numbers[-1]] if before.names else str(numbers[-1])
        if name in (settings.data.without_clients or ()):
            raise FedtideError(f"CLIENT: {root} is without {name} already")
        left = [*(settings.data.without_clients or ()), name]
        without = folder.load(root, [f"{LEFT}={as_toml(left)}"])
        if not all(name in (run.experiment.data.without_clients or ()) for run in plan(without, root)):
            raise refused(f"{root}: sweep", LEFT, "another key, because points name those that have left")
        after = _population(plan(without, root)[-1])
        features = [getattr(people.rows, "x", None) for people in (before, after)]
        scaled = features[0] is not features[1] or before.rows.target != after.rows.target
        return Leaving(root, name, numbers, without, runs, scaled)

    @property
    def place(self) -> Path:
        """The run folder without the client, beside the other one; its number if another has nearly the same name."""
        place = self.root.with_name(f"{self.root.name}-without-{slug(self.name)}")
        if any(map(str.isalnum, self.name)) and (self.began(place) or not place.exists()):
            return place
        return self.root.with_name(f"{self.root.name}-without-client-{self.numbers[-1]}")

    @property
    def untouched(self) -> bool:
        """Tell whether no number of the runs depends on the client."""
        experiment = self.experiment
        if self.scaled or experiment.references or experiment.forgetting is not None:  # which read rows of all clients
            return False
        return all(
            first_work(run, number) is None and not was_judged(run, number)
            for run, number in zip(self.runs, self.numbers, strict=True)
        )

    @property
    def nothing(self) -> str:
        """Say why nothing is played again."""
        return f"client {self.name} never worked and was never judged in {self.root}: nothing to play again"

    def began(self, place: Path) -> bool:
        """Tell whether an earlier command has made this run folder without the client."""
        file = place / "config.toml"
        return file.is_file() and file.read_text(encoding="utf-8") == to_toml(self.experiment)

    def compare(self, place: Path) -> "list[Comparison]":
        """Compare the runs with and without the client, once the latter are played."""
        return list(map(self._compare, self.runs, plan(self.experiment, place), self.numbers))

    def _compare(self, run: Planned, without: Planned, number: int) -> "Comparison":
        lines, played = read_lines(run.folder), read_lines(without.folder)
        timings = read_lines(without.folder, "timings.jsonl")
        ledger = _ledger(run)
        return Comparison(
            run.title,
            self.name,
            first_work(run, number),
            _same(lines, played),
            len(played),
            sum(line["answered"] for line in played),
            sum(line["seconds"] for line in timings),
            (state_of(run.folder), state_of(without.folder)),
            () if ledger is None else tuple(ledger.released(number)),
            "" if ledger is None else f"epsilon {ledger.epsilon(number):.3g} at delta {ledger.delta:g}",
            run.experiment.wire is not None and run.experiment.wire.secure,
        )


@dataclass(frozen=True)
class Comparison:
    """A run without a client, compared with that with it.

    Args:
        title: of the run.
        client: its name.
        first: the round in which it worked first; None if it never did.
        same: number of rounds, from the first on, that are as they were.
        rounds: number of rounds.
        answers: number of answers of clients that were computed anew.
        seconds: of the rounds, without evaluations.
        states: digests of the last state, with the client and without it; "" if there is none.
        released: in a private run the rounds whose noised sums have it.
        budget: what it had spent then.
        masked: whether its answers were masked.
    """

    title: str
    client: str
    first: int | None
    same: int
    rounds: int
    answers: int
    seconds: float
    states: tuple[str, str]
    released: tuple[int, ...]
    budget: str
    masked: bool

    def lines(self) -> Iterator[str]:
        """Describe the rounds that were played again, and the sums that cannot be taken back."""
        when = "never worked" if self.first is None else f"worked first in round {self.first}"
        same = "no round is" if not self.same else f"{counted(self.same, 'round')} {'are' if self.same > 1 else 'is'}"
        yield f"{self.title}: client {self.client} {when}; {same} as before"
        cost = f"{self.answers} answers, {self.seconds:.1f} s"
        yield f"{self.title}: {counted(self.rounds, 'round')} played without it ({cost})"
        yield f"{self.title}: last state {self.states[0] or 'none'} with it, {self.states[1]} without it"
        if self.budget:
            rounds = f"sums of {name_rounds(self.released)}" if self.released else "no sum"
            yield f"{self.title}: released with it, and cannot be taken back: {rounds} ({self.budget})"
        elif self.masked and self.first is not None:
            yield f"{self.title}: masked sums from round {self.first} on may have its answers, and cannot be taken back"


def name_rounds(rounds: Sequence[int]) -> str:
    """Name rounds in words.

    >>> name_rounds([3]), name_rounds([3, 5]), name_rounds(range(20))
    ('round 3', 'rounds 3 and 5', '20 rounds, 0 to 19')
    """
    if len(rounds) > 8:
        return f"{len(rounds)} rounds, {rounds[0]} to {rounds[-1]}"
    return f"round{'s' * (len(rounds) > 1)} {listed([str(number) for number in rounds])}"


def first_work(run: Planned, client: int) -> int | None:
    """Return the round in which a client worked first; None if it never did, 0 if the record does not say it."""
    lines = read_lines(run.folder)
    return first_work_in(lines).get(client) if all("first_work" in line for line in lines) else 0


def was_judged(run: Planned, client: int) -> bool:
    """Tell whether an evaluation of a run has rows of a client."""
    with (run.folder / CLIENTS).open(encoding="utf-8", newline="") as file:
        return any(row["client"] == str(client) for row in csv.DictReader(file))


def state_of(run: Path) -> str:
    """Return a short digest of the last saved state of a run; "" if none is saved."""
    return sha256(file_of(run))[:16] if any((run / "checkpoints").glob("[0-9]*")) else ""


def _population(run: Planned) -> Population:
    return population_of(run.experiment, run.experiment.shift_of(run.method), run.seed)


def _same(lines: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> int:
    """Count the rounds, from the first on, in which two records are equal but for evaluations."""
    pairs = zip(lines, others, strict=False)
    differ = (n for n, (one, other) in enumerate(pairs) if any(one.get(key) != other.get(key) for key in SAME))
    return next(differ, min(len(lines), len(others)))


def _ledger(run: Planned) -> Ledger | None:
    """Return the ledger of a private run."""
    if run.experiment.privacy is None:
        return None
    host = host_of(run.experiment, run.method, run.seed)
    wire = server_wire(run.experiment, run.method, host, simulated_noise(run.seed), run.folder / LEDGER)
    return wire.ledger
