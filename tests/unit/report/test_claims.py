"""Claims and branches: what the experiment set out to see, from its file to the verdict on the page."""

import math
import re
import statistics
from contextlib import nullcontext

import numpy as np
import pytest

from fedtide.config import Claim, from_dict, points, resolved
from fedtide.core.errors import FedtideError
from fedtide.evaluate.metrics import Measure, branch_accuracy
from fedtide.report.claims import format_claim, judge, judge_sweep
from fedtide.report.run_records import read_experiment
from fedtide.report.study import read_study, summarize
from fedtide.report.summary import MethodSummary, Summary
from fedtide.report.topics import check_measures
from helpers.studies import STEADY, A, finished, lines_of, study


def method(name: str, values, measure: str = "accuracy", seeds=None, **others) -> MethodSummary:
    seeds = list(range(len(values))) if seeds is None else seeds
    measures = {key: Measure.of([*row]) for key, row in {measure: values, **others}.items()}
    return MethodSummary(name, "fedavg", seeds, 0, measures)


def verdict(ours, theirs=None, measure: str = "accuracy", **said) -> str:
    methods = [method("ours", ours, measure)] + ([] if theirs is None else [method("theirs", theirs, measure)])
    than = None if theirs is None else "theirs"
    return judge(methods, Claim(text="x", method="ours", versus=than, measure=measure, **said)).verdict


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (30, 2.045)])
def test_the_margin_is_students_t_of_a_printed_table_times_the_standard_error(seeds, t):
    """The 97.5 % quantile of t with one degree of freedom less than there are seeds."""
    values = [float(value) for value in range(seeds)]
    error = np.std(values, ddof=1) / math.sqrt(seeds)
    assert Measure.of(values).margin == pytest.approx(t * error, rel=3e-4)  # printed to three digits


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (-0.049, "holds"),
        (-0.048, "too few seeds"),
        (0.084, "too few seeds"),
        (0.085, "not seen"),
        (0.2, "not seen"),
        (0.315, "not seen"),
        (0.316, "too few seeds"),
        (0.448, "too few seeds"),
        (0.449, "does not hold"),
    ],
)
def test_three_seeds_by_hand(bound, expected):
    """Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1/sqrt(3) = 0.0577, times 4.303 = 0.2484.

    Two standard errors, which many seeds would need, are 0.1155.
    """
    ours, theirs = [0.6, 0.9, 0.8], [0.5, 0.7, 0.5]
    assert verdict(ours, theirs, bound=bound) == expected
    assert verdict(theirs, ours, bound=-bound, less=True) == expected


@pytest.mark.parametrize(
    ("within", "expected"),
    [(0.45, "holds"), (0.44, "too few seeds"), (0.31, "not seen"), (0.09, "not seen"), (0.08, "too few seeds")],
)
def test_about_equal_by_hand(within, expected):
    """The whole interval, 0.2 less and more 0.2484, has to be within the bound."""
    ours, theirs = [0.6, 0.9, 0.8], [0.5, 0.7, 0.5]
    assert verdict(ours, theirs, within=within) == expected
    assert verdict(theirs, ours, within=within) == expected


def test_fewer_than_three_seeds_are_too_few():
    """Two may agree by chance. Differences 0.10, 0.11, 0.12: mean 0.11, error 0.0058, times 4.303 = 0.025."""
    assert verdict([0.60, 0.81], [0.50, 0.70]) == "too few seeds"
    assert verdict([0.60, 0.81, 0.72], [0.50, 0.70, 0.60]) == "holds"
    assert verdict([0.60, 0.60], [0.50, 0.70]) == "too few seeds"
    assert verdict([0.9]) == verdict([0.9], [0.1]) == "too few seeds"


