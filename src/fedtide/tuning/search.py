"""What to try next. The one file that knows Optuna, which keeps nothing: it is told all trials anew each time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedtide.config import Range, Tune
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.tuning.plan import Search
from fedtide.tuning.trials import Trial

DIGITS = 4
"""Significant digits of a searched number: more would only make files hard to read."""


def imported_optuna() -> Any:
    """Optuna.

    Raises:
        FedtideError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise FedtideError('fedtide tune: the search needs Optuna; pip install "fedtide[tune]"') from None
    return optuna


def asked(search: Search, before: Sequence[Trial], tune: Tune, count: int) -> list[dict[str, Any]]:
    """The values of the next `count` trials of a method: keys as in the file.

    They follow from the seed and from the trials before alone, in whatever process and after whatever stop they are
    asked for.

    Args:
        search: which method, and its parameters.
        before: all its trials of this stage before, in order.
        tune: sampler and seed.
        count: how many are asked together; none of them knows what the others find.
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
        study.add_trials([_known(search, trial, space) for trial in before])
        return [_values(search, study.ask(space).params) for _ in range(count)]


def distribution(range_: Range) -> Any:
    """A range as Optuna has it; values of a list by their place, so that tables can be among them."""
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


def _value(range_: Range, found: Any) -> Any:
    if range_.choices is not None:
        return range_.choices[found]
    if range_.whole:
        return int(found)
    assert range_.low is not None
    assert range_.high is not None
    return min(max(float(f"{found:.{DIGITS}g}"), range_.low), range_.high)


def _known(search: Search, trial: Trial, space: dict[str, Any]) -> Any:
    """A trial that was played, as Optuna takes it."""
    optuna = imported_optuna()
    lists = {p.key: p.range.choices for p in search.parameters}
    params = {
        key: value if (choices := lists[key]) is None else choices.index(value) for key, value in trial.values.items()
    }
    seen = dict(enumerate(value for curve in trial.curves for value in curve.accuracy))
    if trial.state == "finished":
        return optuna.trial.create_trial(params=params, distributions=space, value=trial.accuracy)
    # One that failed is told as pruned at once, so that the search keeps away from there; Optuna forgets failures.
    seen = seen if trial.state == "pruned" else {}
    state = optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(state=state, params=params, distributions=space, intermediate_values=seen)


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """No log of every study, and no warning that part of a sampler is experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
