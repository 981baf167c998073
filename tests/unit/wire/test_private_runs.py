"""Privacy of whole runs: every method that can be private plays so, with the same bits however it is run."""

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

import fedtide as ft
from fedtide.algorithms import REGISTRY
from fedtide.cohorts import Poisson
from fedtide.core.base import Weighted
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, same
from fedtide.core.weights import flat
from fedtide.fleets.engines import WorkersEngine
from fedtide.laws.case import Broken, Case, played, toy
from fedtide.laws.every import InAnyOrder, with_parts
from fedtide.laws.every import private as law_of_private_sums
from fedtide.remote.offline import memory_at, near_fleet
from fedtide.runs import folder
from fedtide.runs.build import host_of, spec_of
from fedtide.runs.preflight import preflight
from fedtide.runs.privacy import check_needed, plan_of, server_wire, sums_of
from fedtide.runs.runner import Run
from fedtide.wire.accounting import Sampling, sampled_epsilon
from fedtide.wire.clip import Clip, check_private
from fedtide.wire.ledger import read
from fedtide.wire.noise import deviations, groups_of, simulated_noise
from fedtide.wire.noise import noised as noise_once
from helpers.variants import variants_of

PRIVATE = {
    "fedavg": ("delta", "loss"),
    "fedsgd": ("delta", "loss"),
    "fedprox": ("delta", "loss"),
    "fedadam": ("delta", "loss"),
    "scaffold": ("delta", "loss", "control"),
    "vanilla": ("delta", "loss", "branches"),
    "fedtkm": ("delta", "loss", "branches", "modes", "features"),
    "min-loss": ("delta", "loss", "branches"),
    "ifca": ("delta", "loss", "members"),
}
"""Methods and what they sum."""


def private(name, *, options=None, fewest=1, **privacy):
    bounds = dict.fromkeys(PRIVATE.get(name, ("delta", "loss")), 1.0)
    wanted = {"epsilon": 8.0, "clip": bounds, "distance": 2, "noise": "banded"} | privacy
    variant = dict(variants_of(name).get("", {})) | (options or {})
    return toy(name, variant, wire={"secure": False, "fewest": fewest, "privacy": wanted})


def options_of(name):
    return {"max_control_norm": 1.0} if name == "scaffold" else {}


@pytest.mark.parametrize("name", PRIVATE)
def test_plays_with_noise_that_follows_from_the_seed(name):
    experiment = private(name, options=options_of(name))
    reference = played(experiment)
    assert all_finite(reference.state)
    assert not same(played(experiment, seed=1, rounds=1).state, reference.steps[0].state)
    again = played(experiment, engine=lambda host: InAnyOrder(host))
    assert same(again.state, reference.state)
    lines = reference.fleet.ledger.lines
    assert len(lines) == experiment.rounds
    rounds = defaultdict(list)
    for line in lines:
        for client in line.clients:
            rounds[client].append(line.round)
    assert all(b - a >= 2 for held in rounds.values() for a, b in itertools.pairwise(held))
    assert 0 < lines[0].epsilon <= lines[-1].epsilon <= 8.0 * (1 + 1e-9)


def test_noise_is_on_the_sum_once(monkeypatch):
    """The step of the server with noise, less that without, is the noise that the plan wants over the answers."""
    forms = []

    def unnoised(total, form, bounds, z, noise):
        forms.append(form)
        return total

    with monkeypatch.context() as patched:
        patched.setattr("fedtide.wire.noise.noised", unnoised)
        quiet = played(private("fedavg"), rounds=1).state.weights.params
    run = played(private("fedavg"), rounds=1)
    (line,), (form,) = run.fleet.ledger.lines, forms
    scale = deviations(groups_of(form, line.bounds), line.z)["delta"]
    noise = form.tables(simulated_noise(0)("train/0/None", 0, form.size))["delta"][0, :-1]
    moved = flat(run.state.weights.params) - flat(quiet)
    torch.testing.assert_close(moved.double(), scale * noise / len(line.clients), atol=1e-5, rtol=1e-5)