def test_values_that_do_not_vary_need_three_seeds():
    """Two differences that are equal may be so by chance, on few rows; their spread tells nothing."""
    assert verdict([0.5, 0.6], [0.4, 0.5]) == "too few seeds"
    assert verdict([0.5, 0.6, 0.7], [0.4, 0.5, 0.6]) == "holds"
    assert verdict([2.0] * 3, [3.0] * 3, measure="reclusterings", less=True) == "holds"
    assert verdict([0.5] * 3, bound=0.5) == "not seen"


# -- where there is nothing --------------------------------------------------------------------------------------------


def rates(seeds: int, step: float = 0.0, trials: int = 2000) -> tuple[float, float]:
    """How often a claim about two equal methods holds, and does not hold; accuracies are multiples of `step`."""
    rng = np.random.default_rng(18)
    claim, found = Claim(text="x", method="ours", versus="theirs", measure="accuracy"), []
    for _ in range(trials):
        hard = rng.normal(0.7, 0.05, seeds)
        pair = [hard + rng.normal(0, 0.01, seeds) for _ in range(2)]
        ours, theirs = ([round(v / step) * step for v in each] if step else list(each) for each in pair)
        found.append(judge([method("ours", ours), method("theirs", theirs)], claim).verdict)
    return found.count("holds") / trials, found.count("does not hold") / trials


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("step", [0.0, 0.005])
def test_of_methods_that_are_equal_at_most_one_in_twenty_is_called_clearly_better_or_worse(seeds, step):
    """2.5 % on either side; three standard deviations of 2,000 trials are 1 %."""
    holds, fails = rates(seeds, step)
    assert holds <= 0.035
    assert fails <= 0.035
    if not step:
        assert holds >= 0.015  # the rule is no stricter than it says


# -- the same run ------------------------------------------------------------------------------------------------------


def test_methods_that_are_equal_to_the_last_digit_are_the_same_run():
    values = [0.61, 0.62, 0.66]
    assert verdict(values, values) == verdict(values, values, less=True) == "the same run"
    assert verdict(values[:1], values[:1]) == "the same run"
    assert verdict(values, values, bound=0.01) == "the same run"
    # A claim that nothing is lost does hold.
    assert verdict(values, values, bound=-0.01) == "holds"
    assert verdict(values, values, within=0.01) == "holds"


def test_a_measure_that_agrees_by_chance_is_not_the_same_run():
    ours = method("ours", [0.7, 0.8, 0.9], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.1])
    theirs = method("theirs", [0.7, 0.8, 0.8], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.1])
    claim = Claim(text="x", method="ours", versus="theirs", measure="refused", less=True)
    assert judge([ours, theirs], claim).verdict == "not seen"
    steadier = method("theirs", [0.7, 0.8, 0.9], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.2])
    assert judge([ours, steadier], claim).verdict == "not seen"
    twin = method("theirs", [0.7, 0.8, 0.9], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.1])
    assert judge([ours, twin], claim).verdict == "the same run"


# -- times -------------------------------------------------------------------------------------------------------------

NEVER = [100.0] * 3


def timed(name: str, times, arrived=None) -> MethodSummary:
    """A method whose seeds arrive at these times, or never by the end, 100."""
    flags = [float(time < 100) for time in times] if arrived is None else arrived
    return method(name, times, "time_to_accuracy", reached_accuracy=flags)


def sooner(ours, theirs=(), **claimed) -> str:
    methods = [timed("ours", ours)] + [timed("theirs", theirs)] * bool(theirs)
    versus = "theirs" if theirs else None
    return judge(methods, Claim(text="x", method="ours", versus=versus, measure="time_to_accuracy", **claimed)).verdict


