"""Choice of the next trials. Only this file uses Optuna, which stores nothing: it is told all trials each time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedtide.config import Range, Tune
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.tuning.stages import Search
from fedtide.tuning.trials import Trial

DIGITS = 4
"""Significant digits of a searched number; more would only make files hard to read."""


def imported_optuna() -> Any:
    """Return the Optuna module.

    Raises:
        FedtideError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise FedtideError('fedtide tune: the search needs Optuna; pip install "fedtide[tune]"') from None
    return optuna


def asked(search: Search, before: Sequence[Trial], tune: Tune, count: int) -> list[dict[str, Any]]:
    """Return the values of the next `count` trials of a method, by the keys of the file.

    They depend on the seed and the earlier trials alone, not on the process or on stops in between.

    Args:
        search: the method and its parameters.
        before: all its earlier trials of this stage, in order.
        tune: sampler and seed.
        count: number of trials asked together; none of them knows the results of the others.
    """
    optuna = imported_optuna()
    space = {parameter.key: distribution(parameter.range) for parameter in search.parameters}
    number = Rng(tune.seed).at("tune", search.stage, search.method, len(before)).number % 2**32
    with _quiet(optuna):
        if tune.sampler == "random":
            sampler = optuna.samplers.RandomSampler(seed=number)
        else:
            sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=tune.startup_trials, constant_liar=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_as_optuna(search, trial, space) for trial in before])
        return [_values(search, study.ask(space).params) for _ in range(count)]


def distribution(range_: Range) -> Any:
    """Return a range as an Optuna distribution; values of a list by index, so that tables can be among them."""
    optuna = imported_optuna()
    if range_.choices is not None:
        return optuna.distributions.CategoricalDistribution(tuple(range(len(range_.choices))))
    assert range_.low is not None
    assert range_.high is not None
    if range_.whole:
        step = 1 if range_.step is None else int(range_.step)
        return optuna.distributions.IntDistribution(int(range_.low), int(range_.high), log=range_.log, step=step)
    return optuna.distributions.FloatDistribution(range_.low, range_.high, log=range_.log, step=range_.step)


def _values(search: Search, params: dict[str, Any]) -> dict[str, Any]:
    return {p.key: _value(p.range, params[p.key]) for p in search.parameters}


def _value(range_: Range, value: Any) -> Any:
    if range_.choices is not None:
        return range_.choices[value]
    if range_.whole:
        return int(value)
    assert range_.low is not None
    assert range_.high is not None
    return min(max(float(f"{value:.{DIGITS}g}"), range_.low), range_.high)


def _as_optuna(search: Search, trial: Trial, space: dict[str, Any]) -> Any:
    """Return a trial that was played, as an Optuna trial."""
    optuna = imported_optuna()
    lists = {p.key: p.range.choices for p in search.parameters}
    params = {
        key: value if (choices := lists[key]) is None else choices.index(value) for key, value in trial.values.items()
    }
    seen = dict(enumerate(value for curve in trial.curves for value in curve.accuracy))
    if trial.state == "finished":
        return optuna.trial.create_trial(params=params, distributions=space, value=trial.accuracy)
    # A failed trial is told as pruned at once, so that the search avoids its values; Optuna ignores failures.
    seen = seen if trial.state == "pruned" else {}
    state = optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(state=state, params=params, distributions=space, intermediate_values=seen)


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence the log of every study and the warning that part of a sampler is experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
