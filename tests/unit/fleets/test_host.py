"""The host: what clients answer is added up, revealed, kept, noted or refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.core.base import Answer, Notes, Prediction, Scores, Slotted, Sum, Weighted
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.data.ragged import Ragged
from fedtide.fleets.scoring import Tally, concat_scores
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.handmade import always_first, client_of, fleet, people

NAN, INF = float("nan"), float("inf")
ALL = torch.arange(8)


# -- refused answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["total", "weight", "plain number", "rows", "memory"])
@pytest.mark.parametrize(
    ("odd", "bad", "clients"),
    [(NAN, [0], 8), (INF, [3], 40), (-INF, [7], 40), (NAN, [2, 3, 5], 40), (INF, list(range(8)), 8)],
)
def test_an_answer_that_is_not_finite_is_refused_and_the_others_count(odd, where, bad, clients):
    """With 40 clients a block has two or three of them, so that the bad one stands beside good ones."""
    bad = [b * clients // 8 for b in bad]

    def work(payload, memory, shard, moment, rng):
        client = client_of(shard)
        wrong = client in bad
        value = torch.tensor([float(client), odd if wrong and where == "total" else 1.0])
        return Answer(
            {"n": Weighted(value, odd if wrong and where == "weight" else 2.0),
             "x": Weighted(odd if wrong and where == "plain number" else 1.0)},
            {"r": torch.tensor([odd if wrong and where == "rows" else float(client)])},
            memory={"m": torch.tensor([odd if wrong and where == "memory" else 1.0])},
            notes=Notes(branch=torch.tensor(client)),
        )  # fmt: skip

    made = fleet({"q": work}, people(clients))
    reply = made.ask("q", torch.arange(clients), {}, reveal=("r",))
    good = [c for c in range(clients) if c not in bad]
    assert reply.refused.tolist() == sorted(bad)
    assert reply.clients.tolist() == good
    (asked,) = made.queries
    assert sorted(asked.notes) == good
    for client in range(clients):
        assert (made.engine.memory.read(client, (1, 0)) is None) == (client in bad)
    if not good:
        assert reply.total is None
        return
    assert reply.total["n"].value.tolist() == [2.0 * sum(good), 2.0 * len(good)]
    assert reply.total["n"].weight == 2.0 * len(good)
    assert reply.total["x"] == Sum(float(len(good)), float(len(good)))
    assert reply.rows["r"].flatten().tolist() == [float(c) for c in good]


def test_a_work_is_run_twice_only_where_its_block_needs_it():
    ran = []

    def work(payload, memory, shard, moment, rng):
        ran.append(client_of(shard))
        return Answer({"n": Weighted(NAN if client_of(shard) == 20 else 1.0)})

    fleet({"q": work}, people(32)).ask("q", torch.arange(32), {})
    assert sorted(ran) == sorted([*range(32), 20, 21])


# -- abstention, reveals, notes, memory --------------------------------------------------------------------------------


def test_the_server_sees_what_it_asked_for_by_name_and_nothing_else():
    def work(payload, memory, shard, moment, rng):
        client = float(client_of(shard))
        rows = {"pi": torch.tensor([client, -client]), "secret": torch.tensor([client])}
        return Answer({"n": Weighted(1.0)}, rows, notes=Notes(branch=torch.tensor(client)))

    made = fleet({"q": work})
    reply = made.ask("q", torch.tensor([5, 2, 7]), {}, reveal=("pi",))
    assert set(reply.rows) == {"pi"}
    assert reply.rows["pi"].tolist() == [[2.0, -2.0], [5.0, -5.0], [7.0, -7.0]]
    assert made.ask("q", ALL, {}).rows == {}


def test_notes_go_to_the_record_and_not_to_the_server():
    note = lambda shard: Notes(torch.tensor(client_of(shard)), torch.ones(2))  # noqa: E731
    made = fleet({"q": lambda p, m, shard, t, rng: Answer({}, notes=note(shard))})
    reply = made.ask("q", torch.tensor([4, 1]), {})
    assert "branch" not in repr(reply)
    (asked,) = made.queries
    assert sorted(asked.notes) == [1, 4]
    assert asked.notes[4].branch.item() == 4
    assert asked.notes[4].component.tolist() == [1.0, 1.0]


LEAVES = {
    "a number": (Weighted(0.5, 3.0), 0.5),
    "a tensor": (Weighted(torch.tensor(0.25, requires_grad=True), 3.0), 0.25),
    "one for each model": (Weighted(torch.ones(2)), None),
    "a slot": (Slotted({0: Weighted(1.0)}, 2), None),
    "a table": (Weighted({"x": 1.0}), None),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_the_leaf_loss_of_training_is_noted(kind):
    leaf, noted = LEAVES[kind]
    work = lambda *given: Answer({"n": Weighted(1.0), "loss": leaf})  # noqa: E731
    made = fleet({"train": work, "q": work})
    cost = [made.ask(question, ALL, {}).cost.up for question in ("train", "q")]
    training, other = made.queries
    assert other.notes == {}
    assert [float(note.loss) for note in training.notes.values()] == ([] if noted is None else [noted] * 8)
    assert cost[0] == cost[1]


def test_what_is_kept_and_revealed_does_not_change_with_the_scratch_it_came_from():
    """Local training gives views on one scratch module: whatever leaves a client is copied."""
    scratch = torch.zeros(2)

    def work(payload, memory, shard, moment, rng):
        scratch.fill_(float(client_of(shard)))
        return Answer({"n": Weighted(scratch)}, {"r": scratch}, memory={"m": scratch}, notes=Notes(component=scratch))

    made = fleet({"q": work})
    reply = made.ask("q", ALL, {}, reveal=("r",))
    assert reply.rows["r"][:, 0].tolist() == [float(c) for c in range(8)]
    assert reply.total["n"].value.tolist() == [28.0, 28.0]
    for client in range(8):
        assert made.engine.memory.read(client, (1, 0))["m"].tolist() == [float(client)] * 2
        assert made.queries[0].notes[client].component.tolist() == [float(client)] * 2


# -- scores ------------------------------------------------------------------------------------------------------------


def test_scores_are_sums_per_client():
    """Client i has one test row of label i * 3 + 2 mod 2 = i mod 2; class 0 is predicted for everyone."""
    made = fleet({})
    scores = made.score({}, torch.tensor([3, 0, 2]))
    assert scores.clients.tolist() == [0, 2, 3]
    assert scores.rows.tolist() == [1.0, 1.0, 1.0]
    assert scores.correct.tolist() == [1.0, 1.0, 0.0]
    assert scores.loss.tolist() == [0.0, 0.0, 5.0]
    assert scores.choice is None
    train = made.score({}, torch.tensor([1]), part="train")
    assert (train.rows.tolist(), train.correct.tolist()) == ([2.0], [1.0])


def test_blocks_with_and_without_choices_are_joined():
    def scores(clients, choice):
        n = torch.ones(len(clients), dtype=torch.float64)
        return Scores(torch.tensor(clients), n, n, n, choice)

    both = concat_scores(
        [scores([0], None), scores([1, 2], torch.eye(2, dtype=torch.float64)), scores([3], torch.ones(1, 1))]
    )
    assert both.clients.tolist() == [0, 1, 2, 3]
    assert both.choice.tolist() == [[0, 0], [1, 0], [0, 1], [1, 0]]
    assert len(concat_scores([])) == 0


def test_weights_of_experts_are_summed_for_each_client():
    """Every row of client c has the weights (c / 8, 1 - c / 8)."""

    def predict(payload, memories, x, owner):
        share = (owner / 8.0).unsqueeze(1)
        return Prediction(torch.tensor([[0.0, -5.0]]).expand(len(x), 2), weights=torch.cat([share, 1 - share], 1))

    made = fleet({}, predict=predict)
    scores = made.score(0, torch.arange(4), part="train")
    rows = scores.rows.tolist()
    assert min(rows) > 1
    assert scores.choice is None
    assert scores.weights.tolist() == [[n * c / 8, n - n * c / 8] for c, n in enumerate(rows)]
    assert fleet({}).score(0, torch.arange(4)).weights is None


def test_other_ways_to_predict_and_densities_are_summed_for_each_client():
    """Labels are 0 and 1 by turns; "second" says 1 for everyone, and every row of client c has the density -c."""

    def predict(payload, memories, x, owner):
        first = torch.tensor([[0.0, -5.0]]).expand(len(x), 2)
        return Prediction(first, others={"first": first.argmax(1), "second": first.flip(1).argmax(1)}, density=-x[:, 0])

    scores = fleet({}, people(4, each=3), predict=predict).score({}, torch.arange(4), part="train")
    assert scores.rows.tolist() == [3.0] * 4
    assert scores.others["first"].tolist() == scores.correct.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert scores.others["second"].tolist() == [1.0] * 4
    assert scores.density.tolist() == [-3.0 * c for c in range(4)]
    some = scores.pick(torch.tensor([True, False, False, True]))
    assert some.others["second"].tolist() == [1.0, 1.0]
    assert some.density.tolist() == [0.0, -9.0]
    plain = fleet({}).score({}, torch.arange(4))
    assert (plain.others, plain.density, plain.pick(torch.tensor([0])).density) == ({}, None, None)


def test_other_ways_to_predict_sequences_count_the_steps_that_are_scored():
    """Two rows of one client, three steps and one scored; density is the row's, once for each of them."""
    tally, y = Tally(1), torch.tensor([[0, 1, 1], [1, 0, 0]])
    scored = torch.tensor([[True, True, True], [True, False, False]])
    logp = torch.tensor([0.0, -5.0]).expand(2, 3, 2)
    prediction = Prediction(logp, others={"second": logp.flip(2).argmax(2)}, density=torch.tensor([-2.0, -10.0]))
    tally.add(torch.tensor([0, 0]), prediction, y, scored)
    scores = tally.scores(torch.tensor([7]))
    assert (scores.rows.item(), scores.correct.item(), scores.others["second"].item()) == (4.0, 1.0, 3.0)
    assert scores.density.item() == 3 * -2.0 + -10.0


