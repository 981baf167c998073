"""The tune folder: its files, and `trials.jsonl`, the whole memory of a tuning.

config.toml         the whole configuration, every default written out
environment.json    versions, machine, command
trials.jsonl        a line per trial of a method: its values, its accuracy at every evaluation, its outcome
tuned.toml          the experiment with the best values, ready to run
report.html         ranges, trials and best values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtide.config import Experiment, brief, from_dict, is_own, read, to_toml
from fedtide.core.atomic import flush, replacing, write_text
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_rounds
from fedtide.runs.folder import check_entries, made
from fedtide.tuning.plan import Place, Search, digest_of_tuning, stages, with_values
from fedtide.tuning.trials import Trial, best_of, read_trial

TRIALS = "trials.jsonl"
READY = "tuned.toml"
COMMENT = "# Written by fedtide tune, with the values that it found.\n"


def create(experiment: Experiment, root: Path) -> None:
    """Create a new tune folder.

    Raises:
        FedtideError: something exists at `root`; it is left as it is.
    """
    made(root, {"config.toml": to_toml(experiment), TRIALS: ""})


def is_tuning(root: Path) -> bool:
    """Tell whether a folder is a tune folder and not a run folder."""
    return (root / TRIALS).is_file() and (root / "config.toml").is_file()


def load(root: Path, *, imports: bool = True) -> Experiment:
    """Return the experiment of a tune folder, as read for tuning; see `fedtide.config.read` for `imports`.

    Raises:
        FedtideError: there is something else in it than folders and files.
    """
    check_entries(root)
    return read(root / "config.toml", timed=False, imports=imports)


def read_trials(root: Path, planned: Sequence[Sequence[Search]], config: str | None) -> list[Trial]:
    """Return the recorded trials; an incomplete last line is ignored.

    Args:
        root: the tune folder.
        planned: the searches of each stage.
        config: digest of the configuration that they have to belong to; None where that is not known.

    Raises:
        FedtideError: a line is damaged, or belongs to another configuration.
    """
    searches = {(search.stage, search.method): search for stage in planned for search in stage}
    out = []
    for number, line in enumerate(read_rounds(root, TRIALS), start=1):
        trial = read_trial(line, f"{root / TRIALS}: line {number}")
        if config not in (None, trial.config):
            raise FedtideError(
                f"{root / TRIALS}: line {number} belongs to another configuration (digest {trial.config}, config.toml "
                f"has {config}); restore config.toml or start a new tune folder"
            )
        search = searches.get((trial.stage, trial.method))
        keys = [] if search is None else [parameter.key for parameter in search.parameters]
        if search is None or not 0 <= trial.number < search.trials or sorted(trial.values) != sorted(keys):
            raise FedtideError(f"{root / TRIALS}: line {number}: damaged: no trial that config.toml asks for")
        out.append(trial)
    return out


def write_trials(root: Path, trials: Sequence[Trial]) -> None:
    """Rewrite all lines in order, without a line that a killed process left half-written."""
    with replacing(root / TRIALS) as temporary:
        temporary.write_text("".join(trial.line() + "\n" for trial in trials), encoding="utf-8")
        flush(temporary)


def append_trial(root: Path, trial: Trial) -> None:
    """Append a line and sync it to disk."""
    with open(root / TRIALS, "a", encoding="utf-8") as file:
        file.write(trial.line() + "\n")
    flush(root / TRIALS)


def write_ready(root: Path, experiment: Experiment, found: Sequence[tuple[Place, object]]) -> Path:
    """Write the experiment with the best values, without search and sweep, ready for `fedtide run`."""
    path = root / READY
    values = {key: value for key, value in with_values(experiment, found).items() if key != "sweep"}
    ready = from_dict(values, where=str(path))
    write_text(path, f"{COMMENT}{brief(ready)}\n")
    return path


@dataclass(frozen=True)
class Tuned:
    """Result of one method in one stage: search, every trial, and the best one (None where none is finished)."""

    search: Search
    trials: list[Trial]
    best: Trial | None


def read_tuning(root: Path) -> tuple[Experiment, list[list[Tuned]]]:
    """Return the experiment of a tune folder and, for each stage, the result of each method.

    Raises:
        FedtideError: the folder is not that of a tuning, or is damaged.
    """
    if not is_tuning(root):
        raise FedtideError(f"{root}: not a tune folder (no {TRIALS} and config.toml in it)")
    experiment = load(root, imports=False)
    planned = stages(experiment, str(root / "config.toml"))
    known = not any(is_own(method.algorithm) for method in experiment.method)
    trials = read_trials(root, planned, digest_of_tuning(experiment) if known else None)
    return experiment, [[_tuned(trials, search) for search in stage] for stage in planned]


def _tuned(trials: Sequence[Trial], search: Search) -> Tuned:
    own = of_search(trials, search)
    return Tuned(search, own, best_of(own))


def of_search(trials: Sequence[Trial], search: Search) -> list[Trial]:
    """Return the trials of a method in a stage, in order."""
    own = [trial for trial in trials if (trial.stage, trial.method) == (search.stage, search.method)]
    return sorted(own, key=lambda trial: trial.number)
