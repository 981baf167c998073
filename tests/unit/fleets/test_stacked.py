"""The stacked engine: the same rounds as the local engine, to 1e-9 in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.config import from_dict, resolved
from fedtide.core import codec, sums
from fedtide.core.base import Moment, Shard
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.data.ragged import Ragged
from fedtide.fleets import stacked_engine as engines
from fedtide.fleets.engines import LocalEngine
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.laws.case import Case
from fedtide.laws.every import stacks, with_rows
from fedtide.learn import stack
from fedtide.learn.by_batch import StackedGradient
from fedtide.learn.fast.stacks import FuncStack
from fedtide.learn.local import LocalTrainer
from fedtide.learn.steps import Train
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from fedtide.learn.training import Training
from fedtide.runs.build import host_of
from fedtide.runs.runner import Run, judge_of
from helpers.toys import played, toy

SIZES = (1, 7, 20, 53, 0, 4, 4, 9)
"""Training rows of the eight clients; the last one has rows of one class."""
EVERYONE = {"cohort": {"kind": "everyone"}}
ALWAYS = {"who": {"kind": "always"}}
NOW = Moment(0, 1)
NORMED = "python:helpers.toys:normed"


def ragged(options=None, algorithm="fedavg", model=None, precision="fp64"):
    """An experiment, and its host whose clients hold so many rows."""
    data = {"source": {"kind": "gaussians", "samples": 400, "dims": 4, "classes": 3, "domains": 2}}
    local = {"lr": 0.1, "batch_size": 4, **(options or {}).pop("local", {})}
    experiment = toy(
        algorithm, {**EVERYONE, **(options or {}), "local": local}, precision=precision, shift=ALWAYS, data=data
    )
    if model is not None:
        experiment = from_dict({**resolved(experiment), "model": model})
    host = host_of(experiment, experiment.method[0], 0)
    rows, population, lists, begun = host.population.rows, host.population, [], 0
    for size in SIZES:
        lists.append(list(range(begun, begun + size)))
        begun += size
    lists += [list(range(begun, begun + 5))] * (len(population.group) - len(SIZES))
    y = rows.y.clone()
    y[lists[7]] = 1
    parts = {**population.parts, "train": Ragged.of([torch.tensor(part).long().numpy() for part in lists])}
    return experiment, replace(host, population=replace(population, rows=replace(rows, y=y), parts=parts))


def near(ours, theirs, tolerance=1e-9):
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def both(experiment, host, rounds=3):
    alone = played(experiment, host=host, rounds=rounds)
    together = played(experiment, host=host, rounds=rounds, engine=StackedEngine)
    return alone, together


CASES = {
    "one epoch": {},
    "epochs": {"local": {"epochs": 3}},
    "local_steps": {"local": {"local_steps": 5}},
    "all rows at once": {"local": {"batch_size": 0, "epochs": 2}},
    "momentum": {"local": {"momentum": 0.9, "epochs": 2, "weight_decay": 0.01}},
    "adam": {"local": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}},
    "adamw": {"local": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}},
    "clipped": {"local": {"max_grad_norm": 0.3, "weight_decay": 0.01}},
    "lr_schedule": {"local": {"lr_schedule": {"kind": "exponential", "factor": 0.5}}},
    "wsm": {"loss": "wsm", "local": {"epochs": 2}},
    "wsm with validation rows": {"loss": {"kind": "wsm", "val": True, "blend": 0.5}},
    "fedlc": {"loss": "fedlc", "local": {"epochs": 2}},
    "masked": {"loss": "masked", "local": {"epochs": 2}},
    "uniform": {"weighting": "uniform"},
    "distilled": {"local": {"epochs": 2, "terms": ["distill"]}},
    "distilled wsm": {"loss": "wsm", "local": {"proximal": 0.1, "terms": [{"kind": "distill", "tau": 2.0}]}},
}


@pytest.mark.parametrize("case", CASES)
def test_ragged_clients_are_trained_as_one_by_one(case):
    alone, together = both(*ragged(dict(CASES[case])))
    near(alone.state, together.state)
    for here, there in zip(alone.fleet.queries, together.fleet.queries, strict=True):
        assert torch.equal(here.answered, there.answered)
        assert here.answered.tolist() == [0, 1, 2, 3, 5, 6, 7]  # client 4 has no rows
        assert here.cost == there.cost
        near([here.notes[c].loss for c in here.notes], [there.notes[c].loss for c in there.notes])


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_what_clients_send_together_is_the_sum_of_what_each_sends(weighting):
    task = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), dtype=torch.float64)
    work = Training(task, LocalTrainer(batch_size=2), weighting)
    shards = [Shard(torch.rand(n, 3).double(), torch.arange(n) % 2, torch.arange(n)) for n in (5, 3, 2)]
    weights, total = task.init(Rng(0)), None
    requests = [work.request(weights, None, shard, NOW, Rng(k)) for k, shard in enumerate(shards)]
    for k, shard in enumerate(shards):
        total = sums.add(total, work(weights, None, shard, NOW, Rng(k)).total)
    near(total, work.sum_of(stack.train_stacked(stack.make_stack(requests[0]), requests), shards))


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedprox",
        "oracle",
        "flexcfl",
        "fielding",
        "feddrift",
        "fedadam",
        "fedavgm",
        "fedntd",
        "moon",
        "feddyn",
        "fednova",
        "fedcurv",
    ],
)
def test_methods_that_train_plainly_are_stacked(algorithm, monkeypatch):
    seen = []
    whole = engines.train_stacked
    monkeypatch.setattr(engines, "train_stacked", lambda *given: seen.append(len(given[1])) or whole(*given))
    options = {"local": {"proximal": 0.5}} if algorithm in ("fedprox", "oracle", "flexcfl", "fielding") else {}
    alone, together = both(*ragged(options, algorithm))
    near(alone.state, together.state)
    assert seen
    assert [asked.cost for asked in alone.fleet.queries] == [asked.cost for asked in together.fleet.queries]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedtem"])
def test_networks_for_sequences_are_stacked_without_a_warning(algorithm):
    branches = {"branch_layer": "projection", "prior": "em-only"}
    experiment = from_dict({
        "rounds": 2, "shift": ALWAYS,
        "data": {"source": {"kind": "play-roles", "vocabulary": 8, "length": 4, "max_samples": 12},
                 "partition": {"kind": "natural", "min_samples": 8}},
        "model": {"kind": "lstm", "embedding": 3, "hidden": 4},
        "method": [{"algorithm": algorithm, "cohort": 3, "local": {"lr": 0.5, "batch_size": 4},
                    **(branches if algorithm == "fedtem" else {})}],
    })  # fmt: skip
    host = host_of(experiment, experiment.method[0], 0)
    alone, together = both(experiment, host, rounds=2)
    near(alone.state, together.state, 1e-4)


WORKING = {
    "ifca": {"n_init": 2},
    "scaffold": {"local": {"epochs": 2}},
    "scaffold I": {"variant": "I"},
    "q-fedavg": {},
    "fedavg oort": {"cohort": "oort"},
    "aem": {},
    "fedtem": {},
    "fedtem of outputs": {"feature": "branches"},
    "fedtem of whole models": {"feature": "branches", "branch_layer": "*"},
    "fedtkm": {},
    "fedtem of a learned prior": {"prior": {"kind": "learned", "sketch": 8}},
    "fedtkm of a learned prior": {"prior": {"kind": "learned", "sketch": 8}},
    "fedem": {},
    "fedgmm": {},
    "pfedem": {},
    "window": {"window": 2},
    "min-loss": {},
    "scsgd": {"lam": 0.25},
    "t-shot": {"lam": 0.25},
    "moon": {"local": {"epochs": 2}},
    "fedrod": {"local": {"epochs": 2}},
    "fedpac": {"local": {"epochs": 2}},
    "fedala": {},
}


@pytest.mark.parametrize("name", WORKING)
def test_clients_that_work_in_step_do_what_they_do_alone(name, monkeypatch):
    """Losses of several models, corrections of their own, other models, abstention, memory, values per client."""
    seen = []
    whole = engines.train_stacked
    monkeypatch.setattr(engines, "train_stacked", lambda *given: seen.append(len(given[1])) or whole(*given))
    alone, many = both(*ragged(dict(WORKING[name]), name.partition(" ")[0]))
    kept = [[run.host.memory.settled(client) for client in range(len(SIZES))] for run in (alone, many)]
    near([alone.state, kept[0]], [many.state, kept[1]], 1e-8)
    assert max(seen, default=0) > 2
    for here, there in zip(alone.fleet.queries, many.fleet.queries, strict=True):
        assert torch.equal(here.answered, there.answered)
        assert here.cost == there.cost
        near([here.notes[c].loss for c in here.notes], [there.notes[c].loss for c in there.notes])


@pytest.mark.parametrize("name", ["apfl", "pfedme", "per-fedavg"])
def test_gradients_of_batches_are_those_of_clients_alone(name, monkeypatch):
    seen = []
    whole = StackedGradient.run_batched
    monkeypatch.setattr(StackedGradient, "run_batched", lambda one, every: seen.append(len(every)) or whole(one, every))
    alone, many = both(*ragged({}, name))
    kept = [[run.host.memory.settled(client) for client in range(len(SIZES))] for run in (alone, many)]
    near([alone.state, kept[0]], [many.state, kept[1]], 1e-8)
    assert max(seen) > 2


@pytest.mark.parametrize("name", ["fedala", "fedbabu", "per-fedavg"])
def test_clients_that_adapt_in_step_are_judged_as_alone(name):
    scores = []
    for run in both(*ragged({}, name)):
        served, slot = run.host.algorithm.serve(run.state, run.fleet.clients)
        scores.append(run.fleet.score(served, run.fleet.clients, slot=slot))
    alone, many = scores
    assert torch.equal(alone.correct, many.correct)
    near(alone.loss, many.loss, 1e-8)


@pytest.mark.parametrize("local", [{"epochs": 2}, {"local_steps": 4}, {"batch_size": 0}])
def test_batchnorm_sees_no_padding_and_its_statistics_are_each_clients_own(local):
    alone, together = both(*ragged({"local": local}, model={"kind": "python", "function": "helpers.toys:normed"}))
    assert together.state.weights.buffers
    near(alone.state, together.state)
    assert together.fleet.queries[0].answered.tolist() == [1, 2, 3, 5, 6, 7]  # nor can a single row be normalized


@pytest.mark.parametrize(("algorithm", "model", "rows"), [("scaffold", None, 0), ("ifca", NORMED, 1)])
def test_a_client_that_cannot_take_a_step_does_not_show_that_others_cannot_be_stacked(
    algorithm, model, rows, monkeypatch
):
    """Whoever comes first must not decide it: a run that is resumed begins with another client."""
    experiment, host = ragged(algorithm=algorithm, model=model)
    train = host.population.parts["train"]
    lists = [torch.from_numpy(np.asarray(train[client])) for client in range(len(train))]
    host, sizes = with_rows(host, [lists[2][:rows], *lists[1:4]] + [each[:2] for each in lists[4:]]), []
    whole = engines.train_stacked
    monkeypatch.setattr(engines, "train_stacked", lambda *given: sizes.append(len(given[1])) or whole(*given))
    near(*(run.state for run in both(experiment, host)))
    assert len(sizes) >= 3
    assert min(sizes) > 1


def test_a_client_whose_numbers_are_not_finite_is_refused_and_spoils_no_other():
    experiment, host = ragged(precision="fp32")
    rows = host.population.rows
    x = rows.x.clone()
    x[host.population.parts["train"][2]] *= 1e30
    odd = replace(host, population=replace(host.population, rows=replace(rows, x=x)))
    alone, together = both(experiment, odd, rounds=2)
    assert [query.refused.tolist() for query in together.fleet.queries] == [[2]]
    assert torch.equal(alone.fleet.queries[0].refused, together.fleet.queries[0].refused)
    near(alone.state, together.state, 1e-4)


@pytest.mark.parametrize("steps", [None, 1, 3, 11])
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("smallest", [1, 2])
def test_steps_are_planned_as_the_local_solver_takes_them(steps, batch, smallest):
    if smallest == 2 and batch == 1:
        pytest.skip("refused with BatchNorm")
    local = LocalTrainer(local_steps=steps, batch_size=batch, epochs=None if steps else 3)
    for rows in range(12):
        sizes, flat = stack.plan_steps(local, rows, torch.Generator().manual_seed(rows), smallest)
        drawn = local._batches((torch.arange(rows),), torch.Generator().manual_seed(rows), smallest)
        taken = [batch for _, (batch,) in drawn]
        assert sizes == [len(batch) for batch in taken]
        assert flat.tolist() == [row for batch in taken for row in batch.tolist()]


@pytest.mark.parametrize(("algorithm", "engine"), [("cfl", LocalEngine), ("fedavg", StackedEngine)])
def test_a_method_that_cannot_be_stacked_is_played_alone_beside_others(algorithm, engine):
    experiment = toy(algorithm, fleet={"kind": "stacked"})
    host = host_of(experiment, experiment.method[0], 0)
    assert engines.why_alone(host) == ("its clients do more than train" if engine is LocalEngine else None)
    fleet = judge_of(experiment, experiment.method[0], 0, MemoryStore(None)).fleet
    assert type(fleet.engine) is engine


@pytest.mark.parametrize(
    ("task", "local", "why"),
    [
        (Task(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1))), LocalTrainer(), "draws at random"),
        (Task(lambda: nn.Linear(3, 2), nn.CrossEntropyLoss()), LocalTrainer(), "its loss has no per-row form"),
        (Task(lambda: nn.Linear(3, 2)), LocalTrainer(augment=({"kind": "flip"},)), "changes pictures at random"),
    ],
)
def test_models_and_losses_that_cannot_be_stacked_say_why(task, local, why):
    few = Shard(torch.rand(2, 3), torch.arange(2), torch.arange(2))
    assert why in stack.unstackable(Train(task, local, task.init(Rng(0)), few, NOW, Rng(0)))


def test_a_stacked_run_that_is_stopped_goes_on_to_the_same_bytes(tmp_path):
    experiment = toy("fedprox", fleet={"kind": "stacked"})
    whole, halves = (Run(experiment, experiment.method[0], 0, tmp_path / part / "m" / "0") for part in ("a", "b"))
    assert [p.round for p in whole.play()][-1] == 6
    rounds = iter(range(1, 7))
    assert [p.round for p in halves.play(stop=lambda: next(rounds) == 3)] == [1, 2, 3]
    assert [p.round for p in halves.play()] == [4, 5, 6]
    assert (whole.folder / "rounds.jsonl").read_bytes() == (halves.folder / "rounds.jsonl").read_bytes()
    states = [run.folder / "checkpoints/00000006/state.safetensors" for run in (whole, halves)]
    assert same(*(codec.from_file(path) for path in states))


class Words(nn.Module):
    """A class for every step of a sequence."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, x):
        return self.head(self.embed(x))


