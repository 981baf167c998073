"""Real time: what does not fit is one line, and runs on a calendar are recorded and resumed."""

import json
from dataclasses import replace

import pytest
import torch

from fedtide.config import read
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import IID, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows, with_learned
from fedtide.data.shift import Calendar, Shift, Stream
from fedtide.data.shift.who import Data
from fedtide.evaluate.judge import Judge, views
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import Run
from helpers.toys import played, toy


def rows(**changes) -> Rows:
    """240 rows, an hour apart, from the beginning of 1970."""
    made = Rows("toy", torch.randn(240, 3), torch.arange(240) % 3, 3, time=torch.arange(240) * 3600.0)
    return replace(made, **changes)


def people(calendar: Calendar, source: Rows | None = None, split: Split = Split(), **shift) -> Population:
    return build(source or rows(), IID(clients=4), split=split, shift=Shift(what=calendar, **shift))


REFUSED = [
    (lambda: Calendar(window="1w"), "Calendar.window: found '1w', allowed: a number and s, m, h or d"),
    (lambda: Calendar(window="1d", hold="12h"), "found hold 12h and window 1d, allowed: a longer hold"),
    (lambda: Calendar(hold="some"), "Calendar.hold: found 'some', allowed: a time of a window or more such as"),
    (lambda: Calendar(zone="Berlin"), "Calendar.zone: found 'Berlin', allowed: a time zone"),
    (lambda: Calendar(begin="the 3rd"), "Calendar.begin: found 'the 3rd', allowed: ISO 8601"),
    (lambda: people(Calendar(), rows(time=None)), "shift.what.kind: found 'calendar', but rows of toy have no time;"),
    (lambda: people(Calendar(), rows(time=torch.ones(240))), "rows of toy have all the same time; allowed: a"),
    (
        lambda: people(Calendar(), rows(time=torch.arange(240) * 1e13)),
        "times of toy go from 0 to 2.39e.15; allowed: times that are dates, in seconds since 1970",
    ),
    (
        lambda: people(Calendar(begin="1970-02-01")),
        "shift.what.begin: found '1970-02-01 00:00', but no row comes after it; allowed: a time from "
        "1970-01-01 00:00 to 1970-01-10 23:00",
    ),
    (
        lambda: people(Calendar(begin="1970-01-01T23:00"), with_learned(rows(), torch.arange(24))),
        "shift.what.begin: found '1970-01-01 23:00', but scales, categories and bins are those of the rows until then; "
        "allowed: a time after 1970-01-01 23:00",
    ),
    (lambda: people(Calendar(window="1s", begin="1900-01-01")), "window: found '1s', allowed: at most 1000000 windows"),
    (
        lambda: people(Calendar(), split=Split(test=0.2)),
        "data.split.test: found 0.2, but shift.what is 'calendar', which tests on rows as they come; allowed",
    ),
    (
        lambda: people(Calendar(), rows(held_out=torch.arange(240) > 200)),
        "data.source: found 'toy', but shift.what is 'calendar', .*allowed: a source without a test set of its own",
    ),
    (
        lambda: build(rows(), IID(clients=4), shift=Shift(who=Data())),
        "shift.who.kind: found 'data', but what is 'static'; allowed: what = 'calendar', or who = 'always'",
    ),
    (lambda: build(rows(), IID(clients=4), shift=Shift(who=Data(), what=Stream())), "'data', but what is 'stream'"),
    (
        lambda: people(Calendar(begin="1970-01-02")).check(9),
        "rounds: found 9, but there are 9 windows of 1d, 1970-01-02 00:00 to 1970-01-11 00:00, and each is tested "
        "on the next; allowed: at most 8",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_does_not_fit_is_one_clear_line(make, said):
    with pytest.raises(FedtideError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


def test_as_many_rounds_as_have_a_next_window_are_played():
    people(Calendar(begin="1970-01-02")).check(8)
    assert people(Calendar(begin="1970-01-02"), clock="seconds").plan.windows == 9


def test_rows_of_clients_that_have_left_are_not_used():
    whole, moment = people(Calendar(begin="1970-01-02")), Moment(3, 8)
    some, own = whole.without(["0"], "left"), whole.parts["train"][0]
    assert torch.isin(own, whole.training_rows(moment)[0]).any()
    rows, owner = some.training_rows(moment)
    assert owner.unique().tolist() == [1, 2, 3]
    assert not torch.isin(torch.cat([rows, some.trained_on]), own).any()
    assert len(some.trained_on) == len(whole.trained_on) - len(own)


STUDY = """
title = "A week"
rounds = 12
seeds = [0]
eval_every = 1
[data.source]
path = "log.csv"
kind = "csv"
label = "label"
client = "user"
time = "when"
[shift]
who = "data"
[shift.what]
kind = "calendar"
window = "12h"
hold = "1d"
begin = "2026-03-02"
[model]
kind = "linear"
[defaults]
cohort = "everyone"
[[method]]
name = "FedAvg"
algorithm = "fedavg"
[[method]]
name = "IFCA"
algorithm = "ifca"
clusters = 2
"""


@pytest.fixture
def study(tmp_path):
    """Eight days of a log of three users, without rows from noon on the 4th to the midnight of the 6th."""
    lines = ["when,user,a,b,label"]
    for hour in range(0, 8 * 24, 2):
        day = 1 + hour // 24
        if (day, hour % 24) < (4, 12) or day > 5:
            user = ("ann", "bob", "cy")[hour // 2 % 3]
            lines.append(f"2026-03-0{day}T{hour % 24:02}:00:00,{user},{hour % 7},{hour % 5},{hour // 12 % 2}")
    (tmp_path / "log.csv").write_text("\n".join(lines), encoding="utf-8")
    path = f'path = "{tmp_path / "log.csv"}"'
    (tmp_path / "study.toml").write_text(STUDY.replace('path = "log.csv"', path), encoding="utf-8")
    return tmp_path


def test_windows_without_rows_are_played_and_said(study):
    experiment = read(study / "study.toml")
    for method in experiment.method:
        run = Run(experiment, method, 0, study / "run" / method.name / "0")
        list(run.play())
        lines = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        came = [line["window"]["came"] for line in lines]
        # Rounds 0 to 4 end at noon on the 4th, and the windows of rounds 5 to 7 are without rows.
        assert came == [3, 3, 3, 3, 3, 0, 0, 0, 3, 3, 3, 3]
        assert [line["trained"][1] for line in lines] == came
        assert [bool(line["scores"]["train_clients"]) for line in lines] == [bool(there) for there in [*came[1:], 3]]
        assert lines[0]["window"]["next"] == "2026-03-02T12:00:00+00:00"


CALENDAR = {
    "data": {"source": {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "domains": 2, "every": 7200.0},
             "split": {"val": 0.2}},
    "shift": {"who": "data", "what": {"kind": "calendar", "window": "12h", "hold": "1d", "begin": "1970-01-02"}},
}  # fmt: skip


def on_calendar(algorithm: str):
    made = toy(algorithm, **CALENDAR)
    return made.model_copy(update={"data": made.data.model_copy(update={"split": Split(val=0.2)})})


def test_a_run_on_a_calendar_resumes_with_the_same_bytes(tmp_path):
    experiment = on_calendar("fedavg")
    preflight(experiment)
    for name in ("whole", "cut"):
        run = Run(experiment, experiment.method[0], 0, tmp_path / name / "A" / "0")
        if name == "cut":
            list(run.play(stop=lambda: True))
        list(run.play())
    for file in ("clients.csv", "rounds.jsonl"):
        whole, cut = ((tmp_path / name / "A" / "0" / file).read_bytes() for name in ("whole", "cut"))
        assert whole == cut


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=[] if name in ("fedavg", "fedtem", "fielding", "aem stops") else pytest.mark.thorough)
        for name in ("fedavg", "ifca", "fedtem", "fedtkm", "scaffold", "fielding", "flexcfl", "auxo", "feddrift",
                     "aem stops", "pfedem", "fedem", "local", "centralized", "oracle")
    ],
)  # fmt: skip
def test_algorithms_play_on_a_calendar(algorithm):
    run = played(on_calendar(algorithm), rounds=4)
    judge = Judge(run.host.algorithm, run.fleet, views(run.host.population))
    judged = list(judge.scores(run.state))
    assert [view.name for view, _, _ in judged] == ["train_clients", "held_out_clients", "val"]
    for _, scores, slot in judged:
        assert float(scores.rows.sum()) > 0
        assert torch.isfinite(scores.loss).all()
        assert slot is None or int(slot.min()) >= 0


@pytest.mark.parametrize("calendar", [True, False])
def test_who_is_judged_on_rows_to_come_may_decide_by_those_that_came(calendar):
    """Elsewhere validation rows that are judged are withheld from a client's choice."""
    experiment = on_calendar("ifca")
    if not calendar:
        experiment = experiment.model_copy(update={"shift": toy("ifca").shift})
    run, seen = played(experiment, rounds=4), []
    adapt = run.host.algorithm.adapt

    def watched(payload, memory, shard, moment, rng):
        seen.append((shard.val, moment))
        return adapt(payload, memory, shard, moment, rng)

    object.__setattr__(run.host.algorithm, "adapt", watched)
    people = run.host.population
    judge = Judge(run.host.algorithm, run.fleet, views(people, named=["val"]))
    list(judge.scores(run.state))
    moment = seen[0][1]
    judged = {row for client in people.clients.tolist() for row in people.held(client, moment, "val").tolist()}
    decided = {row for val, _ in seen if val is not None for row in val.ids.tolist()}
    assert judged
    assert bool(decided) is calendar
    assert not judged & decided