@pytest.mark.xdist_group("pool")
def test_workers_have_the_same_bits(tmp_path, pool):
    experiment = private("ifca")
    reference = played(experiment).state
    spec = spec_of(experiment, experiment.method[0], 0, tmp_path / "memory")
    memory = MemoryStore(tmp_path / "memory")
    found = played(experiment, engine=lambda host: WorkersEngine(host, pool, spec), memory=memory)
    assert same(found.state, reference)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits_and_ledger(tmp_path, name):
    experiment = private(name, options=options_of(name)).model_copy(update={"checkpoint_every": 2, "eval_every": 2})

    def play(folder, stop=None):
        run = Run(experiment, experiment.method[0], 0, tmp_path / folder / "toy" / "0")
        for _ in itertools.islice(run.play(), stop):
            pass

    play("whole")
    play("parts", stop=3)  # in the middle: round 2 was released, and is played once more
    play("parts")
    for file in ("rounds.jsonl", "ledger.jsonl"):
        ours, theirs = (tmp_path / folder / "toy" / "0" / file for folder in ("whole", "parts"))
        assert ours.read_text() == theirs.read_text()
    lines = read(tmp_path / "whole" / "toy" / "0" / "ledger.jsonl")
    said = [json.loads(line) for line in (tmp_path / "whole/toy/0/rounds.jsonl").read_text().splitlines()]
    assert [line["epsilon"] for line in said] == [line.epsilon for line in lines]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_ledger_that_is_not_whole_is_found_and_not_gone_on_from(tmp_path, kept):
    """The ledger decides who may be asked, and what was spent."""
    experiment = private("fedavg").model_copy(update={"checkpoint_every": 1, "title": "x"})
    folder.create(experiment, tmp_path / "x")
    (planned,) = folder.plan(experiment, tmp_path / "x")
    list(Run(experiment, planned.method, planned.seed, planned.folder).play(until=3))
    assert [(verdict.rounds, verdict.wrong) for verdict in ft.verify(tmp_path / "x")] == [(3, None)]
    ledger = planned.folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:kept] + lines[kept + 1 :]))
    (verdict,) = ft.verify(tmp_path / "x")
    assert (verdict.rounds, verdict.wrong.startswith(f"{ledger}: damaged")) == (kept, True)
    with pytest.raises(FedtideError, match=r"ledger.jsonl: damaged"):
        list(Run(experiment, planned.method, planned.seed, planned.folder).play())
    ledger.unlink()
    assert [verdict.wrong for verdict in ft.verify(tmp_path / "x")] == [f"{ledger}: missing"]


@pytest.mark.parametrize(("name", "noise"), [("fedavg", "plain"), ("ifca", "banded")])
def test_a_bound_that_adapts_comes_to_the_median_length(tmp_path, name, noise):
    """With little noise; at nodes, and after a stop, as well."""
    clip = dict.fromkeys(PRIVATE[name], 5.0) | {"delta": 1e-3}
    adapt = {"delta": {"rate": 4.0}}
    experiment = private(name, clip=clip, adapt=adapt, noise=noise, epsilon=None, multiplier=0.01, distance=2)
    run = played(experiment)
    lines = run.fleet.ledger.lines
    bounds = [line.bounds["delta"] for line in lines]
    assert bounds[0] == 1e-3
    assert lines[0].within["delta"] == pytest.approx(0.0, abs=0.1)
    assert bounds[1] == pytest.approx(1e-3 * math.exp(2.0), rel=0.1)
    assert max(line.within["delta"] for line in lines) > 0.3, "it has come so far"
    fleet = near_fleet(
        run.host, 3, tmp_path, wire=server_wire(experiment, experiment.method[0], run.host, simulated_noise(0))
    )
    assert same(played(experiment, fleet=lambda _: fleet).state, run.state)
    assert fleet.ledger.lines == lines


@pytest.mark.parametrize("name", ["scaffold", "fedem"])
def test_what_clients_keep_does_not_tell_who_has_rows(tmp_path, name):
    """A client without rows keeps its memory once more, and one whose work fails does."""
    bounds = dict.fromkeys(("delta", "loss", "control", "pi", "entropy", "log_likelihood"), 1.0)
    options = options_of(name) or {"normalize_by": "participants"}
    experiment = private(name, options=options, clip=bounds, distance=1, noise="plain")
    host = with_parts(
        host_of(*of_method(experiment)), lambda part: [part[k][: k % 2 * 9].numpy() for k in range(len(part))]
    )
    wire = server_wire(experiment, experiment.method[0], host, simulated_noise(0))
    fleet = near_fleet(host, 2, tmp_path, wire=wire)
    run = played(experiment, host=host, fleet=lambda _: fleet, rounds=2)
    kept = {client: fleet.counted(client) for client in run.fleet.clients.tolist()}
    asked = {client for query in fleet.queries for client in query.ask.clients.tolist()}
    assert {kept[client] for client in asked} == {(1, 0)}
    assert {memory_at(fleet, client) is None for client in asked} == {True, False}