@pytest.mark.parametrize(("ours", "theirs", "claimed", "expected"), [
    (NEVER, NEVER, {"within": 5.0}, "not seen"),
    (NEVER, NEVER, {"less": True, "bound": 20.0}, "not seen"),
    (NEVER, NEVER, {"less": False, "bound": -20.0}, "not seen"),
    ([90.0] * 3, NEVER, {"less": True, "bound": -20.0}, "not seen"),
    (NEVER, [90.0] * 3, {"bound": 20.0}, "not seen"),
    (NEVER, [97.0] * 3, {"within": 5.0}, "not seen"),
    # What is missing can only confirm these.
    ([50.0] * 3, NEVER, {"less": True, "bound": -20.0}, "holds"),
    (NEVER, [50.0] * 3, {"bound": 20.0}, "holds"),
    (NEVER, [50.0] * 3, {"less": True, "bound": 20.0}, "does not hold"),
    ([50.0] * 3, NEVER, {"bound": -20.0}, "does not hold"),
    (NEVER, [50.0] * 3, {"within": 5.0}, "does not hold"),
    # A seed at which none arrives is a tie of who is sooner, but not of by how much.
    ([50.0] * 6 + [100.0], [90.0] * 6 + [100.0], {"less": True}, "holds"),
    ([50.0] * 6 + [100.0], [90.0] * 6 + [100.0], {}, "does not hold"),
    ([50.0] * 6 + [100.0], [90.0] * 6 + [100.0], {"less": True, "bound": -1.0}, "not seen"),
    # A time of one method is a lower bound.
    (NEVER, (), {"bound": 150.0}, "not seen"),
    (NEVER, (), {"bound": 90.0}, "holds"),
    (NEVER, (), {"less": True, "bound": 90.0}, "not seen"),
    ([90.0] * 3, (), {"bound": 150.0}, "does not hold"),
])  # fmt: skip
def test_a_seed_that_never_arrives_decides_nothing_that_it_may_yet_change(ours, theirs, claimed, expected):
    assert sooner(ours, theirs, **claimed) == expected


def test_who_arrives_after_the_shorter_run_ended_decides_nothing():
    """Ours arrives at 900 and theirs not by 100: the difference of both cut there is 0, but it may be 800 or less."""
    methods = [timed("ours", [900.0] * 3, [1.0] * 3), timed("theirs", NEVER)]
    claim = Claim(text="x", method="ours", versus="theirs", measure="time_to_accuracy", less=True, bound=20.0)
    assert judge(methods, claim).verdict == "not seen"


def test_a_seed_without_an_accuracy_beside_one_that_never_arrives_is_not_counted():
    ours = timed("ours", [math.nan, 100.0, 50.0], [math.nan, 0.0, 1.0])
    for versus in (None, "theirs"):
        claim = Claim(text="x", method="ours", versus=versus, measure="time_to_accuracy", less=True)
        found = judge([ours, timed("theirs", [90.0] * 3)], claim)
        assert (found.verdict, found.reached[0], found.number.mean) == ("not seen", 1, None)


def at_points(claim: Claim, clocks=("rounds", "rounds"), **points):
    """Judge a claim about two points, of which each has these methods."""
    summaries = [
        Summary("", name.replace("_", " "), 3, "train_clients", 3, None, [], methods, clock=clock)
        for (name, methods), clock in zip(points.items(), clocks, strict=True)
    ]
    return judge_sweep(summaries, claim)


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(50.0, 100.0, "not seen"), (100.0, 0.0, "holds")])
def test_a_gap_beyond_another_is_open_where_the_other_may_fall(ours, theirs, expected):
    """At rate 1 ours is 60 sooner. At rate 2 it is at least 50 sooner, or at least 100 later."""
    claim = Claim(text="x", method="ours", versus="theirs", measure="time_to_accuracy", less=True, at="rate 1")
    both = [timed("ours", [30.0] * 3), timed("theirs", [90.0] * 3)]
    other = [timed("ours", [ours] * 3), timed("theirs", [theirs] * 3)]
    beyond = claim.model_copy(update={"beyond": "rate 2"})
    assert at_points(beyond, rate_1=both, rate_2=other).verdict == expected


