"""Scores by sums: their noise, their budget, and what is decided by them."""

import csv
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch

import fedtide as ft
from fedtide.core import codec
from fedtide.core.base import Sum
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.draw import figures
from fedtide.draw.figures import noise_bars
from fedtide.evaluate.judge import Judge, views
from fedtide.laws.case import toy
from fedtide.remote.asks import REFUSED
from fedtide.remote.node import EXACT
from fedtide.remote.offline import NearCarrier, near_fleet
from fedtide.remote.policy import Policy
from fedtide.report.page import write_report
from fedtide.report.run_records import read_experiment
from fedtide.runs.build import host_of
from fedtide.runs.folder import create, plan
from fedtide.runs.preflight import preflight
from fedtide.runs.privacy import check_scores, plan_of_scores, server_wire
from fedtide.runs.runner import Run, evaluated, judge_of, run_rounds
from fedtide.wire.accounting import Plan, delta_of, epsilon_of, mu_of
from fedtide.wire.ledger import Ledger, Line, Safe, read
from fedtide.wire.noise import simulated_noise
from fedtide.wire.scores import read_sums, total_of
from fedtide.wire.vector import opened

CLIP = {"delta": 1.0, "loss": 1.0}
CLAIM = {"text": "The mark is followed.", "method": "toy", "measure": "accuracy_by_marked"}


def private(name="fedavg", *, options=None, changes=None, secure=False, fewest=1, **privacy):
    wanted = {"epsilon": 8.0, "clip": CLIP, "distance": 2, "scores": 50.0} | privacy
    wire = {"secure": secure, "fewest": fewest, "privacy": wanted}
    return toy(name, options or {}, wire=wire, **(changes or {}))


def play(experiment, folder, **how):
    """Play a run; return the lines of its rounds."""
    run = Run(experiment, experiment.method[0], 0, folder / "toy" / "0")
    for _ in itertools.islice(run.play(), how.pop("rounds", None)):
        pass
    return [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]


