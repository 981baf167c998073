"""The typed, frozen values of an experiment.

The keys of a method are the signature of its algorithm: every keyword of the function, with its type and default, is a
key. Unknown keys are errors with a suggestion.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.entry import options_of
from fedtide.clusters.representation import Embedding
from fedtide.config.settings import Deploy, FleetSettings, Local, Privacy, Track, Tune, WireSettings
from fedtide.core.base import Algorithm, EvalSplit, Grouping, Over
from fedtide.core.errors import refused, unknown
from fedtide.data.partition import Groups, HeldOutClients, OneGroup, Partition, Split
from fedtide.data.shift import Calendar, Shift
from fedtide.data.sources import DayNightCharacters, Source
from fedtide.data.targets import TARGET_WORDS, Setting
from fedtide.data.transforms import Step
from fedtide.evaluate.metrics import LOWER_IS_BETTER, OF_TARGETS, SHIPPED, Unit
from fedtide.fields.types import (
    Count,
    Distinct,
    Finite,
    Flag,
    Fraction,
    Positive,
    Spelled,
    Strict,
    Text,
    Whole,
    by_name,
    ingredient,
)
from fedtide.fields.user_code import Python, imported
from fedtide.fleets.devices import Devices, Steady
from fedtide.fleets.liars import Liars
from fedtide.learn.losses import WSM, CrossEntropy, FedLC, Masked
from fedtide.learn.target import CLASSES
from fedtide.models import Model, SmallCNN
from fedtide.transforms import AnyTransform, Personalized

LOWER = (*LOWER_IS_BETTER, "loss", "client_variance", "auc_bound")
"""Numbers of an evaluation of which the lower one is the better one."""

SHARED = {"loss", "init_from", "decide_per", "safe", "transforms"}
"""Keys of every method, whatever its algorithm."""


ClientName = Annotated[Text, BeforeValidator(lambda name: str(name) if type(name) is int else name)]
"""Name of a client, or its number."""


class Data(Strict):
    """Rows, and how they are dealt to clients.

    Args:
        source: of the rows.
        directory: the data directory, in which files of the source are looked for first.
        partition: how rows are dealt to clients; None means natural if the source names clients, else iid.
        groups: which rows belong to which group of clients.
        split: train, validation and test part of each client.
        held_out_clients: clients for evaluation only.
        without_clients: clients that have left, by their names in the data, or by their numbers from 0. They are drawn
            as before and answer nothing. No number is made of their rows. None means that nobody has left;
            `fedtide forget` writes it.
        public_samples: number of training rows that no client holds and all may see, without their labels. Some methods
            need them as a common view of the data. They are of all domains of the source, about equally many of each.
        transforms: steps that images pass before the model sees them, in order.
        seed: of the dealing, and of a source that is drawn; None means the seed of the run, so that every seed deals
            anew.
        target: labels of rows: classes, a number, its quantiles, a count, or several labels at once.
    """

    source: Annotated[Source, Spelled] = DayNightCharacters()
    directory: str | None = None
    partition: Annotated[Partition, Spelled] | None = None
    groups: Groups = OneGroup()
    split: Split = Split()
    held_out_clients: HeldOutClients = HeldOutClients()
    without_clients: Annotated[tuple[ClientName, ...], Distinct] | None = None
    public_samples: Whole = 0
    transforms: tuple[Step, ...] = ()
    seed: Whole | None = None
    target: Annotated[Setting, Field(discriminator="kind"), Spelled] = CLASSES

    @property
    def folder(self) -> Path | None:
        """The data directory; None if there is none."""
        return Path(self.directory) if self.directory else None


class Method(Strict):
    """Method of a comparison: a named algorithm with its settings, and a shift of its own if it has one.

    Args:
        name: in the report; None means the algorithm's name. Transforms and the safe form follow it in brackets, as in
            "IFCA (safe)".
        algorithm: a registered name, or the user's own `module:function`.
        options: the arguments of the algorithm's function; in a file they stand beside `name`.
        safe: the recommended form of the method, which lost no point if there was nothing to find. The page of a
            method describes it.
        transforms: additions to the method of the paper: our improvements, or a way to personalize; in any order.
        loss: minimized by local training; "cross-entropy" is the target's own loss if rows have no classes.
        init_from: first weights of the method's model; None draws them. It is a file of safetensors, a folder with
            adapters as PEFT writes it, or the folder of a run of one model (`RUN/METHOD/SEED`). The run may have been
            stopped; its newest checkpoint is read.
        shift: in place of the experiment's `who`, `what` or `how`.
        decide_per: rows that choose their branch together at inference: all of a "client", or a "batch" of at most 64
            of a client's. Each "sample" chooses by itself; an "oracle" takes 64 of the same true group, in a simulation
            alone.
    """

    name: str = Field(min_length=1, max_length=100)
    algorithm: str
    options: dict[str, Any] = Field(default_factory=dict)
    safe: Flag = False
    transforms: tuple[AnyTransform, ...] = ()
    loss: Annotated[
        CrossEntropy | WSM | FedLC | Masked | Python, Field(discriminator="kind"), BeforeValidator(by_name)
    ] = CrossEntropy()
    init_from: str | None = Field(None, min_length=1)
    shift: Shift | None = None
    decide_per: Grouping = "client"

    def settings(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the algorithm's function."""
        return dict(options_model(self.algorithm).model_validate(self.options))

    @property
    def all_transforms(self) -> tuple[Any, ...]:
        """The transforms, those of the safe form among them."""
        safe = REGISTRY[self.algorithm].safe if self.safe and self.algorithm in REGISTRY else None
        return (*(safe.transforms if safe else ()), *self.transforms)

    @property
    def form(self) -> str:
        """The safe form and transforms, in brackets after its name: " (safe, shared trunk)"; "" without any."""
        return self._form([transform.label for transform in self.transforms])

    def _form(self, labels: list[str]) -> str:
        words = ", ".join(filter(None, ["safe" if self.safe else "", *labels]))
        return f" ({words})" if words else ""

    @property
    def bare(self) -> str:
        """Its name as it was written, without its form."""
        return self.name.removesuffix(self.form)

    @property
    def others(self) -> list[str]:
        """Names of other uses of its models, each judged as a method of its own."""
        ways = [transform for transform in self.all_transforms if isinstance(transform, Personalized)]
        return [name for way in ways for name in way.named()]

    def named(self, other: str) -> "Method":
        """Return the method under the name of one of its other uses, which personalizes in a way of its own."""
        form = self._form([other.label for other in self.transforms if not isinstance(other, Personalized)])
        return self.model_copy(update={"name": f"{self.bare}, {other}{form}"})