def test_padding_of_sequences_and_of_batches_counts_for_nothing():
    """Sequences of two to four steps, in ragged batches: each client's update and loss are those it has alone."""
    task, solver = Task(Words, dtype=torch.float64), LocalTrainer(lr=0.5, batch_size=4, epochs=2)
    draw = torch.Generator().manual_seed(0)
    shards = []
    for rows in (7, 5, 2):
        x, y = (torch.randint(1, 5, (rows, 4), generator=draw) for _ in range(2))
        mask = torch.arange(4) < torch.randint(2, 5, (rows, 1), generator=draw)
        shards.append(Shard(x, y.masked_fill(~mask, 0), torch.arange(rows), mask=mask))
    weights, rngs = task.init(Rng(0)), [Rng(0).at(client) for client in range(3)]
    requests = [Train(task, solver, weights, shard, NOW, rng) for shard, rng in zip(shards, rngs, strict=True)]
    fit = stack.train_stacked(FuncStack(task.scratch, task.loss), requests)
    for client, (shard, rng) in enumerate(zip(shards, rngs, strict=True)):
        alone = solver(task, task.loss, weights, shard, NOW, rng)
        assert fit.loss[client] == pytest.approx(alone.loss, abs=1e-9)
        for name, change in alone.delta.params.items():
            torch.testing.assert_close(fit.delta.params[name][client], change, rtol=1e-9, atol=1e-9)


