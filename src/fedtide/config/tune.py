"""The `[tune]` table: what is searched, where, and with how many trials."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedtide.fields.strict import Strict
from fedtide.fields.types import Count, Distinct, Finite, Flag, Positive, Whole


class Range(Strict):
    """Range of a search: between two numbers, or among some values.

    Args:
        low: the lowest number.
        high: the highest number.
        log: search the logarithm: as many trials between 0.01 and 0.1 as between 0.1 and 1.
        step: only `low`, `low + step`, ..., up to `high`.
        whole: only whole numbers.
        choices: in place of `low` and `high`, a list of values; tables are allowed.
        also: other keys of methods that get the value that was found, such as "method.Mixture.local.lr"; for ranges
            about one method.
    """

    low: Finite | None = None
    high: Finite | None = None
    log: Flag = False
    step: Positive | None = None
    whole: Flag = False
    choices: Annotated[tuple[Any, ...], Distinct] | None = None
    also: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_one(self) -> Range:
        if self.choices is not None:
            self._is_list()
        elif self.low is None or self.high is None:
            raise ValueError("found neither, allowed: `low` and `high`, or `choices`")
        else:
            self._is_interval(self.low, self.high)
        return self

    def _is_list(self) -> None:
        given = [name for name in ("low", "high", "step") if getattr(self, name) is not None]
        given += [name for name in ("log", "whole") if getattr(self, name)]
        for extra in given:
            raise ValueError(f"found `choices` and `{extra}`, allowed: one of them")

    def _is_interval(self, low: float, high: float) -> None:
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
    """Stage of a tuning, in the order of the file: values found by earlier stages stay fixed.

    Args:
        name: how the report calls it.
        methods: which methods are tuned; None means every method that one of the ranges is about.
        trials: for each of them; None means `tune.trials`.
        ranges: what is searched, as `tune.ranges`.
    """

    name: str = Field(min_length=1, max_length=100)
    methods: tuple[str, ...] | None = None
    trials: Count | None = None
    ranges: dict[str, Range] = Field(min_length=1)


class Tune(Strict):
    """Search of `fedtide tune`, by accuracy on validation rows; test rows are never looked at.

    Every method is tuned by itself, all with the same number of trials. `fedtide run` ignores this table.

    Args:
        sampler: "tpe" learns from the trials before where good values lie (tree-structured Parzen estimator), "random"
            draws.
        trials: for each method of a stage.
        startup_trials: how many trials of a method are drawn at random before "tpe" begins.
        parallel_trials: number of trials of a method that are asked for at once. They can run in parallel and cannot
            learn from each other; the result depends on this number and not on the number of processes.
        pruning: end a trial early whose accuracy is below the median of earlier trials at the same evaluation.
        seeds: what every trial plays; its accuracy is the mean. None means the first of the experiment.
        seed: of the search itself.
        ranges: what is searched: dotted keys of methods as in a sweep, "method.local.lr" for all or
            "method.FedProx.mu" for the method of that name.
        stage: in place of `ranges`, several searches one after the other.
    """

    sampler: Literal["tpe", "random"] = "tpe"
    trials: Count = 20
    startup_trials: Count = 8
    parallel_trials: Count = 4
    pruning: Flag = True
    seeds: Annotated[tuple[Whole, ...], Distinct] | None = None
    seed: Whole = 0
    ranges: dict[str, Range] = Field(default_factory=dict)
    stage: tuple[TuneStage, ...] = ()

    @model_validator(mode="after")
    def _searches(self) -> Tune:
        if bool(self.ranges) == bool(self.stage):
            found = "both" if self.ranges else "neither"
            raise ValueError(f"found {found}, allowed: a table `ranges` or [[tune.stage]] tables")
        names = [stage.name for stage in self.stage]
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise ValueError(f"stage '{twice}' stands twice")
        return self

    def stages(self) -> tuple[TuneStage, ...]:
        """The stages; one without a name where there are plain ranges."""
        return self.stage or (TuneStage.model_construct(name="", methods=None, trials=None, ranges=self.ranges),)
