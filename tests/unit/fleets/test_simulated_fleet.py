"""The simulated fleet: whom it asks, whose answer counts, how answers are summed, and what they cost."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Answer, Cost, Moment, Notes, Sum, Weighted, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.data.shift import Shift
from fedtide.data.shift.who import Always
from fedtide.fleets.ask import Ask, BlockResult, Query
from fedtide.fleets.engines import Branch, cut_branches
from fedtide.fleets.simulated import _sends
from fedtide.fleets.totals import BLOCKS, add_up, join
from helpers.examples import examples
from helpers.handmade import client_of, fleet, people

law = examples(40)


def value(client: int) -> float:
    """Something that is rounded in every sum."""
    return 1 / (client + 3)


def fraction(payload, memory, shard, moment, rng):
    return Answer({"n": Weighted(torch.tensor([value(client_of(shard))], dtype=torch.float64), 1 / 7)})


def summed(blocks: list[list[int]]) -> float:
    """Each block from its first client on, then blocks by halves, of which the first has one more, in double precision.

    A half without a client adds nothing.
    """

    def half(blocks):
        if len(blocks) == 1:
            part = None
            for client in blocks[0]:
                held = torch.tensor([value(client)], dtype=torch.float64)
                part = held.mul(1 / 7) if part is None else part.add_(held, alpha=1 / 7)
            return None if part is None else part.item()
        middle = (len(blocks) + 1) // 2
        there = [part for part in (half(blocks[:middle]), half(blocks[middle:])) if part is not None]
        return sum(there) if there else None

    return half(blocks)


def cut(clients: list[int]) -> list[list[int]]:
    """In at most BLOCKS blocks, the first ones one longer."""
    count = min(BLOCKS, len(clients))
    sizes = [len(clients) // count + (k < len(clients) % count) for k in range(count)]
    edges = [sum(sizes[:k]) for k in range(count + 1)]
    return [clients[a:b] for a, b in itertools.pairwise(edges)]


# -- sums in blocks ----------------------------------------------------------------------------------------------------


@law
@given(st.integers(1, 70))
def test_sums_are_taken_over_sorted_ids_in_blocks(clients):
    made = fleet({"q": fraction}, people(clients))
    order = torch.from_numpy(Rng(clients).numpy().permutation(clients))
    reply = made.ask("q", order, {})
    assert reply.total["n"].value.item() == summed(cut(list(range(clients))))
    assert reply.clients.tolist() == list(range(clients))


@law
@given(st.integers(20, 60), st.data())
def test_an_absence_moves_no_client_to_another_block(clients, data):
    """Blocks are cut from those asked: the sum of the others is what it was, to the last bit."""
    absent = data.draw(st.lists(st.integers(0, clients - 1), unique=True, max_size=clients - 1))
    seconds = [9.0 if c in absent else 1.0 for c in range(clients)]
    late = fleet({"q": fraction}, people(clients), seconds=seconds).ask("q", torch.arange(clients), {}, deadline=5.0)

    def sparing(payload, memory, shard, moment, rng):
        return None if client_of(shard) in absent else fraction(payload, memory, shard, moment, rng)

    abstained = fleet({"q": sparing}, people(clients)).ask("q", torch.arange(clients), {})
    expected = summed([[c for c in block if c not in absent] for block in cut(list(range(clients)))])
    assert late.total["n"].value.item() == expected
    assert same(late.total, abstained.total)
    assert late.clients.tolist() == abstained.clients.tolist() == [c for c in range(clients) if c not in absent]


@law
@given(st.lists(st.integers(0, 50), min_size=1, max_size=BLOCKS), st.integers(1, 20))
def test_branches_that_are_added_up_elsewhere_change_no_bit(work, processes):
    """However uneven the blocks are and how many processes there are, and whoever adds a branch up."""
    blocks = [Ask("q", "q", Moment(0, 1), torch.tensor([k] * bool(rows))) for k, rows in enumerate(work)]

    def one(ask):
        sums = Sum(torch.tensor([value(k) for k in ask.clients.tolist()], dtype=torch.float64), 1.0)
        return BlockResult({"n": sums} if len(ask.clients) else None, ask.clients.tolist(), {}, [], {}, [], 1)

    branches = cut_branches(0, len(work), processes)
    assert [first for first, _ in branches] == [0, *(last for _, last in branches[:-1])]
    assert branches[-1][1] == len(work)
    made = [Branch.of(blocks[first:last]) for first, last in branches]
    there = join((add_up(map(one, each.blocks()), len(each.sizes)) for each in made), len(work))
    here = join(map(one, blocks), len(work))
    assert same(there.total, here.total)
    assert there.clients == here.clients
    assert (there.blocks, there.up) == (len(work), len(work))


# -- who counts --------------------------------------------------------------------------------------------------------

SECONDS = [5.0, 1.0, 3.0, 1.0, 8.0, 2.0, 1.0, 4.0]


@pytest.mark.parametrize(("first", "counted"), [
    (1, [1]), (2, [1, 3]), (3, [1, 3, 6]), (4, [1, 3, 5, 6]), (8, list(range(8))), (99, list(range(8))), (0, []),
])  # fmt: skip
def test_the_first_to_answer_count_and_ties_go_to_the_lower_id(first, counted):
    reply = fleet({"q": fraction}, seconds=SECONDS).ask("q", torch.arange(8), {}, first=first)
    assert reply.clients.tolist() == counted
    assert reply.seconds.tolist() == [SECONDS[c] for c in counted]


@pytest.mark.parametrize(
    ("deadline", "counted"), [(0.5, []), (1.0, [1, 3, 6]), (4.0, [1, 2, 3, 5, 6, 7]), (8.0, list(range(8)))]
)
def test_whoever_answers_by_the_deadline_counts(deadline, counted):
    reply = fleet({"q": fraction}, seconds=SECONDS).ask("q", torch.arange(8), {}, deadline=deadline)
    assert reply.clients.tolist() == counted
    assert (reply.total is None) == (not counted)


def test_who_is_not_there_and_who_is_asked_twice_is_refused():
    made = fleet({"q": fraction})
    with pytest.raises(FedtideError, match="'q' asks client 8; allowed: registered clients, 0 to 7"):
        made.ask("q", torch.tensor([1, 8]), {})
    with pytest.raises(FedtideError, match="'q' asks client 3 twice"):
        made.ask("q", torch.tensor([3, 1, 3]), {})


@pytest.mark.parametrize("option", ["reveals", "slott"])
def test_an_option_that_no_question_has_is_refused(option):
    with pytest.raises(TypeError, match=option):
        fleet({"q": fraction}).ask("q", torch.arange(8), {}, **{option: ("n",)})


def test_work_that_will_not_count_is_not_done():
    worked = []

    def work(payload, memory, shard, moment, rng):
        worked.append(client_of(shard))
        return Answer({}, memory={"c": torch.ones(1)})

    made = fleet({"q": work}, seconds=SECONDS)
    made.ask("q", torch.arange(8), {}, first=3)
    assert worked == [1, 3, 6]
    assert [c for c in range(8) if made.engine.memory.read(c, (1, 0)) is not None] == [1, 3, 6]


def test_drop_outs_are_drawn_per_client_and_ask_and_not_among_the_first():
    population = people(40, shift=Shift(who=Always(dropout_rate=0.5)))
    made = fleet({"q": fraction}, population, seconds=[float(c) for c in range(40)])
    everyone = torch.arange(40)
    one, two = (made.ask("q", everyone, {}).clients.tolist() for _ in range(2))
    assert 8 < len(one) < 32
    assert one != two
    made.begin(Moment(0, 10, 0.0))
    assert made.ask("q", everyone, {}).clients.tolist() == one
    made.begin(Moment(0, 10, 0.0))
    assert made.ask("q", everyone, {}, first=3).clients.tolist() == one[:3]
    made.begin(Moment(0, 10, 0.0))
    some = everyone[5:25]
    assert made.ask("q", some, {}).clients.tolist() == [c for c in one if 5 <= c < 25]


# -- cost --------------------------------------------------------------------------------------------------------------


def test_bytes_by_hand():
    """Down: 3 float32 and a number. Up: 5 float32, a number, two weights, 2 float64 revealed, and not the secret."""

    def work(payload, memory, shard, moment, rng):
        return Answer(
            {"delta": Weighted(torch.zeros(5), 3.0), "loss": Weighted(0.5, 3.0)},
            {"pi": torch.zeros(2, dtype=torch.float64), "secret": torch.zeros(99)},
            memory={"big": torch.zeros(1000)},
            notes=Notes(component=torch.zeros(50)),
        )

    made = fleet({"q": work})
    reply = made.ask("q", torch.tensor([1, 4, 6]), {"w": torch.zeros(3), "t": 7}, reveal=("pi",))
    assert (reply.cost.down, reply.cost.up) == (3 * 20, 3 * (20 + 8 + 8 + 8 + 16))
    assert made.queries[0].cost == reply.cost


# -- slots -------------------------------------------------------------------------------------------------------------


def test_totals_come_back_per_slot_whatever_the_order_of_the_clients():
    def work(payload, memory, shard, moment, rng):
        return Answer({"n": Weighted(float(client_of(shard)) + payload["add"])})

    made = fleet({"q": work})
    payload = [{"add": 0.0}, {"add": 100.0}, {"add": 1000.0}]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        slot = torch.tensor([0, 2, 0, 2])[order]
        reply = made.ask("q", torch.tensor([2, 3, 5, 7])[order], payload, slot=slot)
        assert reply.total == [{"n": Sum(7.0, 2.0)}, None, {"n": Sum(2010.0, 2.0)}]
        assert reply.clients.tolist() == [2, 3, 5, 7]


# -- keys --------------------------------------------------------------------------------------------------------------


def keyed(payload, memory, shard, moment, rng):
    return Answer({}, {"key": torch.tensor(rng.number)})


def test_a_client_works_with_the_key_of_seed_round_client_and_question():
    made = fleet({"train": keyed, "report": keyed}, seed=7)
    made.begin(Moment(3, 10, 0.0))
    ids = torch.tensor([2, 5])
    replies = [made.ask(q, ids, {}, reveal=("key",)) for q in ("train", "report", "train", "train", "report")]
    purposes = ["train", "report", "train#1", "train#2", "report#1"]
    for reply, purpose in zip(replies, purposes, strict=True):
        assert reply.rows["key"].tolist() == [Rng(7).at(3, c, purpose).number for c in (2, 5)]
    made.begin(Moment(4, 10, 0.0))
    assert made.ask("train", ids, {}, reveal=("key",)).rows["key"].tolist() == [
        Rng(7).at(4, c, "train").number for c in (2, 5)
    ]


def test_torchs_global_generator_is_seeded_per_client_and_restored():
    def work(payload, memory, shard, moment, rng):
        return Answer({}, {"drawn": torch.rand(3)})

    before = torch.get_rng_state()
    drawn = [
        fleet({"q": work}).ask("q", ids, {}, reveal=("drawn",)).rows["drawn"]
        for ids in (torch.arange(4), torch.tensor([2]))
    ]
    assert torch.equal(drawn[0][2:3], drawn[1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert torch.equal(before, torch.get_rng_state())


# -- memory, moments, queries ---------------------------------------------------------------------------------------


def test_memory_is_written_when_an_ask_ends_and_not_before():
    def nosy(payload, memory, shard, moment, rng):
        made.engine.memory.read(0, (0, 1))
        seen.append(made.engine.memory.read(0, (0, 1)))
        return Answer({}, memory={"c": 1})

    seen = []
    made = fleet({"q": nosy})
    made.ask("q", torch.arange(4), {})
    assert seen == [None] * 4


# -- sums only ---------------------------------------------------------------------------------------------------------


def test_a_fleet_that_gives_sums_only_refuses_every_reveal_before_anyone_works():
    worked = []

    def work(*given):
        worked.append(1)
        return Answer({"n": Weighted(1.0)}, {"pi": torch.zeros(1)})

    made = fleet({"q": work}, sums_only=True)
    with pytest.raises(FedtideError, match="'q' asks to see pi, mu per client; allowed: sums only"):
        made.ask("q", torch.arange(3), {}, reveal=("pi", "mu"))
    assert worked == []
    assert made.queries == []
    assert made.ask("q", torch.arange(3), {}).total["n"].value == 3.0


# -- what was sent -----------------------------------------------------------------------------------------------------


def model(value: float) -> Weights:
    return Weights({"w": torch.tensor([value])})


@pytest.mark.parametrize(("payload", "held"), [
    ([model(1), model(2)], True),
    ([model(2), model(1)], False),  # another order: slots are no numbers of the models that were held
    ([model(1), model(3)], False),
    ([{"models": {0: model(1)}, "own": 0}, {"models": {0: model(1), 1: model(2)}}], True),
    ([{"models": {0: model(1)}, "own": 0}, {"models": {4: model(9)}, "own": 4}], False),
])  # fmt: skip
def test_models_that_are_sent_are_those_that_were_held(payload, held):
    both = torch.tensor([0, 1])
    ask = Ask("train", "train", Moment(0, 1), both, both, 2)
    query = Query(ask, None, both, both[:0], Cost(0, 0), 0.0, payload=payload)
    assert _sends(query, (model(1), model(2))) is held
    assert _sends(replace(query, ask=replace(ask, slot=None)), (model(7),))