def test_bounds_that_cannot_adapt():
    clip = {"delta": 1.0, "loss": 1.0, "control": 1.0}
    with pytest.raises(FedtideError, match=r"^wire.privacy.adapt: found 'control', but method 'toy': clients keep"):
        preflight(private("scaffold", options={"max_control_norm": 1.0}, clip=clip, adapt={"control": {}}))
    with pytest.raises(FedtideError, match=r"wire.privacy: adapt: found 'los', did you mean 'loss'\?"):
        private("fedavg", clip=clip, adapt={"los": {}})


def test_scaffold_keeps_what_it_sent(monkeypatch):
    """But for noise, the server's variate is the mean of the clients'."""
    monkeypatch.setattr("fedtide.wire.noise.noised", lambda total, *rest: total)
    experiment = private("scaffold", options={"max_control_norm": 0.01}, distance=1)
    run = played(experiment)
    people = run.host.population.registered
    memories = [run.host.memory.read(client, (99, 0)) for client in range(people)]
    kept = [memory["control"] for memory in memories if memory is not None]
    for name, ours in run.state.control.items():
        torch.testing.assert_close(ours, sum(each[name] for each in kept) / people, atol=1e-5, rtol=1e-4)


REFUSED = {
    "reveals of each client: pi": {"fedtem"},
    "reveals of each client: centers": {"t-shot", "k-fed", "fedgmm"},
    "reveals of each client: update": {"cfl", "feroma", "fesem", "flexcfl"},
    "reveals of each client: profile": {"flux-like"},
    "reveals of each client: balanced": {"fedccfa"},
    "reveals of each client: head": {"fedpac"},
    "clients take their own part from the sums": {"fedcurv"},
    "clients keep a sum of their updates": {"feddyn"},
    "reveals of each client: sketch": {"auxo"},
    "reveals of each client: representation": {"fielding"},
    "reveals of each client: bad": {"feddrift"},
    "reveals of each client: true_groups": {"oracle"},
    "reveals of each client: all_rows": {"centralized"},
    "a power of its loss, which has no bound": {"q-fedavg"},
    "a client has its whole weight in each model that it trains": {"pfedem"},
    "in the rounds of several models": {"fedasync", "fedbuff"},
}
"""Why methods cannot be private, as they are by default."""


def test_each_method_can_be_private_or_says_why_not():
    for name in REGISTRY:
        why = [words for words, names in REFUSED.items() if name in names]
        if why:
            with pytest.raises(FedtideError, match=rf"^wire.privacy: found a table, but method 'toy': .*{why[0]}"):
                host_of(*of_method(private(name)))
        else:
            assert host_of(*of_method(private(name, options=options_of(name)))).wire.hides


def of_method(experiment):
    return experiment, experiment.method[0], 0, MemoryStore(None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scaffold", {"max_control_norm": 1.0}),
        ("fedgmm", variants_of("fedgmm")["head"]),
        ("pfedem", variants_of("pfedem")["head"]),
        ("pfedem", variants_of("pfedem")["safe"]),
    ],
)
def test_law_of_methods_that_are_private_with_some_options(name, options):
    law_of_private_sums(Case(partial(toy, name, options), lambda: pytest.fail("no processes")))


def test_law_finds_a_sum_that_leaves_without_noise(monkeypatch):
    case = Case(partial(toy, "ifca"), lambda: pytest.fail("no processes"))
    for spared in ("delta", "members"):

        def noised(total, form, bounds, z, noise, spared=spared):
            released = noise_once(total, form, bounds, z, noise)
            form.tables(released)[spared][:] = form.tables(total)[spared]
            return released

        monkeypatch.setattr("fedtide.wire.noise.noised", noised)
        with pytest.raises(Broken, match=f"^'{spared}' is released without noise$"):
            law_of_private_sums(case)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedtem", r"wire.privacy: found a table, but method 'toy': it reveals of each client: pi, odds, mu, var, n"),
        ("cfl", r"wire.privacy: .*it reveals of each client: update, weight"),
        ("q-fedavg", r"wire.privacy: .*a client's weight is a power of its loss, which has no bound"),
        ("fedbuff", r"wire.privacy: .*a client may answer in the rounds of several models"),
        ("scaffold", r"method 'toy'.max_control_norm: found None, .*allowed: at most 1"),
        ("oracle", r"wire.privacy: .*it reveals of each client: true_groups"),
    ],
)
def test_what_cannot_be_private_is_refused(name, words):
    with pytest.raises(FedtideError, match=words):
        played(private(name))