def test_the_unit_of_a_claim_is_that_of_its_points():
    points = {"rate_1": [timed("ours", [90.0] * 3)], "rate_2": [timed("ours", [40.0, 50.0, 60.0])]}
    claim = Claim(text="x", method="ours", measure="time_to_accuracy", at="rate 2")
    found = at_points(claim, ("rounds", "seconds"), **points)
    assert (found.unit, format_claim(found)) == ("seconds", "50.0 ± 5.8 s")
    beyond = claim.model_copy(update={"at": "rate 1", "beyond": "rate 2"})
    assert at_points(beyond, ("seconds", "seconds"), **points).verdict == "holds"
    mixed = at_points(beyond, ("rounds", "seconds"), **points)
    assert (mixed.verdict, format_claim(mixed)) == ("not seen", "-")


# -- seeds and rivals --------------------------------------------------------------------------------------------------


def test_what_was_not_judged_is_not_seen():
    methods = [method("ours", [0.9, 0.9])]
    for claim in (
        Claim(text="x", method="ours", versus="theirs", measure="accuracy"),
        Claim(text="x", method="theirs", measure="accuracy"),
        Claim(text="x", method="ours", measure="swing"),
    ):
        found = judge(methods, claim)
        assert found.verdict == "not seen"
        assert found.number.mean is None
    assert verdict([math.nan, 0.9, 0.9]) == "not seen"


def test_only_seeds_that_both_have_are_compared():
    """Seeds 1, 2 and 3: differences 0.2; seed 0 and seed 4 would spoil it."""
    ours = method("ours", [0.1, 0.7, 0.8, 0.9], seeds=[0, 1, 2, 3])
    theirs = method("theirs", [0.5, 0.6, 0.7, 0.99], seeds=[1, 2, 3, 4])
    found = judge([ours, theirs], Claim(text="x", method="ours", versus="theirs", measure="accuracy"))
    assert found.number.values == pytest.approx([0.2, 0.2, 0.2])
    assert found.number.mean == pytest.approx(0.2)
    assert found.verdict == "holds"


@pytest.mark.parametrize(("less", "best"), [(False, 0.1), (True, 0.3)])
def test_several_rivals_are_the_best_of_them(less, best):
    """Of means 0.6, 0.8 and 0.7 the highest counts, or where less is better the lowest, at every seed."""
    done = [method("ours", [0.9] * 3), method("a", [0.6] * 3), method("b", [0.7, 0.8, 0.9]), method("c", [0.7] * 3)]
    claim = Claim(text="x", method="ours", versus=["a", "b", "c"], measure="accuracy", less=less)
    assert judge(done, claim).number.mean == pytest.approx(best)
    assert judge(done[:3], claim).number.mean is None


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"method": "steadi"}, {"method": "A", "versus": "steadi"}, {"method": "A", "versus": ["steady", "steadi"]}],
)
def test_a_claim_about_an_unknown_method_is_one_clear_line(wrong):
    with pytest.raises(FedtideError, match="steady") as raised:
        study(A, STEADY, claim=[{"text": "A is fine", **wrong}])
    said = str(raised.value)
    assert "\n" not in said
    assert "A is fine" in said
    assert "steadi" in said


# -- a small run -------------------------------------------------------------------------------------------------------

TEM = {
    "name": "FedTEM",
    "algorithm": "fedtem",
    "cohort": 4,
    "prior": {"kind": "linear", "period": 4},
    "local": {"lr": 0.1, "batch_size": 4},
}
MIN = {"name": "Min Loss", "algorithm": "min-loss", "cohort": 4, "local": {"lr": 0.1, "batch_size": 4}}
CLAIMS = [
    {"text": "FedTEM is better than nothing", "method": "FedTEM", "bound": 1e-6},
    {"text": "FedTEM is perfect", "method": "FedTEM", "bound": 1.01},
    {"text": "Branches are <seldom> wrong", "method": "FedTEM", "measure": "branch_accuracy", "bound": 0.01},
    {"text": "It costs less", "method": "A", "versus": "FedTEM", "measure": "up", "less": True},
]
EXPERIMENT = study(
    A, TEM, MIN, rounds=8, seeds=[0, 1, 2], eval_every=2, baseline="A", claim=CLAIMS, title="Claims of a toy"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("claims") / "run", EXPERIMENT)