def exact(folder, view, number):
    """Return the mean over clients of the accuracies that the simulation knows."""
    with (folder / "toy" / "0" / "clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["view"], row["round"]) == (view, str(number))]
    return sum(float(row["accuracy"]) for row in rows) / len(rows), len(rows)


def test_the_noise_and_the_total_are_those_of_a_calculation_by_hand():
    """Six rounds, judged every two, on two parts: 3 x 2 sums that a client is in, each moved by length 1 at most."""
    experiment = private(epsilon=2.0, scores=1.0)
    host = host_of(experiment, experiment.method[0], 0)
    ledger = server_wire(experiment, experiment.method[0], host, simulated_noise(0)).ledger
    assert plan_of_scores(experiment, host.algorithm).moved == pytest.approx(math.sqrt(6))
    assert ledger.score_ledger.z == pytest.approx(math.sqrt(6) / mu_of(1.0, 1e-5), rel=1e-9)
    # Both parts are Gaussian: together they are one whose lengths add as squares, below the sum of the two epsilons.
    mu = math.hypot(mu_of(2.0, 1e-5), mu_of(1.0, 1e-5))
    assert ledger.whole == pytest.approx(epsilon_of(mu, 1e-5), rel=1e-6)
    assert delta_of(mu, ledger.whole) <= 1e-5
    assert 2.0 < ledger.whole < 3.0


def test_the_sums_of_clusters_tell_the_mean_of_all_their_clients(tmp_path):
    lines = play(toy("oracle", {}, wire={"secure": True, "fewest": 3}), tmp_path)
    judged = [line for line in lines if line.get("scores")]
    assert judged
    for line in judged:
        mean, clients = exact(tmp_path, "train_clients", line["round"])
        assert line["scores"]["train_clients"] == {"accuracy": pytest.approx(mean, abs=1e-6), "clients": clients}


def test_a_run_is_told_the_mean_of_its_clients_with_noise_and_nothing_else(tmp_path):
    experiment = private()
    lines = play(experiment, tmp_path)
    ledger = read(tmp_path / "toy" / "0" / "ledger.jsonl")
    for line in lines:
        for view, entry in line.get("scores", {}).items():
            assert set(entry) == {"accuracy", "noise", "clients"}
            mean, count = exact(tmp_path, view, line["round"])
            assert entry["accuracy"] != pytest.approx(mean, abs=1e-4)
            assert abs(entry["accuracy"] - mean) < 6 * entry["noise"]
            assert entry["clients"] != count
    last = lines[-1]
    assert last["epsilon"] == ledger[-1].epsilon
    asked = [line.question for line in ledger if line.round == 5]
    assert asked == ["train", "score test client", "score test client", "score val client"]
    # By hand, of training clients: each number has length 1/2, and both share the budget in equal parts.
    number, question = next((line.ask, line.question) for line in ledger if line.round == 5 and len(line.clients) == 8
                            and line.question == "score test client")  # fmt: skip
    z = math.sqrt(6) / mu_of(50.0, 1e-5)
    noise = 0.5 * math.sqrt(2) * z * simulated_noise(0)(f"{question}/{number}/None", 5, 4)[[0, 2]]
    mean, count = exact(tmp_path, "train_clients", 5)
    clients = count + float(noise[1])
    entry = last["scores"]["train_clients"]
    assert entry["clients"] == pytest.approx(clients, abs=1e-6)
    assert entry["accuracy"] == pytest.approx(0.5 + (count * (mean - 0.5) + float(noise[0])) / clients, abs=1e-5)
    deviation = 0.5 * math.sqrt(2) * z
    spread = deviation * math.hypot(1.0, entry["accuracy"] - 0.5) / clients
    assert entry["noise"] == pytest.approx(spread, rel=1e-6)


def test_error_bars_are_as_wide_as_the_noise():
    draw, clients, deviation = torch.Generator().manual_seed(0), 400.0, 5.0
    accuracies, widths = [], []
    for _ in range(2000):
        noise = deviation * torch.randn(2, generator=draw, dtype=torch.float64)
        sums = {"accuracy": Sum(0.3 * clients + noise[0], clients), "judged": Sum(0.5 * clients + noise[1], clients)}
        entry = read_sums([{"score": sums}], deviation)
        accuracies.append(entry.accuracy)
        widths.append(entry.noise)
    spread = torch.tensor(accuracies)
    assert spread.mean() == pytest.approx(0.8, abs=1e-3)
    assert spread.std() == pytest.approx(sum(widths) / len(widths), rel=0.05)


def test_a_count_that_drowns_tells_nothing():
    total = {"score": {"accuracy": Sum(1.0, 4.0), "judged": Sum(2.0, 4.0)}}
    assert read_sums([total], 1.3) is not None
    assert read_sums([total], 1.4) is None
    assert read_sums([total, total], 0.9).noise == pytest.approx(0.9 * math.sqrt(2) * math.hypot(1, 0.25) / 8)


def test_clients_without_rows_count_for_nothing_and_cannot_be_told():
    said = [total_of(accuracy)["score"] for accuracy in (1.0, 0.5, None)]
    sums = {name: Sum(sum(one[name].value for one in said), 3.0) for name in ("accuracy", "judged")}
    assert read_sums([{"score": sums}], 0.0).accuracy == 0.75
    lengths = {abs(one[name].value) for one in said for name in one}
    assert max(lengths) == 0.5


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_a_run_that_was_stopped_is_told_the_same_and_spends_nothing_twice(tmp_path, name):
    experiment = private(name).model_copy(update={"checkpoint_every": 4})
    whole = play(experiment, tmp_path / "whole")
    play(experiment, tmp_path / "parts", rounds=2)  # its evaluation is released, and the round is played once more
    assert play(experiment, tmp_path / "parts") == whole
    ours, theirs = (tmp_path / folder / "toy" / "0" / "ledger.jsonl" for folder in ("whole", "parts"))
    assert ours.read_text() == theirs.read_text()


def test_no_client_is_judged_more_often_than_planned():
    experiment = private()
    host = host_of(experiment, experiment.method[0], 0)
    ledger = server_wire(experiment, experiment.method[0], host, simulated_noise(0)).ledger

    def line(number, ask):
        about = {"question": "score test client", "slot": None, "z": 1.0, "bounds": {}, "clients": (3,)}
        return Line(round=number, ask=ask, sha256=f"{number}.{ask}", **about)

    for number in (1, 3, 4):
        ledger.add(line(number, 0))
    assert ledger.may_be_in(3, 5)  # to train
    assert ledger.epsilon(3) == pytest.approx(ledger.score_ledger.epsilon(3), rel=1e-8)
    with pytest.raises(FedtideError, match="'score test client' of round 5 has client 3, who may not be in it"):
        ledger.add(line(5, 0))
    with pytest.raises(FedtideError, match="asks a client twice"):
        ledger.add(line(4, 1))


def test_runs_stop_by_what_they_are_told(tmp_path):
    free = play(private(), tmp_path / "free")
    said = [line["scores"]["held_out_clients"]["accuracy"] for line in free if "scores" in line]
    known = [exact(tmp_path / "free", "held_out_clients", number)[0] for number in (1, 3, 5)]
    target = said[0] - 1e-6
    assert target > known[0]  # of these clients the seed's noise says more than is true
    stopped = play(private(changes={"stop_at": {"accuracy": target}}), tmp_path / "stopped")
    assert len(stopped) == 2
    assert stopped[-1]["stopped"]["accuracy"] == target


def test_sums_of_few_clients_are_not_opened(tmp_path):
    lines = play(private(fewest=3), tmp_path)
    entries = [line["scores"] for line in lines if "scores" in line]
    assert entries
    assert all(entry["held_out_clients"] == {} and entry["val"] for entry in entries)
    assert all(len(line.clients) >= 3 for line in read(tmp_path / "toy" / "0" / "ledger.jsonl"))


def test_choices_read_what_is_told():
    experiment = private()
    judge = judge_of(experiment, experiment.method[0], 0, MemoryStore(None))
    told = [entry for _, judged in evaluated(judge, rounds=2, seed=0, every=2) for entry in judged or ()]
    assert told
    for _, scores, _ in told:
        assert scores.headline == scores.by_sum.accuracy != scores.accuracy
        assert math.isnan(replace(scores, by_sum=None).headline)


@pytest.mark.parametrize("scores", [50.0, None])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metrics": ["macro-f1"]}, r"metrics: found 'macro-f1', but scores are sums; allowed: none"),
        ({"references": ["last_label"]}, "references: found 'last_label', but scores are sums; allowed: none"),
        ({"keep": {"by": "loss"}}, "keep.by: found 'loss', but scores are sums; allowed: none"),
        ({"liars": {"attack": "backdoor"}}, "liars.attack: found 'backdoor', but scores are sums; allowed: none"),
        ({"claim": [CLAIM]}, r"claim\[0\].measure: found 'accuracy_by_marked', but scores are sums; allowed: none"),
        ({"target": "number"}, "data.target: found 'number', but scores are sums of bounded numbers; allowed: classes"),
    ],
)
def test_numbers_that_no_sum_tells_are_refused(changes, said, scores):
    target = changes.pop("target", None)
    wire = {"wire": {"sum_scores": True}} if scores is None else {}
    experiment = toy("fedavg", {}, **changes, **wire) if wire else private(changes=changes)
    if target is not None:
        changed = type(experiment.data).model_validate({"target": target}).target
        experiment = experiment.model_copy(update={"data": experiment.data.model_copy(update={"target": changed})})
        changes["target"] = target
    with pytest.raises(FedtideError, match=said):
        check_scores(experiment, "study.toml")


