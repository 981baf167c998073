"""Settings of an experiment besides data and methods: fleet, trackers, wire, deployment and tuning."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from fedtide.core.errors import nearest, shown, uninstalled, unknown
from fedtide.fields.shapes import bare, fields_of, tags, tags_of
from fedtide.fields.types import (
    Count,
    Distinct,
    Duration,
    Finite,
    Flag,
    Fraction,
    InnerFraction,
    Positive,
    Strict,
    Whole,
    Zone,
    by_kind,
    ingredient,
    kept_if,
    on_default,
)
from fedtide.wire.clip import Adaptive, Clip
from fedtide.wire.pipeline import FEWEST, Wire
from fedtide.wire.scores import BOUNDS

# -- [fleet] -----------------------------------------------------------------------------------------------------------

Device = Literal["cpu", "cuda", "auto"]
Threads = Annotated[int, Field(strict=True, ge=1, le=1024)]


@ingredient
class Processes:
    """Processes of any kind of fleet; several runs are played side by side anyway.

    Args:
        workers: processes among which several runs are divided, or the clients of one with `workers` and `ray`. None
            means the machine's cores, or the CPUs of the Ray cluster.
        channels_last: keep convolutions in the memory format channels_last, which is faster on many processors. A model
            for which torch has a fault in it keeps the usual one.
        device: device that models compute on: "cuda", or "auto" for a GPU if there is one. Weights and sums stay on the
            CPU. Another device gives other last bits.
    """

    workers: Count | None = None
    channels_last: Flag = True
    device: Device = "cpu"


@ingredient
class Threaded(Processes):
    """Processes with threads.

    Args:
        threads: of torch for a client's work; more than one changes the last bits.
    """

    threads: Threads = 1


@ingredient
class Local(Threaded):
    """One process for the clients of a run."""

    kind: Literal["local"] = "local"


@ingredient
class Workers(Threaded):
    """Worker processes for the clients of a run, which give the bits of one process."""

    kind: Literal["workers"] = "workers"


@ingredient
class Ray(Threaded):
    """Actors of a Ray cluster, which give the bits of one process.

    Args:
        address: of the cluster's head node, HOST:PORT, or "auto" for one on this machine; None starts one here that
            ends with the command.
        gpus: share of a GPU that each actor has to itself, with `device`, or for algorithms of your own that
            compute on it.
    """

    address: Annotated[str, Field(min_length=1)] | None = None
    gpus: Fraction = 0.0
    kind: Literal["ray"] = "ray"


@ingredient
class Stacked(Threaded):
    """Several clients at once: trained together, and judging models together; gives other last bits."""

    kind: Literal["stacked"] = "stacked"


@ingredient
class Auto(Processes):
    """Worker processes for one large run, else one process, by rows and parameters; written down before round 0."""

    kind: Literal["auto"] = "auto"
    threads: ClassVar[int] = 1


AnyFleet = Annotated[Local | Workers | Ray | Stacked | Auto, Field(discriminator="kind")]
FleetSettings = Annotated[AnyFleet, BeforeValidator(lambda value: on_default(Local(), by_kind(value)))]
"""Kinds of fleet; a table without `kind` is one of "local"."""


def replace_kind(table: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return a file's table with another kind, without the keys that only other kinds have.

    >>> replace_kind({"kind": "ray", "address": "auto", "threads": 2}, "local")
    {'kind': 'local', 'threads': 2}
    """
    kinds = {tag: set(fields_of(member)) for member in get_args(bare(AnyFleet)) for tag in tags(member)}
    foreign = set().union(*kinds.values()) - kinds[kind] if kind in kinds else set()
    return {key: value for key, value in table.items() if key not in foreign} | {"kind": kind}


# -- [track] -----------------------------------------------------------------------------------------------------------


@ingredient
class TensorBoard:
    """TensorBoard: a folder of event files, which `tensorboard --logdir` shows.

    Args:
        path: the folder; None means `track/tensorboard` in the run folder.
    """

    path: str | None = None
    kind: Literal["tensorboard"] = "tensorboard"


@ingredient
class MLflow:
    """MLflow: an experiment with a run for each method and seed.

    Args:
        path: the store, as MLflow writes it (http://..., sqlite:///...); None means MLFLOW_TRACKING_URI, or else
            `track/mlflow.db` in the run folder.
        experiment: its name there; None means the run folder's name.
    """

    path: str | None = None
    experiment: str | None = None
    kind: Literal["mlflow"] = "mlflow"