def test_everyone_is_judged_with_its_own_slot():
    def predict(payload, memories, x, owner):
        return Prediction(torch.tensor([payload]).expand(len(x), 2))

    slot = torch.tensor([1, 0, 1])
    scores = fleet({}, predict=predict).score([[0.0, -5.0], [-5.0, 0.0]], torch.tensor([3, 2, 0]), slot=slot)
    assert scores.clients.tolist() == [0, 2, 3]
    assert scores.correct.tolist() == [0.0, 1.0, 1.0]


def test_memory_is_read_for_judging_and_nothing_flows_back():
    def keep(payload, memory, shard, moment, rng):
        return Answer({}, memory={"m": torch.tensor(float(client_of(shard)))})

    def adapt(payload, memory, shard, moment, rng):
        return Answer({}, memory={"m": (memory or {"m": torch.tensor(-1.0)})["m"] + 100})

    told = []

    def predict(payload, memories, x, owner):
        told.append([None if m is None else float(m["m"]) for m in memories])
        return Prediction(torch.tensor([[0.0, -5.0]]).expand(len(x), 2))

    made = fleet({"q": keep}, people(4, held_out_clients=1), predict=predict, adapt=adapt)
    made.ask("q", torch.tensor([1, 3]), {})
    everyone = torch.arange(5)
    made.score({}, everyone)
    made.score({}, everyone)
    made.score({}, everyone, personal=False)
    assert told == [[99.0, 101.0, 99.0, 103.0, 99.0]] * 2 + [[None] * 5]
    assert made.engine.memory.read(3, (1, 0))["m"] == 3.0
    assert made.engine.memory.read(0, (1, 0)) is None


