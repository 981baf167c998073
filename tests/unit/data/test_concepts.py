"""Concepts of clients over time: planned, drawn, in a cycle; label swaps, turned and colored pictures, sets of labels.

By hand. Of five clients 0 and 3 are of group 0 (remainders 0 modulo 3), 1 and 4 of group 1, 2 of no group. Concept 1
exchanges labels 1 and 2, concept 2 exchanges 0 and 2. At 4 group 0 goes to concept 1, at 6 group 1 to concept 2, and at
9 both are back: the labels 0, 1, 2 of client 3 are read 0, 2, 1 in rounds 4 to 8, and those of client 4 are read 2, 1,
0 in rounds 6 to 8.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import IID, HeldOutClients, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.shift import (
    ChangePoints,
    Concept,
    ConceptDrift,
    Cycle,
    Drawn,
    DrawnConcepts,
    LabelBanks,
    Planned,
    Shift,
)
from helpers.examples import examples
from helpers.toys import PARTS

law = examples(25)
seeds = st.integers(0, 2**32)

SWAPS = (Concept(), Concept(swaps=((1, 2),)), Concept(swaps=((3, 4),)), Concept(swaps=((5, 6),)))
GROUPS = {"groups": ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9)), "modulo": 10}


def toy(n: int = 1200, classes: int = 10, channels: int = 3) -> Rows:
    """Pictures of two by two bytes, different in each corner."""
    x = (torch.arange(n)[:, None, None, None] + torch.arange(4).reshape(2, 2) * 50 + 1) % 250
    return Rows("toy", x.expand(n, channels, 2, 2).to(torch.uint8).contiguous(), torch.arange(n) % classes, classes)


def people(what=None, how=None, rows: Rows | None = None, clients: int = 20, seed: int = 0, **settings) -> Population:
    kinds = {**({"what": what} if what else {}), **({"how": how} if how else {})}
    settings = {"held_out_clients": HeldOutClients(2), "split": Split(val=0.1, test=0.2), **settings}
    return build(rows or toy(), IID(clients), shift=Shift(**kinds), seed=seed, **settings)


def labels_read(population: Population, client: int, r: int) -> list[int]:
    """How a client reads each label of the source."""
    y = torch.arange(population.rows.classes)
    return population.row_transform.apply(y, y, torch.full_like(y, client), float(r))[1].tolist()


def read_as(population: Population, client: int, r: int, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures and labels of a client as a model sees them, and its labels in the source."""
    shard = population.shard(client, Moment(r, 100), part)
    return shard.x, shard.y, population.rows.y[shard.ids.long()]


# -- planned ----------------------------------------------------------------------------------------------------------


def test_groups_change_when_they_are_planned_to():
    when = Planned(at=(4, 6, 9), to=((1, 0), (1, 2), (0, 0)), groups=((0,), (1,)), modulo=3)
    how = ConceptDrift(concepts=(Concept(), Concept(swaps=((1, 2),)), Concept(swaps=((0, 2),))), when=when)
    population = people(how=how, rows=toy(90, 3, 1), clients=5)
    assert [labels_read(population, 3, r) for r in (3, 4, 8, 9)] == [[0, 1, 2], [0, 2, 1], [0, 2, 1], [0, 1, 2]]
    assert [labels_read(population, 4, r) for r in (5, 6, 8, 9)] == [[0, 1, 2], [2, 1, 0], [2, 1, 0], [0, 1, 2]]
    assert labels_read(population, 2, 8) == [0, 1, 2]
    assert [population.group_at(Moment(r, 20)).tolist()[:5] for r in (3, 5, 7)] == [
        [0, 0, 0, 0, 0], [1, 0, 0, 1, 0], [1, 2, 0, 1, 2],
    ]  # fmt: skip
    assert [population.changed(Moment(r, 20)).tolist() for r in (4, 5, 6, 9)] == [[0, 3], [], [1, 4], [0, 1, 3, 4]]
    assert [population.events(Moment(r, 20)) for r in (4, 5)] == [("change",), ()]