def test_cohorts_that_read_losses_and_running_statistics_are_refused():
    oort = {"cohort": {"kind": "oort", "clients_per_round": 3}}
    with pytest.raises(FedtideError, match=r"it reveals of each client: count, utility"):
        played(private("fedavg", options=oort))
    experiment = private("fedavg")
    host = host_of(experiment, experiment.method[0], 0)
    assert server_wire(experiment, experiment.method[0], host, simulated_noise(0)).ledger is not None
    with pytest.raises(FedtideError, match=r"^model: found 'running statistics or .*; allowed: a model without"):
        check_private(Clip({}), host.algorithm, True, "method 'toy'")
    with pytest.raises(FedtideError, match=r"^model: found 'running statistics or frozen parameters', but noise"):
        preflight(toy("fedavg", wire=experiment.wire.model_dump(), model="python:helpers.toys:normed"))


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ({"delta": 1.0}, r"^method 'toy': wire.privacy.clip: no bound of 'loss', which clients send too; .*: delta$"),
        ({}, r"^method 'toy': wire.privacy.clip: no bound of 'delta', 'loss', which clients send too; .*: other$"),
        ({"delta": 1.0, "loss": 1.0, "los": 1.0}, r"^experiment: wire.privacy.clip: found 'los', .* mean 'loss'\?"),
        ({"delta": 1e9, "loss": 1.0}, r"^method 'toy': wire.privacy.clip.delta: found 1000000000.0, allowed: below"),
        (
            {"delta": 1e-11, "loss": 1.0},
            r"^method 'toy': wire.privacy.clip.delta: .* more than fixed point rounds off$",
        ),
    ],
)
def test_bounds_are_those_of_what_is_summed_before_anything_is_written(tmp_path, clip, words):
    experiment = private("fedavg", clip=clip or {"other": 1.0})
    with pytest.raises(FedtideError, match=words):
        ft.run(experiment, tmp_path / "out", quiet=True)
    assert not list(tmp_path.iterdir())


def test_bounds_are_of_all_methods_and_points_together():
    one = private("fedprox", clip={"delta": 1.0, "loss": 1.0, "control": 1.0})
    other = private("scaffold", options={"max_control_norm": 1.0}).method[0].model_copy(update={"name": "other"})
    both = one.model_copy(update={"method": (*one.method, other)})
    check_needed(both, preflight(both).forms, "experiment")
    with pytest.raises(FedtideError, match=r"clip: found 'control', allowed: delta, loss$"):
        check_needed(one, preflight(one).forms, "experiment")
    points = one.model_copy(update={"sweep": {"method.toy.local.proximal": (0.0, 0.1)}})
    with pytest.raises(FedtideError, match=r"clip: found 'control', allowed: delta, loss$"):
        check_needed(points, preflight(points).forms, "experiment")


@pytest.mark.parametrize(("delta", "epsilon", "words"), [(0.2, 8.0, None), (1e-5, 8.0, ""), (1e-5, 40.0, "epsilon 40")])
def test_a_budget_that_promises_little(tmp_path, capsys, delta, epsilon, words):
    """Eight clients; delta is refused, epsilon is warned of once."""
    experiment = private("fedavg", delta=delta, epsilon=epsilon).model_copy(update={"rounds": 1})
    if words is None:
        with pytest.raises(FedtideError, match=r"wire.privacy.delta: found 0.2, allowed: below 1/8, one over"):
            ft.run(experiment, tmp_path / "out")
        return
    ft.run(experiment, tmp_path / "out")
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("which promises little") == bool(words)
    assert words in said


def test_what_is_summed_before_round_0_is_refused_before_anything_is_written():
    with pytest.raises(
        FedtideError, match=r"^method 'toy': wire.privacy: .* it asks 'fit' before round 0, which no budget plans"
    ):
        preflight(private("ifca", options={"n_init": 2}))
    with pytest.raises(FedtideError, match=r"^method 'toy': wire.privacy: .* it asks 'weigh' before round 0"):
        preflight(private("fedem", options={"normalize_by": "everyone"}))