def form_of(method: Mapping[str, Any]) -> str:
    """Return the form of a method that is written in a file, in brackets after its name; "" for one with mistakes.

    >>> form_of({"transforms": ["anchored", {"kind": "shared", "layers": "trunk"}]}), form_of({"transforms": 3})
    (' (anchored, shared trunk)', '')
    """
    try:
        written = {"safe": method.get("safe") is True, "transforms": tuple(method.get("transforms", ()))}
        return Method.model_validate({"name": "x", "algorithm": "x", **written}).form
    except (TypeError, ValidationError):
        return ""


def _owners(value: Any) -> Any:
    """Check a word or a number, for which pydantic would complain once each."""
    if value != "participants" and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise ValueError(f"found {value!r}, allowed: 'participants', or a whole number of 1 or more")
    return value


class Forgetting(Strict):
    """Measurement of local client forgetting: the accuracy that a client's training costs on rows of other clients.

    Every participant's training is done once more on copies and judged on every owner's rows: participants x owners.

    Args:
        rounds: numbers from 0, as `round` in rounds.jsonl. The model sent out in round r, which has seen r rounds,
            is compared with the models that the round's participants make of it.
        part: rows of the owners, "val" or "test".
        eval_clients: owners of the rows: the round's "participants", or at most so many registered clients, drawn once.
    """

    rounds: Annotated[tuple[Whole, ...], Distinct]
    part: Literal["val", "test"] = "val"
    eval_clients: Annotated[Literal["participants"] | Count, BeforeValidator(_owners)] = "participants"