@ingredient
class WandB:
    """Weights & Biases: a project with a run for each method and seed.

    Args:
        project: its name there.
        mode: "offline" writes to a folder beside the run folder, `study-wandb`, for `wandb sync`; "online" sends as
            rounds are played.
    """

    project: str = "fedtide"
    mode: Literal["offline", "online"] = "offline"
    kind: Literal["wandb"] = "wandb"


Track = Annotated[TensorBoard | MLflow | WandB, Field(discriminator="kind")]
"""Trackers."""

TRACKERS = tags_of(Track)


def read_tracker(text: str) -> Track:
    """Read `"tensorboard"`, or with a place `"mlflow:http://localhost:5000"`.

    >>> read_tracker("tensorboard:logs")
    TensorBoard(path='logs', kind='tensorboard')
    """
    kind, _, place = text.partition(":")
    if kind not in TRACKERS:
        raise unknown("track", kind, TRACKERS)
    if place and kind == "wandb":
        return WandB(project=place)
    return TypeAdapter(Track).validate_python(by_kind(text))


def check_installed(track: Track) -> None:
    """Raise a `FedtideError` with the command that installs a tracker's library if it is not installed."""
    if find_spec(track.kind) is None:
        raise uninstalled(f'track.kind: "{track.kind}" needs its library', "track")


# -- [wire] ------------------------------------------------------------------------------------------------------------


class Privacy(Strict):
    """Differential privacy: models, and all that is made of noised sums, say little of any one client.

    Each client's answers are cut to bounds, and sums get noise, once. With `scores` this covers evaluation on their
    rows, too. See "Privacy" in the documentation.

    Args:
        epsilon: what the whole run may say of a client, at most; the noise follows from it.
        multiplier: noise in place of `epsilon`, in units of what one client moves a sum by; epsilon follows from it.
        delta: probability with which the promise of `epsilon` may fail. It must be smaller than 1 / clients, and should
            be far smaller.
        clip: for each value that is summed its bound, by its name, such as `delta`: the largest length of what one
            client sends. A value of any method without a bound is an error, and so is a bound of no value.
        adapt: bounds that adapt, by the name of their value, such as `{ delta = { quantile = 0.5 } }`. Then `clip` has
            the bound of round 0.
        noise: "plain" noise is fresh in each round. "banded" noise is correlated over the rounds between two answers of
            a client, so that much of it cancels in the model.
        distance: smallest number of rounds from one answer of a client to its next; before that it is not asked. None
            means the period of the shift, or 1 without one.
        times: rounds that a client answers in, at most; None means as many as the distance allows. Without `distance`
            and `times`, plain noise and a uniform or poisson cohort gain by the chance not to be drawn, if that is a
            gain.
        scores: what all evaluations together may say of a client, at most, on top of `epsilon`. Then clients' scores
            are sums with noise, and all choices are made by these. None: scores are exact and in no budget.
    """

    epsilon: Positive | None = None
    multiplier: Positive | None = None
    delta: InnerFraction = 1e-5
    clip: dict[str, Positive] = Field(min_length=1)
    adapt: dict[str, Adaptive] = Field(default_factory=dict)
    noise: Literal["plain", "banded"] = "plain"
    distance: Count | None = None
    times: Count | None = None
    scores: Positive | None = None

    @property
    def step(self) -> Clip:
        """The clients' step."""
        bounds = self.clip if self.scores is None else {**self.clip, **BOUNDS}
        return Clip(bounds, self.adapt)

    @model_validator(mode="after")
    def _check(self) -> "Privacy":
        for name in self.adapt:
            if name not in self.clip:
                raise ValueError(f"adapt: found '{name}', {nearest(name, list(self.clip))}")
        if (self.epsilon is None) == (self.multiplier is None):
            count = "neither" if self.epsilon is None else "both"
            raise ValueError(f"found {count} of `epsilon` and `multiplier`, allowed: one of them")
        return self