@pytest.mark.parametrize(("at", "to", "concepts"), [
    ((100,), ((1, 2, 3),), {99: (0, 0, 0), 100: (1, 2, 3), 199: (1, 2, 3)}),
    ((100, 150), ((1, 2, 3), (0, 0, 0)), {100: (1, 2, 3), 149: (1, 2, 3), 150: (0, 0, 0)}),
    ((100, 110, 120), ((1, 0, 0), (1, 2, 0), (1, 2, 3)), {100: (1, 0, 0), 110: (1, 2, 0), 120: (1, 2, 3)}),
], ids=["sudden", "recurrent", "incremental"])  # fmt: skip
def test_the_three_drifts_of_fedccfa(at, to, concepts):
    """By the definition: of 20 clients id mod 10 below 3 swaps 1 and 2, below 6 3 and 4, others 5 and 6, in all parts.

    A second swap of the same labels is the way back.
    """
    population = people(how=ConceptDrift(concepts=SWAPS, when=Planned(at=at, to=to, **GROUPS)))
    pairs = [(), (1, 2), (3, 4), (5, 6)]
    for r, now in concepts.items():
        for client in range(20):
            pair = pairs[now[0 if client % 10 < 3 else 1 if client % 10 < 6 else 2]]
            for part in PARTS:
                _, y, source = read_as(population, client, r, part)
                wanted = [(sum(pair) - label if label in pair else label) for label in source.tolist()]
                assert y.tolist() == wanted


# -- what is read -----------------------------------------------------------------------------------------------------


def test_pictures_are_turned_and_colored_by_their_label():
    """A picture with the corners 1 2 / 3 4 is 2 4 / 1 3 after a quarter turn counter-clockwise."""
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]).expand(2, 3, 2, 2)
    how = ConceptDrift(concepts=(Concept(angles=(90, 0), colors=("all", "green"), labels=(1, 0)), Concept()))
    population = people(how=replace(how, when=Drawn(fraction=0)), rows=toy(80, 2), clients=2)
    client = int((population.group_at(Moment(0, 9)) == 0).nonzero()[0])
    kept = x.clone()
    pictures, y = population.row_transform.apply(x, torch.tensor([0, 1]), torch.tensor([client] * 2), 0.0)
    assert pictures[0].tolist() == [[[2.0, 4.0], [1.0, 3.0]]] * 3
    assert pictures[1].tolist() == [[[0.0, 0.0]] * 2, [[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0]] * 2]
    assert y.tolist() == [1, 0]
    assert torch.equal(x, kept)


@law
@given(seeds, st.integers(2, 6), st.integers(2, 5), st.integers(0, 8), st.integers(0, 8))
def test_drawn_concepts_differ_and_change_what_they_are_asked_to(seed, number, exchanged, turned, colored):
    drawn = DrawnConcepts(
        number=min(number, 2 if exchanged == 2 else 6), exchanged=exchanged, turned=turned, colored=colored
    )
    population = people(how=ConceptDrift(drawn=drawn), seed=seed)
    labels, turns, channels = population.row_transform.tables.unbind(1)
    assert len({str(table.tolist()) for table in population.row_transform.tables}) == drawn.number
    assert (labels.sort(dim=1).values == torch.arange(10)).all()
    assert (labels != torch.arange(10)).any(0).sum() <= exchanged
    assert ((turns > 0).sum(1) <= turned).all()
    assert ((channels < 3).sum(1) == colored).all()
    assert 0 <= turns.min() <= turns.max() <= 3


def test_whoever_sees_other_pictures_drifted_though_labels_are_the_same():
    turned = ConceptDrift(concepts=(Concept(), Concept(angles=(180,))), when=Planned(at=(3,), to=((1,),)))
    population = people(how=turned)
    assert population.changed(Moment(3, 9)).tolist() == list(range(20))
    assert not len(population.changed(Moment(4, 9)))
    before, after = (population.shard(0, Moment(r, 9)).x for r in (2, 3))
    assert torch.equal(after, before.flip(2, 3))