def test_clients_have_no_noise_and_a_server_without_it_reads_nothing():
    experiment = private("fedavg")
    host = host_of(experiment, experiment.method[0], 0)
    assert host.wire.ledger is None
    with pytest.raises(RuntimeError, match="a private sum is read only with the noise of the server"):
        host.wire.receive(torch.zeros(1), None, None)


def test_epsilon_or_noise():
    for said in ({"epsilon": 8.0, "multiplier": 1.0}, {"epsilon": None}):
        with pytest.raises(FedtideError, match=r"wire.privacy: found (both|neither) of `epsilon` and `multiplier`"):
            private("fedavg", **said)
    run = played(private("fedavg", epsilon=None, multiplier=3.0))
    assert run.fleet.ledger.z == 3.0
    assert replace(run.fleet.ledger.plan).epsilon(3.0, 1e-5) > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ifca", {"init_noise": 0.1}),
        ("fedem", {"normalize_by": "participants"}),
        ("fedgmm", {"gaussian_init": "random"}),
        ("pfedem", {"normalize_by": "members"}),
    ],
)
def test_a_plan_counts_questions_that_are_asked(name, options):
    """None that only another start, or another divisor, would ask."""
    experiment = private(name, options=options)
    host = host_of(experiment, experiment.method[0], 0)
    assert plan_of(experiment.wire.privacy, experiment, experiment.method[0], host).releases == 1


@pytest.mark.parametrize("name", ["fedavg", "ifca", "scaffold"])
@pytest.mark.parametrize("secure", [False, True])
def test_clients_at_nodes_of_their_own_give_the_same_bits(tmp_path, name, secure):
    plain = private(name, options=options_of(name), fewest=3)
    experiment = plain.model_copy(update={"wire": plain.wire.model_copy(update={"secure": secure})})
    here = played(experiment)
    wire = server_wire(experiment, experiment.method[0], here.host, simulated_noise(0))
    fleet = near_fleet(here.host, 8 if secure else 3, tmp_path, wire=wire)
    there = played(experiment, fleet=lambda _: fleet)
    assert same(there.state, here.state)
    assert fleet.ledger.lines == here.fleet.ledger.lines


def test_who_abstains_or_has_no_numbers_is_not_seen(tmp_path):
    """A client without rows and one whose update is NaN count as all others do, in a simulation and at nodes."""
    experiment = private("fedavg", fewest=1, distance=1)
    host = host_of(experiment, experiment.method[0], 0)
    train = host.algorithm.works["train"]

    def work(payload, memory, shard, moment, rng):
        answer = train(payload, memory, shard, moment, rng)
        if len(shard) % 2:
            return None
        return replace(answer, total={**answer.total, "loss": Weighted(math.nan, 1.0)}) if moment.round == 1 else answer

    odd = replace(host, algorithm=replace(host.algorithm, works={"train": work}))
    here = played(experiment, host=odd, rounds=2)
    assert all(len(query.answered) == len(query.ask.clients) for query in here.fleet.queries)
    assert not any(len(query.refused) for query in here.fleet.queries)
    fleet = near_fleet(odd, 3, tmp_path, wire=server_wire(experiment, experiment.method[0], odd, simulated_noise(0)))
    assert same(played(experiment, fleet=lambda _: fleet, host=odd, rounds=2).state, here.state)


def test_at_a_node_a_failing_work_is_not_seen(tmp_path):
    experiment = private("fedavg", fewest=1, distance=1)
    host = host_of(experiment, experiment.method[0], 0)
    train, told = host.algorithm.works["train"], []

    def work(payload, memory, shard, moment, rng):
        if len(shard) % 2:
            raise ZeroDivisionError("of its rows")
        return train(payload, memory, shard, moment, rng)

    odd = replace(host, algorithm=replace(host.algorithm, works={"train": work}))
    fleet = near_fleet(odd, 3, tmp_path, wire=server_wire(experiment, experiment.method[0], odd, simulated_noise(0)))
    nodes = fleet.carrier.nodes
    nodes.update({name: replace(node, log=told.append) for name, node in nodes.items()})
    there = played(experiment, fleet=lambda _: fleet, host=odd, rounds=2)
    assert all(len(query.answered) == len(query.ask.clients) for query in fleet.queries)
    assert all_finite(there.state)