@pytest.mark.parametrize("given", [None, Answer({}), Answer({}, memory={"m": torch.tensor(NAN)})])
def test_an_adaptation_that_gives_nothing_or_nonsense_leaves_the_memory(given):
    told = []

    def predict(payload, memories, x, owner):
        told.append(memories)
        return Prediction(torch.tensor([[0.0, -5.0]]).expand(len(x), 2))

    fleet({}, predict=predict, adapt=lambda *a: given).score({}, torch.arange(3))
    assert told == [[None, None, None]]


def test_whoever_personalises_is_judged_with_a_model_of_its_own():
    """Local training gives views on one scratch module, in which the next client trains as well."""
    task, solver, told = Task(lambda: nn.Linear(1, 2)), LocalTrainer(lr=0.1, batch_size=0), []

    def adapt(payload, memory, shard, moment, rng):
        return Answer({}, memory=solver(task, task.loss, payload, shard, moment, rng).weights)

    def predict(payload, memories, x, owner):
        told.extend(detached(memories))
        return always_first(payload, memories, x, owner)

    made, start = fleet({}, people(4), predict=predict, adapt=adapt), task.init(Rng(0))
    made.score(start, torch.arange(4))
    together = told.copy()
    told.clear()
    for client in range(4):
        made.score(start, torch.tensor([client]))
    assert same(together, told)
    assert not any(same(together[a], together[b]) for a in range(4) for b in range(a))