@pytest.mark.parametrize("ways", [{"concepts": (Concept(), Concept(angles=(180,)))}, {"concepts": SWAPS[:2]}])
def test_rows_and_readings_change_together_and_each_client_drifts_once(ways):
    when = Planned(at=(3,), to=((1,),))
    what = ChangePoints(concepts=LabelBanks(banks=((0, 1, 2), (1, 2, 3))), when=when)
    population = people(what, how=ConceptDrift(**ways, when=when))
    assert population.changed(Moment(3, 9)).tolist() == list(range(20))
    assert population.events(Moment(3, 9)) == ("change", "change")
    assert set(population.rows.y[population.held(0, Moment(3, 9), "train").long()].tolist()) == {1, 2, 3}


# -- when -------------------------------------------------------------------------------------------------------------


def concepts_over(population: Population, rounds: int) -> np.ndarray:
    """(rounds, clients) the concept of each client."""
    return np.stack([population.group_at(Moment(r, rounds)).numpy() for r in range(rounds)])


@law
@given(seeds, st.integers(2, 9), st.integers(2, 5))
def test_each_client_moves_once_in_each_stretch_at_a_time_of_its_own(seed, every, concepts):
    how = ConceptDrift(
        drawn=DrawnConcepts(number=concepts, turned=4), when=Drawn(every=every, fraction=1.0, together=False)
    )
    population = people(how=how, seed=seed)
    over = concepts_over(population, 4 * every + 1)
    moves = (over[1:] != over[:-1]).reshape(4, every, -1)  # rounds 1 to every, every + 1 to 2 every, ...
    assert (moves.sum(1) == 1).all()
    assert every == 2 or len(set(moves.argmax(1).reshape(-1).tolist())) > 1
    assert population.row_transform.trace.table(10.0) == sorted(
        population.row_transform.trace.table(10.0), key=lambda change: (change[1], change[0])
    )


@law
@given(seeds, st.integers(2, 5))
def test_any_concept_may_be_drawn_again_and_another_may_not(seed, concepts):
    def moved(to: str) -> np.ndarray:
        when = Drawn(every=1, fraction=1.0, to=to)
        over = concepts_over(
            people(how=ConceptDrift(drawn=DrawnConcepts(number=concepts, turned=4), when=when), seed=seed), 30
        )
        return (over[1:] != over[:-1]).mean()

    assert moved("another") == 1
    assert moved("any") == pytest.approx(1 - 1 / concepts, abs=0.12)


@pytest.mark.parametrize(("concepts", "present", "sets"), [
    (6, 2, [{0, 1}, {2, 3}, {4, 5}, {0, 1}]), (3, 2, [{0, 1}, {2, 0}, {1, 2}, {0, 1}]), (3, 1, [{0}, {1}, {2}, {0}]),
    (3, None, [{0, 1, 2}] * 4),
])  # fmt: skip
def test_concepts_go_and_come_back(concepts, present, sets):
    how = ConceptDrift(drawn=DrawnConcepts(number=concepts, turned=4), when=Cycle(every=5, present=present))
    over = concepts_over(people(how=how), 20)
    assert [set(over[r].tolist()) for r in (0, 5, 10, 15)] == sets
    assert (over[5:] != over[:-5]).all()  # all have moved on
    assert (over[:5] == over[0]).all()
    assert (over[15:] == over[:5]).all()  # three stretches later all is as it was
    counts = np.bincount(over[0, :20])
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("kind", ["how", "what"])
@law
@given(seed=seeds)
def test_rows_to_be_judged_on_may_stay_in_the_first_concept_or_in_one_that_is_never_trained_on(kind, seed):
    """As the training rows of a client in that concept would be read, or as many labels held."""
    labels = ((0, 1), (2, 3), (4, 5), (6, 7))
    when, banks = Drawn(every=2, fraction=1.0), LabelBanks(banks=labels)
    swaps = tuple(Concept(swaps=(pair,)) for pair in labels)

    def made(test: str) -> Population:
        shift = {"how": ConceptDrift(concepts=swaps, when=when, test=test)}
        if kind == "what":
            shift = {"what": ChangePoints(concepts=banks, when=when, test=test)}
        return people(**shift, rows=toy(8000), seed=seed)

    def concept_of(population: Population, client: int, r: int, part: str) -> int:
        _, y, source = read_as(population, client, r, part)
        seen = source if kind == "what" else source[y != source]
        return int(seen.min()) // 2 if len(seen) else -1

    for test in ("now", "first", "unseen"):
        population, over = made(test), concepts_over(made(test), 12)
        for client in (0, 7, 19):
            trained = [concept_of(population, client, r, "train") for r in range(12)]
            tested = {concept_of(population, client, r, "test") for r in (0, 5, 11)} - {-1}
            assert trained == over[:, client].tolist()
            if test == "first":
                assert tested == {trained[0]}
            elif test == "unseen":
                assert len(tested) == 1
                assert not tested & set(trained)
            else:
                assert tested <= {trained[r] for r in (0, 5, 11)}
            val = population.aside(client, Moment(5, 12))
            source = population.rows.y[val.ids.long()]
            assert {int(label) // 2 for label in (source if kind == "what" else source[val.y != source])} <= {
                trained[5]
            }
            counted = population.counts(torch.tensor([client]), "test", Moment(5, 12))
            assert int(counted) == len(population.held(client, Moment(5, 12), "test"))