class WireSettings(Strict):
    """Sums from clients to the server: added in fixed point, exactly, in any order.

    Args:
        secure: real clients mask what they send, so that the server can open sums alone; a simulation adds the same
            numbers.
        fewest: clients below which no sum is opened; clients in a smaller sum count as not having answered. It is 3 or
            more if sums are secure, because of two clients each learns the other from their sum.
        sum_scores: the server gets clients' accuracies as a sum, never one by one. Each client counts once. None: if
            sums are secure. Not with `privacy`, which has `privacy.scores`.
        shares: nodes deal shares of the secrets of their masks, so that a sum opens although up to a third of them
            vanish. It is new, and few people have attacked it. It needs `secure`.
        privacy: differential privacy; None adds no noise.
    """

    secure: Flag = True
    fewest: Annotated[Count, Field(le=100_000)] = FEWEST
    sum_scores: Flag | None = None
    shares: Flag = False
    privacy: Privacy | None = None

    @model_validator(mode="after")
    def _check(self) -> "WireSettings":
        if self.secure and self.fewest < FEWEST:
            few = "one client is that client" if self.fewest == 1 else "two tells each of them the other"
            raise ValueError(
                f"found `fewest = {self.fewest}` and `secure = true`, but a sum of {few}; "
                f"allowed: `fewest` of {FEWEST} or more, or `secure = false`"
            )
        if self.shares and not self.secure:
            raise ValueError(
                "found `shares = true` and `secure = false`, but shares open masks; allowed: `secure = true`"
            )
        if self.sum_scores is not None and self.privacy is not None:
            raise ValueError("found `sum_scores` and `privacy`, allowed: an epsilon for scores, `privacy.scores`")
        return self

    def build(self) -> Wire:
        """Build the wire as clients know it; the server adds noise (`fedtide.runs.privacy`)."""
        if self.privacy is None:
            sums_scores = self.secure if self.sum_scores is None else self.sum_scores
            return Wire(self.secure, self.fewest, sums_scores=sums_scores, shares=self.shares)
        sums_scores = self.privacy.scores is not None
        return Wire(self.secure, self.fewest, self.privacy.step, sums_scores=sums_scores, shares=self.shares)


# -- [deploy] ----------------------------------------------------------------------------------------------------------