@pytest.fixture(scope="module")
def summary(root):
    (record,) = read_experiment(root)
    return summarize(record)


def test_claims_are_judged_from_the_record(summary):
    assert [j.claim for j in summary.claims] == [claim["text"] for claim in CLAIMS]
    assert [j.verdict for j in summary.claims] == ["holds", "does not hold", "holds", "holds"]
    accuracy = summary.method("FedTEM").measures["accuracy"].values
    assert summary.claims[0].number.values == accuracy
    assert summary.claims[0].number.mean == pytest.approx(statistics.mean(accuracy))
    up = [summary.method(name).measures["up"].values for name in ("A", "FedTEM")]
    assert summary.claims[3].number.values == [a - b for a, b in zip(*up, strict=True)]


def test_branch_accuracy_is_that_of_the_record(root, summary):
    """Rows per group and branch of each evaluation, matched as they fit best, over the last two periods."""
    assert "branch_accuracy" not in summary.method("A").measures
    for name in ("FedTEM", "Min Loss"):
        values = []
        for seed in (0, 1, 2):
            lines = [line for line in lines_of(root / name.lower().replace(" ", "-") / str(seed)) if line.get("scores")]
            tables = [line["scores"]["held_out_clients"]["choice"] for line in lines]
            assert len(tables) == 4
            straight, crossed = (
                [
                    (t[0][a] if a < len(t[0]) else 0) + (t[1][1 - a] if 1 - a < len(t[1]) else 0)
                    for t in tables
                ]
                for a in (0, 1)
            )  # fmt: skip
            shares = [max(s, c) / sum(map(sum, t)) for s, c, t in zip(straight, crossed, tables, strict=True)]
            assert shares == [branch_accuracy(t) for t in tables]
            values.append(statistics.mean(shares))
        assert summary.method(name).measures["branch_accuracy"].values == pytest.approx(values)


def test_the_record_says_which_branch_participants_trained(root):
    for line in lines_of(root / "fedtem" / "0"):
        table = line["branches"]
        assert [sum(row) for row in table] == line["groups"]
        assert sum(map(sum, table)) == 4
    assert all("branches" not in line for line in lines_of(root / "a" / "0"))


# -- claims about a sweep ----------------------------------------------------------------------------------------------