def test_clients_that_never_change_may_be_judged_on_another_concept():
    how = ConceptDrift(concepts=(Concept(), Concept(angles=(180,))), when=Drawn(fraction=0.0), test="unseen")
    population = people(how=how)
    over = concepts_over(population, 50)
    assert (over == over[0]).all()
    assert set(over[0].tolist()) == {0, 1}
    for client in (0, 1):
        train, test = (population.shard(client, Moment(9, 50), part) for part in ("train", "test"))
        raw = [population.rows.x[shard.ids.long()].float() / 255 for shard in (train, test)]
        turned = [not torch.allclose(shard.x, x) for shard, x in zip((train, test), raw, strict=True)]
        assert turned == [bool(over[0, client]), not over[0, client]]


# -- sets of labels ---------------------------------------------------------------------------------------------------


@law
@given(seeds, st.integers(2, 8), st.integers(1, 4))
def test_a_client_holds_its_own_rows_of_the_labels_of_its_set(seed, banks, labels):
    what = ChangePoints(concepts=LabelBanks(banks, labels), when=Drawn(every=3))
    population = people(what, rows=toy(4000), clients=10, seed=seed)
    members = population.plan.members
    assert len({str(row.tolist()) for row in members}) == banks
    assert (members.sum(1) == labels).all()
    for r in (0, 3, 8):
        concept = population.group_at(Moment(r, 20))
        for client in (0, 7, 11):
            for part in PARTS:
                own = population.parts[part][client]
                mine = own[members[concept[client]][population.rows.y[own.long()]]]
                assert population.held(client, Moment(r, 20), part).tolist() == mine.tolist()


def test_changes_of_sets_of_labels_can_be_written_and_read(tmp_path):
    drawn = people(ChangePoints(concepts="label-banks", when=Drawn(every=3, together=False)))
    drawn.plan.write(str(tmp_path / "changes.csv"), 20)
    read = people(ChangePoints(concepts="label-banks", when=f"file:{tmp_path / 'changes.csv'}"))
    assert (concepts_over(drawn, 20) == concepts_over(read, 20)).all()


# -- mistakes ---------------------------------------------------------------------------------------------------------