def test_sums_without_noise_under_privacy_are_refused():
    for asked in (True, False):
        with pytest.raises(FedtideError, match="found `sum_scores` and `privacy`, allowed: an epsilon for scores"):
            toy("fedavg", {}, wire={"sum_scores": asked, "privacy": {"epsilon": 8.0, "clip": CLIP}})


def test_sums_alone_tell_the_mean_and_nothing_else(tmp_path):
    lines = play(toy("fedavg", {}, wire={"sum_scores": True}), tmp_path)
    assert any(line["scores"]["val"] for line in lines if "scores" in line)
    for line in lines:
        for view, entry in line.get("scores", {}).items():
            if view == "held_out_clients":  # two, of whom no sum is opened
                assert entry == {}
                continue
            mean, count = exact(tmp_path, view, line["round"])
            assert entry == {"accuracy": pytest.approx(mean, abs=1e-6), "clients": count}


def test_preflight_says_the_total():
    assert preflight(private(epsilon=2.0, scores=1.0)).epsilon == pytest.approx(
        epsilon_of(math.hypot(mu_of(2.0, 1e-5), mu_of(1.0, 1e-5)), 1e-5), rel=1e-6
    )


def test_parts_of_rows_that_are_not_judged_cost_nothing():
    algorithm = host_of(private(), private().method[0], 0).algorithm
    one = private(changes={"eval_splits": ["val"]})
    assert plan_of_scores(one, algorithm).moved == math.sqrt(3)