B = {**A, "name": "B", "local": {"lr": 0.5}}
SWEEP = {"data.partition.clients": [4, 6], "method.local.batch_size": [4, 64]}
ACROSS = [
    {"text": "A works everywhere", "method": "A", "bound": 1e-6},
    {"text": "A against B, each at its best", "method": "A", "versus": "B", "at": "chosen"},
    {"text": "A alone at a point", "method": "A", "at": "clients 4, batch_size 64", "bound": 1e-6},
    {"text": "A with small batches of its choice", "method": "A", "at": "batch_size 4"},
    {"text": "The lead grows", "method": "A", "versus": "B", "at": "clients 4", "beyond": "clients 6"},
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    experiment = study(A, B, rounds=3, seeds=[0, 1, 2], eval_every=1, sweep=SWEEP, claim=ACROSS)
    return finished(tmp_path_factory.mktemp("sweep") / "run", experiment)


def values_at(made, method, part):
    """The accuracy of each seed at the point, of those whose name has this part, with the best validation accuracy."""
    points = [s for s in made.summaries if part in s.point]
    best = max(points, key=lambda s: s.method(method).measures["val_accuracy"].mean)
    return best.method(method).measures["accuracy"].values


def test_claims_about_a_sweep_take_each_method_at_the_point_that_it_chose(swept):
    made = read_study(swept)
    assert [[j.claim for j in s.claims] for s in made.summaries] == [["A works everywhere"]] * 4
    assert [j.claim for j in made.claims] == [claim["text"] for claim in ACROSS[1:]]
    best, alone, small, lead = (j.number.values for j in made.claims)
    assert best == [a - b for a, b in zip(values_at(made, "A", ""), values_at(made, "B", ""), strict=True)]
    assert alone == values_at(made, "A", "clients 4, batch_size 64")
    assert small == values_at(made, "A", "batch_size 4")
    four, six = (
        [a - b for a, b in zip(values_at(made, "A", part), values_at(made, "B", part), strict=True)]
        for part in ("clients 4", "clients 6")
    )
    assert lead == [a - b for a, b in zip(four, six, strict=True)]
    assert [j.paired for j in made.claims] == [True, False, False, True]
    assert made.claims[1].verdict == "holds"


def test_without_validation_rows_no_claim_about_several_points_is_seen():
    methods = [method("A", [0.4, 0.6])]
    both = [Summary("", f"rate {rate}", 3, "train_clients", 3, None, [], methods) for rate in (0.1, 0.2)]
    chosen = judge_sweep(both, Claim(text="best", method="A", measure="accuracy", at="chosen"))
    assert (chosen.verdict, chosen.number.mean) == ("not seen", None)


@pytest.mark.parametrize(("claim", "said"), [
    ({"at": "batch 5"},
     "claim[0].at: found 'batch 5', allowed: chosen, clients 4, batch_size 4, batch_size 64, clients 6"),
    ({"at": "chosen", "beyond": "clients 5"}, "claim[0].beyond: found 'clients 5'"),
])  # fmt: skip
def test_a_claim_about_points_that_there_are_not_is_one_clear_line(claim, said):
    experiment = study(A, rounds=1, sweep=SWEEP, claim=[{"text": "x", "method": "A", **claim}])
    with pytest.raises(FedtideError, match=re.escape(said)):
        points(experiment)


# -- what a claim may say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("claim", "said"), [
    ({"less": True, "within": 0.1}, "found `less` and `within`, allowed: one of them"),
    ({"versus": "A"}, "found 'A' as `method` and `versus`, allowed: two methods"),
    ({"at": "batch_size 4", "beyond": "batch_size 4"},
     "found 'batch_size 4' as `at` and `beyond`, allowed: two parts of the sweep"),
])  # fmt: skip
def test_a_claim_that_contradicts_itself_is_one_clear_line(claim, said):
    with pytest.raises(FedtideError, match=re.escape(said)):
        study(A, claim=[{"text": "x", "method": "A", **claim}])


def test_a_claim_is_about_the_score_of_the_target_and_not_about_that_of_another():
    claim = {"text": "x", "method": "A"}
    for target, score, other in (("classes", "accuracy", "skill"), ("number", "skill", "accuracy")):
        made = study(A, claim=[claim], data={"target": target})
        assert made.claim[0].measure == score
        check_measures(made)
        assert from_dict(resolved(made)).claim == made.claim  # as a run folder's file has it
        with pytest.raises(FedtideError, match=rf"claim\[0\].measure: found '{other}', allowed: {score}, the score"):
            check_measures(study(A, claim=[{**claim, "measure": other}], data={"target": target}))


def test_a_claim_about_a_part_of_a_sweep_is_about_the_metrics_of_its_target():
    claim = {"text": "x", "method": "A", "measure": "coverage", "bound": 0.5}
    for part, there in (("target quantiles", True), ("target counts", False)):
        sweep = {"data.target": ["counts", "quantiles"]}
        made = study(A, claim=[{**claim, "at": part}], data={"target": "counts"}, sweep=sweep)
        with nullcontext() if there else pytest.raises(FedtideError, match=r"claim\[0\].measure: found 'coverage'"):
            check_measures(made)


def test_a_measure_that_there_is_not_is_told_before_anything_runs():
    wrong = study(A, claim=[{"text": "x", "method": "A", "measure": "acuracy"}])
    with pytest.raises(FedtideError, match=r"claim\[0\].measure: found 'acuracy', did you mean 'accuracy'\? Allowed: "):
        check_measures(wrong)