TWO = (Concept(), Concept(swaps=((0, 1),)))
REFUSED = [
    (lambda: ConceptDrift(), "found 0 concepts; allowed: two or more, or a table drawn"),
    (lambda: ConceptDrift(concepts=TWO, drawn=DrawnConcepts()), "found 2 concepts; allowed: two or more, or"),
    (lambda: ConceptDrift(concepts=(Concept(), Concept())), "found a concept twice"),
    (lambda: Planned(at=(3, 3), to=((0,), (0,))), r"found at \[3.0, 3.0\]; allowed: times that rise"),
    (lambda: Planned(at=(3,), to=((0, 1),)), "allowed: a concept for each of 1 times and 1 groups"),
    (lambda: Planned(at=(3,), to=((0,),), groups=((2,),), modulo=2), "each remainder from 0 to 1 at most once"),
    (lambda: LabelBanks(banks=((0, 1),)), "allowed: two lists or more"),
    (lambda: people(how=ConceptDrift(concepts=TWO, when=Planned(at=(1,), to=((2,),)))), "when.to: found 2, but"),
    (lambda: people(how=ConceptDrift(concepts=TWO, when=Cycle(present=3))), "how.when.present: found 3, but"),
    (lambda: people(how=ConceptDrift(concepts=TWO, test="unseen")), "how.test: found 'unseen', but 2 are too few"),
    (
        lambda: people(how=ConceptDrift(concepts=TWO, when=Cycle(), test="unseen")),
        "test: found 'unseen', but 'unseen' works only with `when = \"drawn\"`; allowed: 'now', 'first'",
    ),
    (
        lambda: people(how=ConceptDrift(concepts=(Concept(), Concept(swaps=((0, 10),))))),
        r"concepts\[1\].swaps: found \[0, 10\], allowed: labels from 0 to 9",
    ),
    (
        lambda: people(how=ConceptDrift(concepts=(Concept(), Concept(labels=(0, 1, 1))))),
        r"concepts\[1\].labels: found \[0, 1, 1\], allowed: each label from 0 to 9 once",
    ),
    (
        lambda: people(how=ConceptDrift(concepts=(Concept(), Concept(angles=(0, 90))))),
        r"concepts\[1\].angles: found \[0, 90\], allowed: one for all, or one for each of 10 labels",
    ),
    (
        lambda: people(how=ConceptDrift(concepts=(Concept(), Concept(colors=("red",)))), rows=toy(channels=1)),
        r"none, or images with three channels \(data.source.channels = 3\)",
    ),
    (
        lambda: people(
            how=ConceptDrift(concepts=(Concept(), Concept(angles=(90,)))), rows=replace(toy(), x=torch.zeros(1200, 4))
        ),
        r"found 'angles', but rows have shape \(4,\)",
    ),
    (lambda: people(how=ConceptDrift(drawn=DrawnConcepts(exchanged=11))), "exchanged: found 11, allowed: at most"),
    (lambda: people(how=ConceptDrift(drawn=DrawnConcepts(exchanged=2))), "drawn.number: found 4, allowed: at most 2"),
    (lambda: people(ChangePoints(concepts=LabelBanks(banks=((0,), (10,))))), "banks: found 10, allowed: labels from 0"),
    (lambda: people(ChangePoints(concepts=LabelBanks(12, 1))), "banks: found 12, but there are 10 sets of 1"),
    (
        lambda: people(ChangePoints(concepts=LabelBanks(banks=((0,), (1,)))), rows=toy(60), clients=20),
        "client 0 has no training rows of bank",
    ),
    (lambda: people(ChangePoints(concepts=LabelBanks(), when=Cycle(present=5))), "when.present: found 5, but"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_does_not_fit_is_one_clear_line(make, said):
    with pytest.raises(FedtideError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("part", "value"), [
    ("how", {"kind": "concept-drift", "concepts": [{}, {"angles": [45]}]}),
    ("how", {"kind": "concept-drift", "concepts": [{}, {"colors": ["pink"]}]}),
    ("how", {"kind": "concept-drift", "drawn": {}, "test": "later"}),
    ("what", {"kind": "change-points", "when": {"kind": "cycle", "every": 0}}),
    ("what", {"kind": "change-points", "when": {"kind": "planned", "at": [], "to": []}}),
], ids=str)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(part, value):
    with pytest.raises(ValidationError, match=f"{part}."):
        TypeAdapter(Shift).validate_python({part: value})


def test_a_report_says_what_changes_in_words():
    how = ConceptDrift(concepts=TWO, when=Planned(at=(100, 150), to=((1,), (0,))))
    said = how.words((), "rounds")
    assert all(words in said for words in ("2 ways", "differ in labels", "rounds 100 and 150"))
    drawn = ConceptDrift(
        drawn=DrawnConcepts(turned=8, colored=8), when=Drawn(every=10, fraction=1.0, to="any", together=False)
    )
    said = drawn.words((), "rounds")
    assert all(words in said for words in ("angles and colors", "every 10 rounds all of the clients"))
    assert "labels" not in said
    what = ChangePoints(concepts="label-banks", when=Cycle(every=5, present=2))
    said = what.words((), "rounds", 9)
    assert all(words in said for words in ("a few labels", "every 5 rounds all clients"))