UNIFORM = {"cohort": {"kind": "uniform", "clients_per_round": 4}}


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({"shift": {"who": "always"}}, 4),
        ({"shift": {"who": "always"}, "options": {"cohort": {"kind": "in-turn", "clients_per_round": 4}}}, None),
        ({"shift": {"who": "always"}, "options": {"cohort": 4}}, None),
        ({"shift": {"who": {"kind": "periodic", "period": 4}}}, None),
        ({"shift": {"who": "always"}, "noise": "banded"}, None),
        ({"shift": {"who": "always"}, "distance": 2}, None),
        ({"shift": {"who": "always"}, "options": {"cohort": {**UNIFORM["cohort"], "deadline": 9.0}}}, None),
        ({"shift": {"who": "always"}, "times": 3}, None),
        ({"shift": {"who": "always"}, "options": {**UNIFORM, "transforms": [{"kind": "robust", "bucket": 2}]}}, None),
        ({"shift": {"who": "always"}, "liars": {"share": 0.5, "attack": "absent"}}, None),
        ({"shift": {"who": "always"}, "data": {"without_clients": ["7"]}}, None),
        ({"shift": {"who": "always"}, "options": {"cohort": {**UNIFORM["cohort"], "over_selection": 1.5}}}, 6),
    ],
)
def test_only_uniform_draws_among_all_clients_gain_by_them(changes, drawn):
    changes = dict(changes)
    options, shift = changes.pop("options", UNIFORM), changes.pop("shift")
    more = {"liars": changes.pop("liars", None), "data": changes.pop("data", {})}
    experiment = private("fedavg", options=options, **{"distance": None, "noise": "plain"} | changes)
    tables = experiment.model_dump(include={"shift"}) | {"shift": shift}
    experiment = toy("fedavg", options, wire=experiment.wire.model_dump(), **more, **tables)
    host = host_of(experiment, experiment.method[0], 0)
    plan = plan_of(experiment.wire.privacy, experiment, experiment.method[0], host)
    assert plan.sampling == (Sampling(drawn, 8) if drawn else None)
    period = 4 if shift["who"] != "always" else 1
    if not drawn:
        assert plan.distance == (experiment.wire.privacy.distance or period)


# -- clients that toss coins -------------------------------------------------------------------------------------------


def tossing(name="fedavg", clients=2, options=None, **changes):
    options = {"cohort": {"kind": "poisson", "clients_per_round": clients}, **options_of(name), **(options or {})}
    shift = changes.pop("shift", {"who": "always"})
    fewest = changes.pop("fewest", 1)
    experiment = private(name, options=options, fewest=fewest, **{"distance": None, "noise": "plain"} | changes)
    tables = experiment.model_dump(include={"shift"}) | {"shift": shift}
    variant = dict(variants_of(name).get("", {})) | options
    return toy(name, variant, wire=experiment.wire.model_dump(), **tables)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ifca", "fedtkm"])
def test_coins_release_a_sum_each_round_whoever_comes(name):
    """Every round has a sum, also one of nobody."""
    experiment = tossing(name, clients=1)
    preflight(experiment)
    run = played(experiment)
    lines = run.fleet.ledger.lines
    assert [line.round for line in lines] == list(range(6))
    assert {0, 1} <= {len(line.clients) for line in lines}, "at times nobody comes"
    assert run.fleet.ledger.plan.sampling == Sampling(1, 8, poisson=True)
    assert lines[-1].epsilon == sampled_epsilon(lines[0].z, Sampling(1, 8, True), 6, 1e-5)
    assert all_finite(run.state)