@pytest.mark.parametrize(("part", "seen"), [("test", [[0], [4], [8]]), ("val", [None, None, None])])
def test_rows_that_are_judged_are_not_adapted_on(part, seen):
    """Client i holds rows 4i to 4i + 3: one to validate, two to train and one to test."""
    whole, told = people(3, each=3), []
    parts = {"train": Ragged.of([[4 * i + 1, 4 * i + 2] for i in range(3)]), "val": Ragged.of([[0], [4], [8]])}
    population = replace(whole, parts={**whole.parts, **parts})

    def adapt(payload, memory, shard, moment, rng):
        told.append((shard.ids.tolist(), None if shard.val is None else shard.val.ids.tolist()))

    fleet({}, population, adapt=adapt).score({}, torch.arange(3), part=part)
    assert told == [([4 * i + 1, 4 * i + 2], val) for i, val in enumerate(seen)]


@pytest.mark.parametrize("slotted", [False, True])
@pytest.mark.parametrize("each", [2, 5, 10])
def test_a_client_is_predicted_whole_however_small_the_batches(monkeypatch, each, slotted):
    """`predict` may decide for a client, by a vote over its rows."""
    monkeypatch.setattr("fedtide.fleets.scoring.ROWS", 7)
    told = []

    def predict(payload, memories, x, owner):
        told.append([x[owner == place].flatten().tolist() for place in range(len(memories))])
        return always_first(payload, memories, x, owner)

    clients, slot = torch.arange(7), torch.tensor([0, 1, 0, 1, 0, 0, 0]) if slotted else None
    fleet({}, people(7, each), predict=predict).score([{}, {}], clients, slot=slot, part="train")
    assert sorted(rows for call in told for rows in call) == [[float(client)] * each for client in range(7)]
    assert len(told) > 1
    assert max(sum(map(len, call)) for call in told) < 7 + each


def test_what_clients_make_to_be_judged_is_held_for_some_at_a_time(monkeypatch):
    """Of 40 bytes each, with room for 100, three are held, and the scores are those of all at once."""

    def adapt(payload, memory, shard, moment, rng):
        return Answer({}, memory={"m": torch.full((10,), float(client_of(shard)))})

    def predict(payload, memories, x, owner):
        held.append(len(memories))
        weight = torch.stack([memory["m"][0] for memory in memories])[owner]
        return Prediction(torch.stack([weight, -weight], 1).log_softmax(1))

    held: list[int] = []
    made = fleet({}, people(8), predict=predict, adapt=adapt)
    together = made.score({}, ALL)
    monkeypatch.setattr("fedtide.fleets.scoring.PERSONAL_BYTES", 100)
    assert same(made.score({}, ALL), together)
    assert held == [8, 3, 3, 2]