def test_each_use_of_a_model_and_the_last_evaluation_are_in_the_budget():
    """Six rounds, judged every two, on two parts, of two uses: 3 x 2 x 2 sums. Five rounds have 3 evaluations, too."""
    algorithm = host_of(private(), private().method[0], 0).algorithm
    assert plan_of_scores(private(), replace(algorithm, others={"x": algorithm})).moved == pytest.approx(math.sqrt(12))
    assert plan_of_scores(private(changes={"rounds": 5}), algorithm).moved == pytest.approx(math.sqrt(6))


def test_rows_that_are_still_to_come_are_in_the_budget():
    """No share of rows is for testing on a calendar, but the next window is."""
    split = {"val": 0.2, "test": 0.0}
    given = private(changes={"data": {"split": split}})
    algorithm = host_of(given, given.method[0], 0).algorithm
    assert plan_of_scores(given, algorithm).releases == 2


def test_the_best_by_accuracy_are_kept_if_scores_are_sums():
    check_scores(private(changes={"keep": {"by": "accuracy"}}), "study.toml")


def test_a_draw_of_participants_gains_as_before(tmp_path):
    options = {"cohort": {"kind": "poisson", "clients_per_round": 4}}
    changes = {"shift": {"who": {"kind": "always"}}}
    lines = play(private(options=options, changes=changes, distance=None, noise="plain"), tmp_path)
    last = lines[-1]
    # Less than of those who are known, with as many rounds and the same noise; and what scores spend is in it.
    known = Ledger(Plan(6, 6), last["sampled"]["z"], 1e-5).plan.epsilon(last["sampled"]["z"], 1e-5)
    assert known > 8.0
    assert last["scored"] == pytest.approx(50.0, rel=1e-6)
    assert 50.0 < last["epsilon"] < 58.0


# -- report ------------------------------------------------------------------------------------------------------------


def report_of(folder, **changes):
    """Play a study of two seeds; return its page and the record."""
    experiment = private(changes={"seeds": [0, 1]}, **changes)
    create(experiment, folder)
    for planned in plan(experiment, folder):
        list(Run(experiment, planned.method, planned.seed, planned.folder).play())
    (record,) = read_experiment(folder)
    return write_report([folder]).read_text(), record


def test_a_report_draws_the_noise_as_error_bars_and_says_its_size(tmp_path, monkeypatch):
    drawn = []

    def bars(axes, curves, noises):
        before = len(axes.containers)
        noise_bars(axes, curves, noises)
        (container,) = axes.containers[before:]
        drawn.append(container[2][0].get_segments())

    monkeypatch.setattr(figures, "noise_bars", bars)
    page, record = report_of(tmp_path / "x")
    entries = [[line["scores"]["held_out_clients"] for line in run.judged] for run in record.runs]
    for one, other, segment in zip(*entries, drawn[0], strict=True):
        mean, half = 50 * (one["accuracy"] + other["accuracy"]), 50 * math.hypot(one["noise"], other["noise"])
        assert segment[:, 1].tolist() == pytest.approx([mean - half, mean + half])
    assert "Error bars: one standard deviation of the noise on scores." in page
    # The late accuracy of a seed is the mean of its three evaluations.
    late = max(math.hypot(*(entry["noise"] for entry in ours)) / 3 for ours in entries)
    assert re.search(rf"Scores are sums with noise: {100 * late:.2g}\spoints on the accuracy of a seed", page)
    assert "Scores are in it." in page
    assert math.isclose(record.late_noise, late)