class Odd(nn.Module):
    """Two parameters that are added, one without dimensions, and a mean of its own over the rows of a batch."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.head(x * self.scale + self.one + self.two)


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"max_grad_norm": 0.05}, {"momentum": 0.5}])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_odd_models_are_trained_as_alone_and_as_torch_would(settings, mu):
    """Autograd gives parameters that are added one storage; each is pulled, clipped and decayed for itself."""
    task, solver = Task(Odd, dtype=torch.float64), LocalTrainer(lr=0.5, batch_size=3, **settings)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in (7, 5, 2)]
    shards = [Shard(x, torch.arange(len(x)) % 3, torch.arange(len(x))) for x in rows]
    one, other = task.init(Rng(0)), task.init(Rng(1))
    received, rngs = [other, one, other], [Rng(0).at(client) for client in range(3)]
    other.buffers["mean"].fill_(0.25)
    term = Proximal(mu) if mu else None
    given = zip(received, shards, rngs, strict=True)
    requests = [Train(task, solver, weights, shard, NOW, rng, term) for weights, shard, rng in given]
    fit = stack.train_stacked(FuncStack(task.scratch, task.loss), requests)
    for client, (weights, shard, rng) in enumerate(zip(received, shards, rngs, strict=True)):
        alone = solver(task, task.loss, weights, shard, NOW, rng, term=term)
        expected = by_torch(weights, shard, rng, settings, mu)
        for name, change in alone.delta.params.items():
            torch.testing.assert_close(change, expected[name], rtol=1e-6, atol=1e-7)  # torch clips to a little less
            torch.testing.assert_close(fit.delta.params[name][client], change, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(fit.delta.buffers["mean"][client], alone.delta.buffers["mean"], rtol=1e-9, atol=1e-9)


def by_torch(weights, shard, rng, settings, mu):
    """One epoch with torch's own optimizer, from a loss with the pull in it."""
    module = Odd().double()
    module.load_state_dict({**weights.params, **weights.buffers})
    max_grad_norm, others = settings.get("max_grad_norm"), {k: v for k, v in settings.items() if k != "max_grad_norm"}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, **others)
    for batch in torch.randperm(len(shard), generator=rng.at("shuffle").torch()).split(3):
        loss = nn.functional.cross_entropy(module(shard.x[batch]), shard.y[batch])
        pull = sum((p - weights.params[name]).square().sum() for name, p in module.named_parameters())
        optimizer.zero_grad()
        (loss + 0.5 * mu * pull).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        optimizer.step()
    return {name: p.detach() - weights.params[name] for name, p in module.named_parameters()}