NAME = re.compile(r"(?=.{1,253}\Z)((?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)*(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
"""Names of DNS."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address; a host of IPv6 stands in brackets.

    >>> split_address("fl.example.org:8300"), split_address("[::1]:8300")
    (('fl.example.org', 8300), ('::1', 8300))
    """
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        raise ValueError(f"found {shown(address)}, allowed: a name or address at which others reach this machine")
    inside = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    is_port = re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535
    if not (is_port and (_is_ip(inside, 6) or _is_ip(host, 4) or NAME.fullmatch(host))):
        raise ValueError(
            f"found {shown(address)}, allowed: HOST:PORT, a port of 1 to 65535, as in 'fl.example.org:8300'"
        )
    return inside or host, int(port)


def bind_address(address: str) -> tuple[str, int]:
    """Return the interface and the port on which a server listens: the loopback, or all of a machine's interfaces.

    >>> bind_address("127.0.0.1:8300"), bind_address("fl.example.org:8300")
    (('127.0.0.1', 8300), ('0.0.0.0', 8300))
    """
    host, port = split_address(address)
    if _is_ip(host, 6):
        return "::1" if ip_address(host).is_loopback else "::", port
    loopback = host == "localhost" or (_is_ip(host, 4) and ip_address(host).is_loopback)
    return "127.0.0.1" if loopback else "0.0.0.0", port


def _is_ip(text: str, version: int) -> bool:
    try:
        return ip_address(text).version == version and "%" not in text
    except ValueError:
        return False


Address = Annotated[str, kept_if(split_address)]


class Deploy(Strict):
    """Settings of `fedtide deploy` and `fedtide serve`; a simulation ignores this table.

    Times are a number and one of s, m, h, d, such as "90s" or "1h".

    Args:
        address: HOST:PORT at which nodes reach the server. Its certificate is made for this host, and for this machine
            itself. If the host is no loopback the server listens on all interfaces.
        every: time from the beginning of a round to the beginning of the next, or longer if a round is not over by
            then. None begins the next as soon as one is over.
        deadline: for the answers to one question, from when it goes out; a later answer counts for nothing.
        fewest: clients that have to be there before a round begins, and answers to a question below which none counts.
        wait: longest wait for these clients before a round. Then the server ends with status 2, and the same command
            goes on. None waits for as long as it takes.
        heaviest: largest weight that a client may give to its answer, mostly its number of rows; an answer with a
            larger one is refused. Near the rows of your largest client no other can outweigh it by a lie.
        zone: time zone of `every`, and of methods that know the time of the day, such as "Europe/Berlin".
    """

    address: Address = "127.0.0.1:8300"
    every: Duration | None = None
    deadline: Duration = "10m"
    fewest: Annotated[Count, Field(le=100_000)] = 1
    wait: Duration | None = None
    heaviest: Annotated[Positive, Field(le=1e12)] = 1e6
    zone: Zone = "UTC"


# -- [tune] ------------------------------------------------------------------------------------------------------------


class Range(Strict):
    """Range of a search: between two numbers, or among some values.

    Args:
        low: the lowest number.
        high: the highest number.
        log: search the logarithm: as many trials between 0.01 and 0.1 as between 0.1 and 1.
        step: only `low`, `low + step`, ..., up to `high`.
        whole: only whole numbers.
        choices: in place of `low` and `high`, a list of values; tables are allowed.
        also: other keys of methods that get the best value too, such as "method.Mixture.local.lr"; for ranges about one
            method.
    """

    low: Finite | None = None
    high: Finite | None = None
    log: Flag = False
    step: Positive | None = None
    whole: Flag = False
    choices: Annotated[tuple[Any, ...], Distinct] | None = None
    also: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if self.choices is not None:
            written = [name for name in ("low", "high", "step") if getattr(self, name) is not None]
            written += [name for name in ("log", "whole") if getattr(self, name)]
            for extra in written:
                raise ValueError(f"found `choices` and `{extra}`, allowed: one of them")
        elif self.low is None or self.high is None:
            raise ValueError("`low` or `high` is missing, allowed: both of them, or `choices`")
        else:
            self._check_interval(self.low, self.high)
        return self

    def _check_interval(self, low: float, high: float) -> None:
        if low > high:
            raise ValueError(f"found low = {low:g} and high = {high:g}, allowed: low at most high")
        if self.log and low <= 0:
            raise ValueError(f"found low = {low:g} with log = true, allowed: low greater than 0")
        if self.whole and not (low.is_integer() and high.is_integer() and (self.step or 1.0).is_integer()):
            raise ValueError("found whole = true, allowed with it: whole numbers as `low`, `high` and `step`")
        if self.step is not None and self.log:
            raise ValueError("found `step` and log = true, allowed: one of them")
        if self.step is not None and abs((high - low) / self.step - round((high - low) / self.step)) > 1e-6:
            raise ValueError(f"found step = {self.step:g}, allowed: one that leads from {low:g} to {high:g}")

    def edges(self) -> tuple[Any, ...]:
        """The values that must be possible for the others to be: both ends, or every value of a list."""
        if self.choices is not None:
            return self.choices
        assert self.low is not None
        assert self.high is not None
        return tuple(int(end) if self.whole else end for end in (self.low, self.high))


class TuneStage(Strict):
    """Stage of a tuning, in the order of the file: best values of earlier stages stay fixed.

    Args:
        name: in the report.
        methods: the methods that are tuned; None means every method that one of the ranges is about.
        trials: for each of them; None means `tune.trials`.
        ranges: what is searched, as `tune.ranges`.
    """

    name: str = Field(min_length=1, max_length=100)
    methods: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    trials: Count | None = None
    ranges: dict[str, Range] = Field(min_length=1)


class Tune(Strict):
    """Search of `fedtide tune`, by accuracy on validation rows; test rows are never looked at.

    Every method is tuned by itself, all with the same number of trials. `fedtide run` ignores this table.

    Args:
        sampler: "tpe" learns from earlier trials which values are good (tree-structured Parzen estimator), "random"
            draws, and "grid" plays combinations of `choices`, each once.
        trials: for each method of a stage; None means 20, with "grid" all combinations.
        startup_trials: trials of a method that are drawn at random before "tpe" begins.
        parallel_trials: trials of a method that are asked for at once. They can run in parallel and cannot learn from
            each other; the result depends on this number and not on the number of processes.
        pruning: end a trial early if its accuracy was never above the median of earlier trials at the same evaluation.
        seeds: of every trial; its accuracy is the mean over them. None means the first of the experiment.
        seed: of the search itself.
        over_sweep: a trial plays all points of the sweep, and its accuracy is the mean over them. So a method gets
            values that suit them all.
        ranges: what is searched: dotted keys of methods as in a sweep, "method.local.lr" for all or
            "method.FedProx.local.proximal" for the method of that name. One method alone may search keys of the
            network, such as "model.channels.0", because all methods get the values that it finds.
        stage: in place of `ranges`, several searches one after the other.
    """

    sampler: Literal["tpe", "random", "grid"] = "tpe"
    trials: Count | None = None
    startup_trials: Count = 8
    parallel_trials: Count = 4
    pruning: Flag = True
    seeds: Annotated[tuple[Whole, ...], Distinct] | None = None
    seed: Whole = 0
    over_sweep: Flag = False
    ranges: dict[str, Range] = Field(default_factory=dict)
    stage: tuple[TuneStage, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Tune":
        if bool(self.ranges) == bool(self.stage):
            count = "both" if self.ranges else "neither"
            raise ValueError(f"found {count}, allowed: a table `ranges` or [[tune.stage]] tables")
        names = [stage.name for stage in self.stage]
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise ValueError(f"stage '{twice}' stands twice")
        return self

    def stages(self) -> tuple[TuneStage, ...]:
        """The stages; one without a name for plain ranges."""
        return self.stage or (TuneStage.model_construct(name="", methods=None, trials=None, ranges=self.ranges),)