def test_a_report_without_noise_has_no_error_bars(tmp_path):
    page, record = report_of(tmp_path / "x", scores=None)
    assert record.noises == {}
    assert "Error bars" not in page
    assert "Scores are not in it." in page


# -- real clients ------------------------------------------------------------------------------------------------------


BOTH = ("train_clients", "val")


class Listening(NearCarrier):
    """A carrier that keeps all that is asked and answered."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.asked, self.came = [], []

    def push(self, questions):
        self.asked += questions
        super().push(questions)

    def pull(self):
        came = super().pull()
        self.came += came
        return came


def near(experiment, folder, ledger=None, carry=Listening, **options):
    """Return the judge of nodes in this process."""
    host = host_of(experiment, experiment.method[0], 0)
    wire = server_wire(experiment, experiment.method[0], host, simulated_noise(0), ledger)
    fleet = near_fleet(host, 8, folder, carry, wire, **options)
    return Judge(host.algorithm, fleet, views(host.population, named=experiment.eval_splits or BOTH))


def simulated(experiment):
    judge = judge_of(experiment, experiment.method[0], 0, MemoryStore(None))
    return replace(judge, views=[view for view in judge.views if view.name != "held_out_clients"])


def lines_of(judge, experiment):
    return list(run_rounds(judge, rounds=experiment.rounds, seed=0, every=experiment.eval_every))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "ifca"])
def test_real_clients_tell_what_a_simulation_says_and_nothing_of_one_client(tmp_path, name, secure):
    clip = CLIP | ({"members": 1.0} if name == "ifca" else {})
    options = {"cohort": {"kind": "everyone"}}
    how = {"secure": secure, "fewest": 3, "clip": clip, "noise": "plain", "distance": 1}
    experiment = private(name, options=options, changes={"eval_splits": ["train_clients", "val"]}, **how)
    reference, judge = simulated(experiment), near(experiment, tmp_path)
    ours, theirs = (lines_of(each, experiment) for each in (judge, reference))
    for one, other in zip(ours, theirs, strict=True):
        assert one.line.get("scores") == other.line.get("scores")
        assert one.line["epsilon"] == other.line["epsilon"]
        assert one.accuracy == other.accuracy
        assert one.clients == []
    assert [line.model_dump() for line in judge.fleet.ledger.lines] == [
        line.model_dump() for line in reference.fleet.ledger.lines
    ]
    carrier = judge.fleet.carrier
    assert {question.header["kind"] for question in carrier.asked} <= {"ask", "deal", "keys", "unmask"}
    told_by_node = {}
    for question in carrier.asked:
        if question.header["question"].startswith("score") and question.header["kind"] == "ask":
            told_by_node[question.id] = question
    answers = [response for response in carrier.came if response.id in told_by_node]
    assert answers
    for response in answers:
        content = codec.decode_message(response.payload)
        for client, said in content.items():
            assert set(said) == {"total", "rows"}
            assert said["rows"] == {}
            assert said["total"].dtype == torch.int64
            if secure:  # masks: no number is one that a client could say
                assert (opened(said["total"]).abs() > 1.0).all(), client
    assert all("accuracy" not in json.dumps(line) for line in judge.fleet.record_lines())


def test_masks_alone_hide_single_clients(tmp_path):
    experiment = toy("fedavg", {}, wire={"sum_scores": True}, eval_splits=BOTH)
    ours, theirs = (lines_of(each, experiment) for each in (near(experiment, tmp_path), simulated(experiment)))
    assert [one.line.get("scores") for one in ours] == [other.line.get("scores") for other in theirs]
    assert set(ours[-1].line["scores"]["val"]) == {"accuracy", "clients"}
    assert all(one.clients == [] for one in ours)


def test_a_server_that_asks_for_exact_scores_is_refused(tmp_path):
    experiment = private(changes={"eval_splits": ["train_clients", "val"]}, fewest=3)
    judge = near(experiment, tmp_path)
    state = lines_of(judge, experiment)[-1].step.state
    payload, slot = judge.algorithm.serve(state, judge.fleet.clients)
    scores = judge.fleet.score(payload, judge.fleet.clients, slot=slot)
    assert float(scores.rows.sum()) == 0.0
    said = judge.fleet.carrier.came[-1].header["clients"]
    assert set(said.values()) == {f"{REFUSED}{EXACT}"}


@pytest.mark.parametrize(
    ("question", "scores", "said"),
    [
        ("score train client", True, "it is judged on test and validation rows alone"),
        ("score test client", False, "its study does not ask for scores in a sum"),
        ("score test everything", True, "FedtideError at the node"),
        ("score ", True, "it is no evaluation of its study"),
        ("score test client made-up", True, "it is no evaluation of its study"),
        ("score test client ", True, "it is no evaluation of its study"),
    ],
)
def test_nodes_refuse_other_sums_of_scores(tmp_path, question, scores, said):
    experiment = private(fewest=3)
    judge = near(experiment, tmp_path)
    lines_of(judge, experiment)
    asked = next(each for each in judge.fleet.carrier.asked if each.header["question"].startswith("score"))
    node = judge.fleet.carrier.nodes[asked.node]
    node = replace(node, wire=replace(node.wire, sums_scores=scores), log=lambda words: None)
    answer, _ = node.handle(json.loads(json.dumps(asked.header | {"question": question})), asked.payload)
    assert said in json.dumps(answer)


def test_clients_with_few_rows_say_what_those_without_rows_say(tmp_path):
    experiment = private(scores=5000.0, changes={"eval_splits": ["train_clients"]}, fewest=3)

    def strict(nodes):
        few = {name: replace(node, policy=lambda: Policy(rows_at_least=1000)) for name, node in list(nodes.items())[:2]}
        return Listening({**nodes, **few})

    judge = near(experiment, tmp_path, carry=strict)
    last = lines_of(judge, experiment)[-1].line["scores"]["train_clients"]
    assert last["clients"] == pytest.approx(6.0, abs=6 * last["noise"] * 8)
    assert round(last["clients"]) == 6


def test_a_server_that_was_killed_tells_the_same_and_asks_nobody_again(tmp_path):
    """The sums of the round lie in its safe: noise of real clients is fresh, and a second sum would tell more."""
    experiment = private(fewest=3, changes={"eval_splits": ["train_clients", "val"]})
    host = host_of(experiment, experiment.method[0], 0)
    draws = itertools.count()

    def fleet_of(place):
        def fresh(stream, number, size):
            return simulated_noise(next(draws))(stream, number, size)

        wire = server_wire(
            experiment, experiment.method[0], host, fresh, tmp_path / "ledger.jsonl", Safe(tmp_path / "safe")
        )
        fleet = near_fleet(host, 8, tmp_path / "nodes", Listening, wire)
        return Judge(host.algorithm, fleet, views(host.population, named=BOTH))

    first = fleet_of("one")
    two = list(itertools.islice(run_rounds(first, rounds=6, seed=0, every=2), 2))
    ledger = (tmp_path / "ledger.jsonl").read_text()
    second = fleet_of("two")
    again = list(itertools.islice(run_rounds(second, rounds=6, seed=0, every=2), 2))
    assert [each.line.get("scores") for each in again] == [each.line.get("scores") for each in two]
    assert again[-1].line["scores"]["val"]
    assert (tmp_path / "ledger.jsonl").read_text() == ledger
    assert not [question for question in second.fleet.carrier.asked if question.header["kind"] == "ask"]


def test_results_say_nothing_of_a_score_that_drowns_in_noise(tmp_path):
    """Scores of no evaluation of the last rounds stand out, so there is no mean."""
    experiment = private(epsilon=2.0, scores=1e-3).model_copy(update={"title": "drowned"})
    create(experiment, tmp_path / "drowned")
    (planned,) = plan(experiment, tmp_path / "drowned")
    list(Run(experiment, planned.method, planned.seed, planned.folder).play())
    found = ft.results(tmp_path / "drowned")
    assert found.summaries[0].methods[0].measures["accuracy"].mean is None
    assert repr(found) == f"Finished('{tmp_path / 'drowned'}')"