def test_a_stack_holds_no_more_rows_than_there_is_room_for(monkeypatch):
    """Rows of 16 bytes, room for 30: clients of 53, 20, 9, 7, 4, 4, 1 rows are cut after each thirty that is full."""
    experiment, host = ragged()
    sizes, together = [], engines.train_stacked

    def counted(held, requests):
        sizes.append([len(request.shard) for request in requests])
        return together(held, requests)

    whole = played(experiment, host=host, rounds=1, engine=StackedEngine).state
    monkeypatch.setattr(engines, "train_stacked", counted)
    monkeypatch.setattr(engines, "ROW_BYTES", 30 * 16)
    near(played(experiment, host=host, rounds=1, engine=StackedEngine).state, whole)
    assert sizes == [[53], [20], [9, 7, 4], [4, 1]]


@pytest.mark.parametrize("name", ["fedem", "fedrc", "fedavg"])
def test_stacked_clients_of_several_labels_are_those_of_one_by_one(tmp_path, name):
    draw = np.random.default_rng(0)
    path = tmp_path / "labels.npz"
    np.savez(
        path, x=draw.normal(size=(96, 4)).astype("float32"), y=draw.integers(0, 2, (96, 3)), client=np.arange(96) % 8
    )
    data = {"source": {"kind": "npz", "path": str(path)}, "target": "labels", "groups": "none"}
    stacks(Case(lambda given=None, **changes: toy(name, given, data=data, shift={"who": "always"}, **changes), None))