def as_stop_at(value: Any) -> Any:
    """Read `0.8` as `{accuracy = 0.8}`."""
    return {"accuracy": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _metric(value: Any) -> Any:
    """Read `"auc"` as `{kind = "auc"}`, and `"mine:cost"` or a table without a kind as the kind "python"."""
    table = by_name(value)
    return {"kind": "python", **table} if isinstance(table, dict) else table


@ingredient
class MacroF1:
    """F1 = 2 TP / (2 TP + FP + FN) of each class, all rows together, as a mean over classes, however rare."""

    kind: Literal["macro-f1"] = "macro-f1"


@ingredient
class AUC:
    """Area under the ROC curve, each class against the rest, all rows together, as a mean over classes.

    Scores are log-odds in 640 bins from -16 to 16, so that it follows from sums of clients. `auc_bound` is its largest
    error, half the share of pairs in one bin.
    """

    kind: Literal["auc"] = "auc"


@ingredient
class Perplexity:
    """Exponential of the mean loss, of sequences by step: over how many tokens a guess is spread."""

    kind: Literal["perplexity"] = "perplexity"


@ingredient
class BitsPerByte:
    """Loss in bits of next tokens, by byte of their text, so that models with other tokenizers can be compared.

    It needs `data.source.kind = "texts"` without `label`. The mark of a text's end adds to the loss, and has no bytes.
    """

    kind: Literal["bits-per-byte"] = "bits-per-byte"


class OwnMetric(Strict):
    """A metric of your own: a function of the scores of each evaluation, in short `"module:function"`.

    Args:
        function: `module:function`, called with the scores (`fedtide.evaluate.Scores`) and `options`; returns a number.
        options: keyword arguments for it.
        name: in records, claims and reports; None means the function's name.
        unit: in reports: a "share" (0 to 1) is written as percent.
        needs: sums over all rows that it reads as `scores.pooled[needs]`, None for none. "confusion" (classes, 3) has
            right predictions, all predictions, and rows, of each class. "odds" (classes, 2, 640) has rows of the class
            and others in bins of their log-odds for it.
    """

    function: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    name: str | None = Field(None, min_length=1, max_length=40)
    unit: Unit = "number"
    needs: Literal["confusion", "odds"] | None = None
    kind: Literal["python"] = "python"

    @property
    def key(self) -> str:
        """Name in records, claims and reports."""
        return self.name or self.function.rpartition(":")[2]


def units_of(metric: MacroF1 | AUC | Perplexity | BitsPerByte | OwnMetric) -> dict[str, Unit]:
    """Return the numbers of a metric in records, claims and reports, with their units."""
    if isinstance(metric, OwnMetric):
        return {metric.key: metric.unit}
    return {number.name: number.unit for number in SHIPPED[metric.kind]}


class StopAt(Strict):
    """Early end of a run at a target accuracy; nothing says whether the accuracy would have stayed there.

    Args:
        accuracy: of held-out clients if there are any, else of the clients' own test rows, else of their validation
            rows; from 0 to 1.
        evaluations: number in a row that have to be at or above it.
    """

    accuracy: Fraction
    evaluations: Count = 1


class Keep(Strict):
    """Models that a run keeps beside its last one: the best by validation rows.

    Args:
        best: number of models. Of equal ones the earlier are kept.
        by: a number of each evaluation: accuracy (or skill), loss, ..., or one of `metrics`; None means the headline
            score.
        less: the lowest are the best; None means so for losses and errors.
    """

    best: Count = 1
    by: str | None = None
    less: Flag | None = None

    def rank(self, values: Mapping[int, float | None], score: str) -> list[int]:
        """Return the rounds with the best values, the best first.

        Args:
            values: by round; None and what is not finite are no values.
            score: the headline score.

        >>> Keep(best=2).rank({2: 0.5, 4: None, 6: 0.75, 8: 0.75}, "accuracy")
        [6, 8]
        >>> Keep(by="loss").rank({2: 1.5, 4: 0.5}, "accuracy")
        [4]
        """
        lower = (self.by or score) in LOWER if self.less is None else self.less
        finite = {number: value for number, value in values.items() if value is not None and math.isfinite(value)}
        return sorted(finite, key=lambda number: (finite[number] if lower else -finite[number], number))[: self.best]


class Claim(Strict):
    """Statement that the experiment tests; its report says whether it holds.

    Args:
        text: the claim, as a sentence.
        method: the method with the number.
        versus: the method that it is compared with, seed by seed. Of several it is the one with the highest mean, with
            `less` the lowest. None compares the number itself with `bound`.
        measure: as in summary.json: accuracy, worst_point, swing, accuracy_day, branch_accuracy, ... None means the
            headline score: accuracy, or skill if labels are numbers or counts.
        bound: the number, or the difference, must lie beyond this.
        less: it must lie below; None means so for mae, rmse, pinball, deviance, perplexity and bits-per-byte.
        within: it must lie closer to `bound` than this, on either side.
        at: a part of the sweep, by parts of the points' names as the report writes them: "alpha 0.1", or "chosen" for
            all of it. Of several points each method takes the one that it chose by its validation rows. None tests the
            claim at every point.
        beyond: another part of the sweep, whose number is subtracted, seed by seed; needs `at`.
    """

    text: str = Field(min_length=1)
    method: str
    versus: Annotated[tuple[str, ...], Distinct] | str | None = None
    measure: str | None = None
    bound: Finite = 0.0
    less: Flag | None = None
    within: Positive | None = None
    at: str | None = None
    beyond: str | None = None

    def about(self, score: str) -> "Claim":
        """Return the claim, about a score if it names no measure."""
        return self if self.measure is not None else self.model_copy(update={"measure": score})

    @property
    def measured(self) -> str:
        """Return the measure; a claim that names none has to be `about` a score before."""
        assert self.measure is not None
        return self.measure

    @property
    def below(self) -> bool:
        """Tell whether the number must lie below the bound."""
        return self.measure in LOWER_IS_BETTER if self.less is None else self.less

    @property
    def rivals(self) -> tuple[str, ...]:
        """Return the names in `versus`."""
        return (self.versus,) if isinstance(self.versus, str) else self.versus or ()

    def gap(self, number: float) -> float:
        """Return how far a number lies on the claimed side of the bound; below zero it lies on the other side."""
        above = number - self.bound
        return self.within - abs(above) if self.within is not None else -above if self.below else above

    @model_validator(mode="after")
    def _says_one_thing(self) -> "Claim":
        if self.less and self.within is not None:
            raise ValueError("found `less` and `within`, allowed: one of them")
        if self.method in self.rivals:
            raise ValueError(f"found '{self.method}' as `method` and `versus`, allowed: two methods")
        if self.beyond is not None and self.beyond == self.at:
            raise ValueError(f"found '{self.beyond}' as `at` and `beyond`, allowed: two parts of the sweep")
        return self


class Experiment(Strict):
    """Description of an experiment: everything that a run depends on.

    Args:
        title: of the report.
        description: a sentence under the title.
        rounds: how many. With 0 nothing is trained: the models that methods begin with (`init_from`) are judged.
        seeds: every method is run with each.
        eval_every: rounds between evaluations; the last round is always judged.
        eval_clients: judge at most so many clients of each kind, drawn once; None means all.
        eval_splits: rows of each evaluation; None means all. "train_clients" and "held_out_clients" are test rows.
            "val" are validation rows (used to pick sweep points; personalizing methods train once more for them).
        metrics: computed at each evaluation besides accuracy and loss: "macro-f1", "auc", "perplexity",
            "bits-per-byte", and your own. All but your own without `needs` are for classes alone.
        accuracy_over: "rows" takes the share of right rows among all of them. "clients" takes the mean of the clients'
            accuracies. If the server gets sums of accuracies, it is always the mean over clients.
        embedding: frozen network used to measure how similar the clients of a cluster are, in addition to their labels;
            None means by labels alone.
        stop_at: ends each run at a target accuracy; None means that all play all rounds.
        keep: models that are kept beside the last one; None means none.
        checkpoint_every: rounds between checkpoints; None means about every 20 seconds. Changes no result.
        average_last: rounds over which late accuracy is averaged. None means two periods of the shift; on a calendar
            all rounds that make whole weeks (or days); else the last quarter of the rounds.
        baseline: the method that others are compared with, seed by seed.
        references: answers without a federation that are compared with methods, besides always the same answer.
            "last_label" is the last label of the same client before, of rows with times. "tree" is a boosted tree on
            the pooled training rows, at most 20,000; it needs scikit-learn (`pip install "fedtide[trees]"`).
        precision: of parameters and activations. "bf16" keeps parameters, sums, losses and predictions in fp32, and
            passes rows through the model in bfloat16. A line warns if a step then takes longer.
        data: the rows, and their clients.
        shift: changes with time.
        model: the network.
        devices: time that clients take on the simulated clock; None means a second a round.
        liars: clients that lie about their training; None means that all are honest.
        fleet: runs the clients' work.
        wire: how sums pass from clients to the server; None adds them in floating point, as they are sent.
        forgetting: rounds at which local client forgetting is measured; None means at none.
        method: the rows of the comparison.
        sweep: a grid: dotted keys, each with a list of values. Keys that change together stand side by side,
            `"shift.what.cycles, rounds" = [[3, 60], [10, 200]]`; the first names the points. Worlds
            that differ in whole tables are named by a swept `title`.
        claim: statements that the experiment tests.
        tune: the search of `fedtide tune`; None means none.
        deploy: where and when real clients are asked; None means the defaults.
        track: tracker that gets each round as it is played; None means none. Changes no result.
    """

    title: str = ""
    description: str = ""
    rounds: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 100
    seeds: Annotated[tuple[Whole, ...], Distinct] = (0,)
    eval_every: Count = 8
    eval_clients: Count | None = None
    eval_splits: tuple[EvalSplit, ...] | None = Field(None, min_length=1)
    metrics: tuple[
        Annotated[
            MacroF1 | AUC | Perplexity | BitsPerByte | OwnMetric, Field(discriminator="kind"), BeforeValidator(_metric)
        ],
        ...,
    ] = ()
    accuracy_over: Over = "rows"
    embedding: Annotated[Embedding | None, Spelled] = None
    stop_at: Annotated[StopAt | None, BeforeValidator(as_stop_at)] = None
    keep: Keep | None = None
    checkpoint_every: Count | None = None
    average_last: Count | None = None
    baseline: str | None = None
    references: tuple[Literal["last_label", "tree"], ...] = ()
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    data: Data = Data()
    shift: Shift = Shift()
    model: Annotated[Model, Spelled] = SmallCNN()
    devices: Annotated[Devices, Spelled] | None = None
    liars: Liars | None = None
    fleet: FleetSettings = Local()
    wire: WireSettings | None = None
    forgetting: Forgetting | None = None
    method: tuple[Method, ...] = Field(min_length=1)
    sweep: dict[str, Annotated[tuple[Any, ...], Distinct]] = Field(default_factory=dict)
    claim: tuple[Claim, ...] = ()
    tune: Tune | None = None
    deploy: Deploy | None = None
    track: Annotated[Track | None, Spelled] = None
    _imports: bool = PrivateAttr(True)

    @property
    def imports(self) -> bool:
        """Tell whether algorithms `module:function` were imported, and their options checked, when it was read."""
        return self._imports

    def shift_of(self, method: Method) -> Shift:
        """Return the shift that a method meets."""
        return self.shift if method.shift is None else method.shift

    @property
    def shift_rounds(self) -> int:
        """Rounds over which the shift is laid: all of them, and at least one."""
        return max(self.rounds, 1)

    @property
    def score(self) -> str:
        """Name of the headline number of evaluations."""
        return TARGET_WORDS[self.data.target.kind].score

    @property
    def metric_units(self) -> dict[str, Unit]:
        """Units of numbers that are recorded besides those of every experiment: of the target, and of `metrics`."""
        units: dict[str, Unit] = {name: OF_TARGETS[name].unit for name in TARGET_WORDS[self.data.target.kind].metrics}
        return units | {name: unit for metric in self.metrics for name, unit in units_of(metric).items()}

    @property
    def timing(self) -> Devices:
        """Time that clients take: `devices`, or steady devices."""
        return Steady() if self.devices is None else self.devices

    @property
    def privacy(self) -> Privacy | None:
        """Differential privacy of the study; None without it."""
        return None if self.wire is None else self.wire.privacy

    @property
    def period(self) -> float | None:
        """The period of the shift in rounds, of the first method that has one; None if none has."""
        periods = [self.shift.period, *(self.shift_of(method).period for method in self.method)]
        return next((period for period in periods if period is not None), None)

    @property
    def dated(self) -> bool:
        """True if rounds are windows of wall-clock time."""
        return isinstance(self.shift.what, Calendar)

    @property
    def late(self) -> int:
        """Rounds over which late accuracy is averaged.

        `average_last`, else two periods, on a calendar all whole weeks, else the last quarter.

        The last round is always judged, so that there is at least one evaluation in them.
        """
        if self.average_last:
            return min(self.average_last, self.shift_rounds)
        if self.period:
            return max(int(min(2 * self.period, self.rounds)), 1)
        whole = self.shift.what.whole(self.rounds) if isinstance(self.shift.what, Calendar) else None
        return max(self.rounds // 4, 1) if whole is None else whole


STUDIES = {
    "inspection": "fedtide.inspection.by_sums:inspection",
    "bounded-inspection": "fedtide.inspection.bounded:bounded_inspection",
    "tournament": "fedtide.tuning.between_clients:tournament",
}
"""Studies of ours: they are no methods, so they stand in no table of methods."""


def is_own(algorithm: str) -> bool:
    """Tell whether an algorithm is the user's own, `module:function`."""
    return algorithm not in REGISTRY and ":" in algorithm


def maker(algorithm: str, key: str = "method.algorithm") -> Callable[..., Algorithm]:
    """Return the function of a registered algorithm, or the user's own `module:function`; `key` is for errors."""
    if algorithm in REGISTRY:
        return REGISTRY[algorithm].make
    if algorithm in STUDIES or is_own(algorithm):
        make = imported(STUDIES.get(algorithm, algorithm), key)
        if not callable(make):
            raise refused(key, make, "a function that makes an Algorithm")
        return make
    module = algorithm.removesuffix(".py")
    if isfile(f"{module}.py"):
        raise refused(key, algorithm, f"'{module}:FUNCTION', a function of {module}.py")
    raise unknown(key, algorithm, [*REGISTRY, "your own module:function"])


@cache
def options_model(algorithm: str) -> type[Strict]:
    """Return the model of an algorithm's options: the signature of its function, without the task."""
    return options_of(maker(algorithm), algorithm)