def test_a_coin_moves_a_mean_by_one_over_the_expected_number(monkeypatch):
    """In place of one over the number that came, which would tell it."""
    monkeypatch.setattr("fedtide.wire.noise.noised", lambda total, *rest: total.clone())
    experiment = tossing(clients=3)
    run, wire = played(experiment, rounds=1), []

    def without_divisor(host):
        wire.append(replace(server_wire(experiment, experiment.method[0], host, simulated_noise(0)), divisor=None))
        return replace(run.fleet.vectors, wire=wire[0])

    fleet = replace(run.fleet, vectors=without_divisor(run.host))
    usual = played(experiment, fleet=lambda _: fleet, rounds=1)
    came, start = len(run.fleet.ledger.lines[0].clients), run.host.algorithm.task.init(Rng(0).at(-1, "server")).params
    assert came not in (0, 3)
    ours, theirs = (flat(each.state.weights.params) - flat(start) for each in (run, usual))
    torch.testing.assert_close(ours * 3, theirs * came, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("name", "changes"), [
    ("fedavg", {}), ("fedavg", {"adapt": {"delta": {}}}), ("scaffold", {}), ("ifca", {}), ("fedtkm", {}),
])  # fmt: skip
def test_nothing_tells_how_many_came_but_the_sums(name, changes, monkeypatch):
    """With other numbers in place of the sums, states and facts are the same whoever comes."""

    def numbers(total, form, bounds, z, noise):
        released = torch.full_like(total, 0.25)
        for leaf, table in form.tables(released).items():
            if len(table) == 1:
                table[0, -1] = form.tables(total)[leaf][0, -1]
        return released

    monkeypatch.setattr("fedtide.wire.noise.noised", numbers)
    runs, counts = [], []
    for least in (0.0, 0.3, 1.0):
        coin = lambda self, memo, fleet, rng, serve, among, m, least=least: among[  # noqa: E731
            torch.rand(len(among), generator=torch.Generator().manual_seed(fleet.moment.round)) < least
        ]
        monkeypatch.setattr(Poisson, "select", coin)
        runs.append(played(tossing(name, clients=3, **changes)))
        counts.append([len(line.clients) for line in runs[-1].fleet.ledger.lines])
    assert (set(counts[0]), set(counts[2])) == ({0}, {8})
    assert len(set(counts[1])) > 1
    assert all(same(run.state, runs[0].state) for run in runs)
    assert all(
        same(ours.facts, theirs.facts) for run in runs for ours, theirs in zip(run.steps, runs[0].steps, strict=True)
    )
    assert len({json.dumps([line.bounds for line in run.fleet.ledger.lines]) for run in runs}) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shift": {"who": {"kind": "periodic", "period": 4}}}, "found 'poisson', but clients come and go by a clock"),
        ({"noise": "banded"}, "its noise is banded"),
        ({"distance": 2}, "`distance` or `times` says"),
        ({"times": 2}, "`distance` or `times` says"),
        ({"fewest": 2}, "no sum of fewer than 2 clients is opened, which tells how many came"),
    ],
)
def test_coins_that_would_gain_nothing_are_refused(changes, words):
    with pytest.raises(FedtideError, match=rf"^method 'toy': cohort: .*{words}"):
        preflight(tossing(**changes))


def test_a_method_that_reads_who_came_is_refused_with_coins(monkeypatch):
    fedavg = REGISTRY["fedavg"]

    def counting(reading):
        def make(*given, **named):
            algorithm = fedavg.make(*given, **named)

            def round(state, fleet, rng):
                reading(fleet.ask("train", fleet.reachable, state.weights))
                return state, {}

            return replace(algorithm, round=round)

        return make

    readings = (
        lambda reply: len(reply.clients), lambda reply: torch.isin(reply.clients, reply.clients),
        lambda reply: reply.cost.up, lambda reply: torch.arange(9)[reply.silent], lambda reply: reply.seconds.max(),
    )  # fmt: skip
    experiment = tossing()
    for reading in readings:
        host = host_of(*of_method(experiment))
        algorithm = counting(reading)(host.algorithm.task)
        with pytest.raises(FedtideError, match=r"^method 'toy': cohort: found 'poisson', but it reads how many"):
            sums_of(experiment.method[0], replace(host, algorithm=algorithm))


def test_each_tosses_a_coin_of_its_own():
    experiment = tossing(clients=2)
    cohort, run = experiment.method[0].settings()["cohort"], played(experiment, rounds=1)
    fleet, among = run.fleet, torch.arange(8)
    drawn = [cohort.pick(None, fleet, Rng(seed), None) for seed in range(2000)]
    counts = torch.bincount(torch.cat(drawn), minlength=8) / 2000
    sizes = torch.tensor([float(len(ids)) for ids in drawn])
    torch.testing.assert_close(counts, torch.full((8,), 0.25), atol=0.05, rtol=0)
    assert float(sizes.var()) == pytest.approx(8 * 0.25 * 0.75, rel=0.15), "binomial"
    assert len(cohort.pick(None, fleet, Rng(0), None, among=among[:0])) == 0
