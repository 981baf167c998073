"""Costs by hand: time to a target from records written for it, the simulated clock, and the privacy budget."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedtide.config import Claim, from_dict
from fedtide.core.errors import FedtideError
from fedtide.core.record import ASKS, read_lines
from fedtide.evaluate.metrics import METRICS
from fedtide.report.claims import format_claim, judge
from fedtide.report.costs import (
    accuracy_against,
    clock_table,
    clustering_table,
    cost_table,
    epsilon_and_accuracy,
    measure,
)
from fedtide.report.narrative import alarms
from fedtide.report.page import write_report
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, read_experiment
from fedtide.report.study import summarize
from fedtide.report.summary import NO_SCORES
from fedtide.report.topics import PICTURES, check_measures
from fedtide.runs import folder
from fedtide.wire.accounting import Sampling, epsilon_of, mu_of, sampled_epsilon
from helpers.records import LINE
from helpers.studies import A, finished, lines_of, raw, run_of, study

EVERY = 2
METRIC_NAMES = [metric.name for metric in METRICS]

CURVES = {
    "Base": [[0.2, 0.4, 0.6, 0.5, 0.55], [0.3, 0.5, 0.6, 0.7, 0.8], [0.1, 0.2, 0.3, 0.3, 0.4]],
    "Ours": [[0.3, 0.6, 0.54, 0.6, 0.7], [0.3, 0.5, 0.6, 0.7, 0.7], [0.4, 0.4, 0.5, 0.6, 0.7]],
    "Late": [[0.2, 0.3, 0.4, 0.5, 0.5], [0.2, 0.3, 0.4, 0.8, 0.9], [0.1, 0.2, 0.3, 0.3, 0.3]],
}
"""Accuracies after 2, 4, 6, 8 and 10 rounds of each seed; the targets are 0.55, 0.8 and 0.4."""

CLOCK = {"Base": 2.0, "Ours": 3.0, "Late": 1.0}


def record(tmp_path, *, seconds=None, average_last=10, seeds=3, curves=CURVES) -> ExperimentRecord:
    """Runs with these curves; `seconds` is how long a round of each method takes."""
    settings = {"rounds": 10, "seeds": list(range(seeds)), "baseline": "Base", "average_last": average_last}
    settings |= {} if seconds is None else {"devices": "log-normal"}
    experiment = from_dict(raw(*({**A, "name": name} for name in curves), **settings))
    methods = []
    for method in experiment.method:
        runs = []
        for seed, values in enumerate(curves[method.name]):
            path = tmp_path / method.name / str(seed)
            path.mkdir(parents=True)
            length = 1.0 if seconds is None else seconds[method.name]
            lines = [{**LINE, "round": n, "seconds": length * (n + 1)} for n in range(EVERY * len(values))]
            for place, value in enumerate(values, start=1):
                lines[EVERY * place - 1]["scores"] = {"train_clients": dict.fromkeys(METRIC_NAMES, value)}
            (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            runs.append(RunRecord(seed, path, EVERY * len(values)))
        methods.append(MethodRecord(method, experiment, runs, 0))
    return ExperimentRecord("", experiment, methods)


def values(summary, name, measure):
    return summary.method(name).measures[measure].values


def sooner(summary, method="Ours", versus="Late", **options):
    claim = Claim(text="x", method=method, versus=versus, **{"measure": "time_to_accuracy", "less": True, **options})
    return judge(summary.methods, claim, summary.units)


def times(record):
    summary = summarize(record)
    table = cost_table(record, summary)
    return table.header[-1], {row[0]: row[-1] for row in table.rows}


@pytest.mark.parametrize("average_last", [1, 4, 10])
def test_the_target_is_the_end_of_the_baseline_of_the_same_seed(tmp_path, average_last):
    """Ours stays at .55 or more from round 8, at .8 never, at .4 from the first evaluation on."""
    summary = summarize(record(tmp_path, average_last=average_last))
    assert values(summary, "Ours", "time_to_accuracy") == [8.0, 10.0, 2.0]
    assert values(summary, "Ours", "reached_accuracy") == [1.0, 0.0, 1.0]
    # The baseline is there at its end at the latest; in the first seed it was there before, and left.
    assert values(summary, "Base", "time_to_accuracy") == [10.0, 10.0, 10.0]
    assert values(summary, "Base", "reached_accuracy") == [1.0, 1.0, 1.0]
    assert values(summary, "Late", "time_to_accuracy") == [10.0, 8.0, 10.0]
    assert values(summary, "Late", "reached_accuracy") == [0.0, 1.0, 0.0]


def test_a_baseline_that_predicts_nothing_at_its_end_is_no_target(tmp_path):
    """In the last seed its last evaluation has no accuracy."""
    ends = [*CURVES["Base"][:2], [0.1, 0.2, 0.3, 0.3, None]]
    played = record(tmp_path, curves={**CURVES, "Base": ends})
    assert summarize(played).method("Ours").measures["time_to_accuracy"].mean is None
    assert times(played)[1]["Ours"] == "-"


def test_a_seed_that_never_arrives_counts_with_the_end_of_its_run(tmp_path):
    """(8, 10, 2): standard deviation sqrt(104/6) = 4.163, error 2.404."""
    assert times(record(tmp_path)) == ("rounds to the final accuracy of Base", {
        "Base": "10 rounds",
        "Ours": "≥ 6.7 ± 2.4 rounds (2 of 3 seeds)",
        "Late": "≥ 9.3 ± 0.7 rounds (1 of 3 seeds)",
    })  # fmt: skip
    never = record(tmp_path / "never", curves={**CURVES, "Ours": [[0.1] * 5] * 3})
    assert times(never)[1]["Ours"] == "not reached"


def test_the_difference_of_times_by_hand(tmp_path):
    """Ours minus Late: 8 - 10, 10 - 8, 2 - 10: the first and the last are at least so much."""
    claim = sooner(summarize(record(tmp_path)))
    assert claim.number.values == [-2.0, 2.0, -8.0]
    assert (claim.reached, claim.verdict) == ([2, 1], "not seen")
    assert format_claim(claim) == "-2.7 ± 2.9 rounds; 2 and 1 of 3 seeds arrive"


@pytest.mark.parametrize(("ours", "verdict"), [(0.4, "not seen"), (0.4001, "holds")])
def test_a_seed_at_which_only_the_rival_arrives_is_open(tmp_path, ours, verdict):
    """Ours minus Late is 2 - 10 at six seeds. At the seventh it is 2 - 8 if ours gets to .4001; if not it is 10 - 8.

    Both means are clear, but the run that ended too early may arrive after a thousand rounds.
    """
    curves = {
        "Base": [[0.2, 0.3, 0.4, 0.4, 0.4001]] * 7,
        "Ours": [[0.5] * 5] * 6 + [[ours] * 5],
        "Late": [[0.1] * 5] * 6 + [[0.1, 0.1, 0.1, 0.5, 0.5]],
    }
    summary = summarize(record(tmp_path, seeds=7, curves=curves))
    assert sooner(summary).verdict == verdict
    assert sooner(summary, "Late", "Ours", less=False).verdict == verdict


def test_rounds_without_training_cost_their_judgment_by_hand(tmp_path):
    """Four participants of eight rows: training is 32 samples, a judgment a third of that. 43 weights are 172 bytes.

    Up come a share and a weight of 8 bytes, and in rounds that train the update, two weights and a loss.
    """
    on_need = {**A, "name": "sparing", "transforms": [{"kind": "on-need", "rise": 0.05, "patience": 1}]}
    root = finished(tmp_path / "run", study(A, on_need, rounds=12))
    (record,) = read_experiment(root)
    summary, name = summarize(record), "sparing (on need)"
    lines = lines_of(record.methods[1].runs[0].folder)
    trained = [bool(line["trained"][0]) for line in lines]
    assert 0 < sum(trained) < 12
    for line, trains in zip(lines, trained, strict=True):
        assert line["samples"] == pytest.approx(32 / 3 + 32 * trains)
        assert (line["down"], line["up"]) == (4 * 172 * (1 + trains), 4 * (16 + 196 * trains))
        assert ("loss" in line["facts"]) is trains
    assert values(summary, name, "rounds_trained") == [sum(trained)]
    accuracy = values(summary, name, "mean_over_rounds")[0]
    assert values(summary, name, "per_million_samples")[0] == pytest.approx(accuracy * 1e6 / (128 + 32 * sum(trained)))
    table = cost_table(record, summary)
    column = table.header.index("rounds with training")
    assert [row[column] for row in table.rows] == ["12", str(sum(trained))]
    # Without pauses nothing is said of them.
    alone = replace(record, methods=record.methods[:1])
    assert "rounds with training" not in cost_table(alone, summarize(alone)).header


def test_with_a_clock_times_are_seconds_and_cut_at_the_end_of_the_shorter_run(tmp_path):
    """A round of Ours takes 3 s, of Late 1 s: Late ends at 10 s, Ours at 30 s.

    Seed 0: Ours arrives at 24 s; Late has not at 10 s, and who would be first is not known: 0. Seed 1: Late at 8 s,
    Ours not by 30 s: at least 22. Seed 2: Ours at 6 s, Late not by 10 s: at most -4.
    """
    timed = record(tmp_path, seconds=CLOCK)
    summary = summarize(timed)
    assert values(summary, "Ours", "time_to_accuracy") == [24.0, 30.0, 6.0]
    assert values(summary, "Late", "time_to_accuracy") == [10.0, 8.0, 10.0]
    assert values(summary, "Ours", "simulated_seconds") == [30.0] * 3
    claim = sooner(summary)
    assert claim.number.values == [0.0, 22.0, -4.0]
    assert format_claim(claim) == "+6.0 ± 8.1 s; 2 and 1 of 3 seeds arrive"
    assert times(timed)[0] == "simulated time to the final accuracy of Base"
    untimed = summarize(record(tmp_path / "rounds"))
    assert (summary.clock, untimed.clock) == ("seconds", "rounds")
    assert "simulated_seconds" not in untimed.method("Base").measures


def test_real_clients_have_no_simulated_clock(tmp_path):
    real = record(tmp_path, seconds=CLOCK)
    for run in real.runs:
        (run.folder / ASKS).write_text('{"round": 0, "present": [], "asks": []}\n')
    summary = summarize(real)
    assert summary.clock == "rounds"
    assert "simulated_seconds" not in summary.method("Base").measures
    assert clock_table(real, summary) is None


@pytest.mark.parametrize(("accuracies", "loss", "stuck"), [
    ([0.4, 0.4, 0.4, 0.4, 0.4], 0.7, True),  # the entropy of hits and misses is 0.673
    ([0.4, 0.4, 0.4, 0.4, 0.4], 0.6, False),
    ([0.4, 0.4, 0.4, 0.4, 0.5], 0.7, False),
    ([1.0, 1.0, 1.0, 1.0, 1.0], 0.7, False),
    ([0.4, 0.4], 0.7, False),
])  # fmt: skip
def test_a_model_of_real_clients_that_answers_one_class_is_told(tmp_path, accuracies, loss, stuck):
    real = record(tmp_path, seeds=1, curves={"Base": [accuracies]})
    assert not summarize(real).method("Base").measures["one_answer"].values[0]
    (folder,) = [run.folder for run in real.runs]
    (folder / ASKS).write_text('{"round": 0, "present": [], "asks": []}\n')
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["scores"] = {view: scores | {"loss": loss} for view, scores in line.get("scores", {}).items()}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    real = ExperimentRecord("", real.experiment, [replace(real.methods[0], runs=[replace(real.runs[0])])])
    told = [line for line in alarms(summarize(real)) if "seems to answer one class" in line]
    assert len(told) == stuck
    assert all("not scaled (data.source.scaled)" in line for line in told)


def test_a_seed_that_does_not_arrive_passes_no_bound_from_below(tmp_path):
    summary = summarize(record(tmp_path))
    assert sooner(summary, versus=None, bound=100.0).verdict == "not seen"
    assert sooner(summary, "Base", None, bound=9.0, less=False).verdict == "holds"


# -- the simulated clock -----------------------------------------------------------------------------------------------

HASTY = {**A, "name": "hasty", "cohort": {"kind": "uniform", "clients_per_round": 3, "over_selection": 1.5}}


def played(root, *methods, **changes):
    experiment = study(*methods, **{"shift": {"who": "always"}, **changes})
    folder.create(experiment, root)
    for number in range(len(methods)):
        list(run_of(experiment, root, method=number).play())
    return read_experiment(root)[0]


def test_of_five_that_are_asked_the_first_three_count(tmp_path):
    record = played(tmp_path / "run", HASTY, A, devices="log-normal", eval_every=2)
    lines = lines_of(tmp_path / "run" / "hasty" / "0")
    assert [line["trained"] for line in lines] == [[5, 3]] * 6
    table = clock_table(record, summarize(record))
    assert table.rows[0] == ["hasty", f"{lines[-1]['seconds']:.1f} s", "5", "3", "60.0 %"]
    assert table.rows[1][2:] == ["4", "4", "100.0 %"]


def test_runs_that_stop_have_means_over_fewer_rounds(tmp_path):
    record = played(tmp_path / "run", A, stop_at={"accuracy": 0.0}, average_last=4)
    assert summarize(record).span == record.span == "its last 4 rounds or fewer"


def test_a_target_that_came_after_a_rollback_is_reached_at_evaluations_that_count(tmp_path):
    """Evaluations after 2, 4 and 6 rounds; that after 4 is undone, and the target wants two in a row."""
    record = played(tmp_path / "run", A, stop_at={"accuracy": 0.0, "evaluations": 2}, eval_every=2, rounds=12)
    folder = record.methods[0].runs[0].folder
    lines = lines_of(folder)
    assert len(lines) == 4
    more = [{**line, "round": line["round"] + 2} for line in lines[2:]]
    more[0]["rolled_back_to"] = 2
    lines[-1].pop("stopped")
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
    assert measure(record, record.methods[0], RunRecord(0, folder, 12))["rounds_to_target"] == 2.0


# -- the privacy budget ------------------------------------------------------------------------------------------------

PRIVACY = {"epsilon": 4.0, "clip": {"delta": 1.0, "loss": 1.0}, "noise": "banded", "distance": 2}


@pytest.mark.parametrize("privacy", [PRIVACY, None])
def test_a_private_run_has_a_picture_of_its_budget(tmp_path, privacy):
    wire = {"secure": False, "fewest": 1, **({"privacy": privacy} if privacy else {})}
    record = played(tmp_path / "run", A, wire=wire, eval_every=2)
    drawn = epsilon_and_accuracy(record)
    if privacy is None:
        assert drawn is None
        return
    spent = [line["epsilon"] for line in lines_of(record.methods[0].runs[0].folder)]
    assert drawn.figure.axes[0].lines[0].get_ydata().tolist() == spent == sorted(spent)
    assert 0 < spent[-1] <= 4.0


def uniform(name):
    return {**A, "name": name, "cohort": {"kind": "uniform", "clients_per_round": 2}}


@pytest.mark.parametrize("drawn", [False, True])
def test_the_report_of_a_private_study_says_what_all_runs_spend_and_nothing_of_single_clients(tmp_path, drawn):
    """Two methods and two seeds: four times the releases of one, of which the caption has the sum and no mean."""
    if drawn:
        pytest.importorskip("dp_accounting")
    methods = [uniform("A"), uniform("B")] if drawn else [A, {**A, "name": "B"}]
    privacy = {**PRIVACY, "noise": "plain", "epsilon": None, "multiplier": 2.0, "distance": None if drawn else 2}
    privacy = {key: value for key, value in privacy.items() if value is not None}
    wire = {"secure": False, "fewest": 1, "privacy": privacy}
    shift = {"who": {"kind": "always"}} if drawn else {}
    root = finished(tmp_path / "run", study(*methods, seeds=[0, 1], wire=wire, **({"shift": shift} if drawn else {})))
    (record,) = read_experiment(root)
    spent = [run.lines[-1]["epsilon"] for run in record.runs]
    assert len(spent) == 4
    if drawn:
        total = sampled_epsilon(2.0, Sampling(2, 8), 4 * len(record.runs[0].lines), 1e-5)
    else:
        total = epsilon_of(math.hypot(*(mu_of(epsilon, 1e-5) for epsilon in spent)), 1e-5)
    assert record.spent == pytest.approx(total, rel=1e-3)
    assert record.spent > max(spent) * 1.5
    page = write_report([root]).read_text()
    assert f"All 4 runs, of all methods and seeds, together come to epsilon {record.spent:.3g}." in page
    assert all(words in page for words in ("delta 1e-05", "known from its seed", "single clients are left out"))
    assert NO_SCORES not in page
    measures = json.loads((root / "summary.json").read_text())["methods"][0]["measures"]
    assert {"accuracy", "epsilon"} <= measures.keys()
    assert not {"worst_decile", "q10", "q50", "q90", "client_std", "first_loss", "peak_loss"} & measures.keys()
    shown = {plan.name: plan(record) is not None for plan in PICTURES.values()}
    assert shown["budget_spent"]
    assert not any(shown[name] for name in ("clients", "labels", "participants", "client_losses", "clusters"))


def test_a_claim_about_single_clients_is_refused_in_a_private_study():
    claim = {"text": "All are served", "method": "A", "measure": "worst_decile", "bound": 0.1}
    wire = {"secure": False, "fewest": 1, "privacy": PRIVACY}
    with pytest.raises(FedtideError, match=r"claim\[0\].measure: found 'worst_decile', but the report of a"):
        check_measures(study(A, claim=[claim], wire=wire))
    check_measures(study(A, claim=[claim]))
    check_measures(study(A, claim=[{**claim, "measure": "accuracy"}], wire=wire))


def test_the_bytes_of_reports_and_the_seconds_of_clustering_are_by_themselves(tmp_path):
    """Eight clients that never drift, with shares of three labels; a model of 172 bytes.

    Fielding: each reports once, before round 0, 3 shares, and a count with its weight: 5 numbers of 8 bytes. FedDrift
    with one step: each gets the one model, and says how badly it does, and on how many rows: 2 numbers. Auxo reads the
    updates of training, so nothing more is sent; its server works in each round in which a cluster has participants
    enough. FedAvg groups nobody.
    """
    methods = [
        {**A, "name": "Fielding", "algorithm": "fielding"},
        {**A, "name": "FedDrift", "algorithm": "feddrift", "rounds_per_step": 3},
        {**A, "name": "Auxo", "algorithm": "auxo", "min_participants": 1},
    ]
    root = finished(tmp_path / "run", study(A, *methods, rounds=3, shift={"who": {"kind": "always"}}))
    (record,) = read_experiment(root)
    fedavg, fielding, feddrift, auxo = (lines_of(method.runs[0].folder) for method in record.methods)
    assert [line["clustering"] for line in fielding] == [{"down": 0, "up": 8 * 40}, *[{"down": 0, "up": 0}] * 2]
    assert [line["clustering"] for line in feddrift] == [{"down": 8 * 172, "up": 8 * 16}, *[{"down": 0, "up": 0}] * 2]
    assert not any("clustering" in line for line in (*fedavg, *auxo))
    for plain, line in zip(fedavg, feddrift, strict=True):  # they train alike
        assert line["down"] - plain["down"] == line["clustering"]["down"]
        assert line["up"] - plain["up"] == line["clustering"]["up"]
    timings = [read_lines(method.runs[0].folder, "timings.jsonl") for method in record.methods]
    worked = [[line.get("clustering", 0.0) > 0 for line in lines] for lines in timings]
    assert worked == [[False] * 3, [True, False, False], [True, False, False], [True] * 3]
    assert all(line.get("clustering", 0.0) < line["seconds"] for lines in timings for line in lines)
    summary = summarize(record)
    table = clustering_table(record, summary)
    assert [row[:3] for row in table.rows] == [
        ["Fielding", "0 B", "320 B"], ["FedDrift", "1.38 kB", "128 B"], ["Auxo", "-", "-"],
    ]  # fmt: skip
    assert values(summary, "Auxo", "clustering_longest")[0] <= values(summary, "Auxo", "clustering_seconds")[0]
    alone = replace(record, methods=record.methods[:1])
    assert clustering_table(alone, summarize(alone)) is None


def test_accuracy_is_that_of_evaluations_that_all_seeds_have_and_of_one_cost_the_last():
    """Scores that noise drowns are missing, at other rounds with each seed; banded noise costs the same for a while."""
    first = np.array([2.0, 4.0, 6.0, 8.0]), np.array([0.1, 0.2, 0.3, 0.4])
    second = np.array([2.0, 6.0, 8.0]), np.array([0.5, 0.6, 0.7])
    runs = [np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]), np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0])]
    methods = [SimpleNamespace(runs=runs), SimpleNamespace(runs=[])]
    record = SimpleNamespace(accuracies={0: [first, second], 1: []}, methods=methods)
    curves = accuracy_against(record, lambda run: run)
    told = [[part.tolist() for part in curve] for curve in curves.pop(0)]
    assert told == [[[1.0, 4.0], [0.3, 0.4]], [[1.0, 4.0], [0.6, 0.7]]]
    assert not curves
