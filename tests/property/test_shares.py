"""Shares of clients' secrets: sums open without those that vanished, and nothing opens by what may not be given."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedtide.core.errors import FedtideError
from fedtide.wire import masks, shares
from fedtide.wire.keys import library, shamir
from fedtide.wire.masks import Context, Dealt, Masker, Question, Shown, hidden
from fedtide.wire.shares import SEALED, deal, gather, needed
from fedtide.wire.unmask import Wrong, recovered, unmasked, unsealed
from helpers.examples import examples

CONTEXT = Context("run", (3, 0), 0, "a.0")
WHOLE = st.integers(-(2**63), 2**63 - 1)
PARTS = (slice(0, 1), slice(1, None))
ABOUT = Question(3, "train", "model")


@dataclass
class Cohort:
    """Clients at nodes that have dealt shares and masked a vector each."""

    nodes: list[int]
    at: dict[int, Masker]
    peers: dict[int, str]
    dealt: dict[int, Dealt]
    sent: dict[int, torch.Tensor]

    def place(self, client: int) -> int:
        return sorted({f"node-{node}" for node in self.nodes}).index(f"node-{self.nodes[client]}")

    def shown(
        self, alive: Iterable[int], lost: Iterable[int], parts: tuple[int, ...] = (0, 1), fewest: int = 2
    ) -> dict[int, Shown]:
        named, lost = sorted(alive), sorted(lost)
        return {k: self.at[k].show(CONTEXT, k, named, fewest, parts, lost) for k in named if k not in lost}

    def recovered(self, alive: Iterable[int], lost: Iterable[int], shown: Mapping[int, Shown]):
        """As a server does: by the first client of each node that is left."""
        secrets = unsealed(shown)
        helpers = {self.place(k): secrets[k] for k in sorted(shown, reverse=True)}
        return recovered(CONTEXT, ABOUT.key, self.dealt, sorted(lost), sorted(self.peers.keys() - set(alive)), helpers)


def cohort(
    nodes: list[int], rows: list[list[int]], context: Context = CONTEXT, masked: set[int] | None = None, fewest: int = 2
):
    maskers = {name: Masker("run", f"node-{name}") for name in set(nodes)}
    at = {client: maskers[name] for client, name in enumerate(nodes)}
    names = {client: (node.node, node.bundle.public) for client, node in at.items()}
    peers = {client: node.bundle.public for client, node in at.items()}
    dealt = {client: node.deal(context, client, names, fewest) for client, node in at.items()}
    drawn = {client: each.public for client, each in dealt.items()}
    sent = {
        k: at[k].masked(context, k, torch.tensor(rows[k]), peers, ABOUT, PARTS, drawn)
        for k in at if masked is None or k in masked
    }  # fmt: skip
    return Cohort(nodes, at, peers, dealt, sent)


@st.composite
def cohorts(draw: st.DrawFn):
    """The node of each client, who answers, who vanishes then, and their vectors."""
    count = draw(st.integers(4, 7))
    nodes = [*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=2))]
    clients = range(len(nodes))
    alive = draw(st.sets(st.sampled_from(clients), min_size=3))
    lost = draw(st.sets(st.sampled_from(sorted(alive)), min_size=1, max_size=len(alive) // 3))
    stay = alive - lost
    assume(len({nodes[k] for k in stay}) >= needed(count, 2))
    assume(hidden({k: nodes[k] for k in stay}, 2))
    return nodes, alive, lost, [draw(st.lists(WHOLE, min_size=3, max_size=3)) for _ in clients]


@examples(25)
@given(cohorts())
def test_the_sum_of_who_answered_comes_out_exactly_whoever_vanishes(drawn):
    """Of a third at most; some never answered, and so are not in the sum."""
    nodes, alive, lost, rows = drawn
    made = cohort(nodes, rows)
    shown = made.shown(alive, lost)
    vanished, wrong = made.recovered(alive, lost, shown)
    assert wrong == []
    opened = unmasked({k: made.sent[k] for k in alive}, shown, PARTS, vanished, (0, 1))
    expected = [sum(column) % 2**64 for column in zip(*(rows[k] for k in alive), strict=True)]
    assert torch.cat(opened).numpy().view(np.uint64).tolist() == expected


def test_seven_nodes_of_whom_one_vanishes_and_one_never_answered_by_hand():
    """Vectors 1, 2, 4, ...: the sum tells who is in it."""
    made = cohort(list(range(7)), [[2**k, 2**k] for k in range(7)], masked=set(range(6)))
    shown = made.shown(range(6), [4])
    assert set(shown[0].opens) == {1, 2, 3, 5}
    assert set(shown[0].seeds) == {4}
    assert set(shown[0].keys) == set(shown[0].links) == {6}
    vanished, _ = made.recovered(range(6), [4], shown)
    assert set(vanished[4].links) == {6}
    opened = unmasked(made.sent, shown, PARTS, vanished, (0, 1))
    assert torch.cat(opened).tolist() == [63, 63]
    # The first part alone: what is shown opens no other one.
    first = made.shown(range(6), [4], (0,))
    assert torch.cat(unmasked(made.sent, first, PARTS[:1], vanished, (0,))).tolist() == [63]
    assert torch.cat(unmasked(made.sent, first, PARTS[1:], vanished, (0,))).tolist() != [63]
    assert made.shown(range(6), [4]) == shown, "a question that comes twice is answered as before"


def test_shares_by_the_library_and_how_many_are_needed():
    keys = [bytes([place]) * 32 for place in range(100)]
    sealed = deal(b"0123456789abcdef", keys, 67)
    assert len(sealed) == 100 * SEALED
    some = dict(list(enumerate(keys))[33:])
    assert gather(sealed, some, 67) == (b"0123456789abcdef", [])
    some.pop(99)
    assert gather(sealed, some, 67) == (None, [])
    few = deal(b"0123456789abcdef", keys[:4], 3)
    opened = [
        (k + 1, shares._cipher(keys[k]).decrypt(bytes(12), few[SEALED * k : SEALED * (k + 1)], None)) for k in range(4)
    ]
    assert shamir().combine(opened[1:]) == b"0123456789abcdef"
    assert shamir().combine(opened[1:3]) != b"0123456789abcdef", "two of the three that are needed"
    assert gather(few, {0: keys[0], 1: keys[2], 3: keys[3]}, 3) == (None, [1])
    assert gather(few, {0: keys[0], 1: keys[1], 2: keys[2], 3: keys[0]}, 3) == (b"0123456789abcdef", [3])


def knows_both(made: Cohort, told: Mapping[int, str], helping: set[int], fewest: int) -> bool:
    """Whether a server has client 0's b, and all that it shares with others, by what it tells these of the list.

    Client 0 and some others are told of one list, the rest of one without it. Helpers are in both, with all they have.
    """
    inside, outside = ([k for k in told if told[k] == word] for word in ("in", "out"))

    def opens(clients: list[int], lost: list[int]) -> bool:
        if not clients:  # helpers among themselves
            return len(helping) >= made.dealt[0].needed
        named = sorted({*clients, *helping, *lost})
        try:
            for k in clients:
                made.at[k].show(CONTEXT, k, named, fewest, (0,), lost)
        except FedtideError:
            return False
        return True

    # One of the list of client 0 is said to have vanished from the other one, so that shares of keys are given.
    return opens([0, *inside], []) and ((not inside and not outside) or opens(outside, inside[:1]))


@pytest.mark.parametrize(("count", "fewest"), [(4, 3), (5, 3), (6, 3), (6, 4), (3, 2), (7, 4)])
def test_a_server_and_fewer_nodes_than_are_said_never_have_both_secrets_of_a_client(count, fewest):
    """Whatever lists it tells the others; and with one node more it has them, so the number is no smaller."""
    least = 2 * needed(count, fewest) - count
    assert least >= fewest - 1, "as many can be in a list with one other client"
    for helping in (set(range(1, least)), set(range(1, least + 1))):
        honest = [k for k in range(1, count) if k not in helping]
        both = []
        for lists in product(("in", "out"), repeat=len(honest)):
            made = cohort(list(range(count)), [[1, 1]] * count, fewest=fewest)
            told = dict(zip(honest, lists, strict=True))
            both.append(knows_both(made, told, helping, fewest))
        assert any(both) == (len(helping) == least)


def test_two_lists_of_which_one_is_short():
    """Three of twelve open b of client 0, and eleven the key of it: each node is told one list."""
    made = cohort(list(range(12)), [[1, 1]] * 12)
    with pytest.raises(FedtideError, match="with clients of 8 nodes left"):
        made.at[0].show(CONTEXT, 0, [0, 1, 2], 2)
    assert made.at[3].show(CONTEXT, 3, range(1, 12), 2, (0,), [1, 2]).keys


def test_masks_with_few_of_those_that_have_shares():
    """Else two who are said to have gone would open all masks of client 0, which is said to have vanished."""
    made = cohort(list(range(9)), [[1, 1]] * 9, masked=set(range(1, 9)))
    few = {k: made.dealt[k].public for k in range(3)}
    with pytest.raises(FedtideError, match="of all clients at 6 nodes or more"):
        made.at[0].masked(CONTEXT, 0, torch.tensor([1, 1]), {k: made.peers[k] for k in few}, ABOUT, PARTS, few)


def test_shares_for_fewer_nodes_than_others_deal_for():
    """Client 0 was told of four nodes, so three could open its b. But these would have to open a list of so few."""
    made = cohort(list(range(12)), [[1, 1]] * 12, masked=set(range(1, 12)))
    later = replace(CONTEXT, attempt="a.1")
    names = {k: (made.at[k].node, made.peers[k]) for k in range(4)}
    made.at[0].deal(later, 0, names, 2)
    for k in range(1, 12):
        made.at[k].deal(later, k, {j: (node.node, node.bundle.public) for j, node in made.at.items()}, 2)
    drawn = {k: made.at[k]._dealt[later, k].dealing.public for k in range(12)}
    four = {k: drawn[k] for k in range(4)}
    made.at[0].masked(later, 0, torch.tensor([1, 1]), {k: made.peers[k] for k in four}, ABOUT, PARTS, four)
    for k in (1, 2, 3):
        made.at[k].masked(later, k, torch.tensor([1, 1]), made.peers, ABOUT, PARTS, drawn)
        with pytest.raises(FedtideError, match="with clients of 8 nodes left"):
            made.at[k].show(later, k, [0, 1, 2, 3], 2, (0,), [0])


def test_masks_among_clients_that_a_list_leaves_out():
    """Each of five nodes has two clients. Client 0 would mask among the second ones; a list has the first ones."""
    made = cohort([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [[1, 1]] * 10, masked=set(range(1, 10)))
    second = {k: made.dealt[k].public for k in (0, 5, 6, 7, 8, 9)}
    with pytest.raises(FedtideError, match="of all clients at 4 nodes or more"):
        made.at[0].masked(CONTEXT, 0, torch.tensor([1, 1]), {k: made.peers[k] for k in second}, ABOUT, PARTS, second)


def test_shares_open_only_for_who_was_asked_the_same():
    """Client 0 is told of fewer clients than its holders are: the keys of its shares are others."""
    made = cohort([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [[1, 1]] * 10, masked=set(range(1, 10)))
    later = replace(CONTEXT, attempt="a.1")
    asked = {k: (made.at[k].node, made.peers[k]) for k in range(10)}
    made.dealt = {k: made.at[k].deal(later, k, asked, 2) for k in range(1, 10)}
    made.dealt[0] = made.at[0].deal(later, 0, {k: asked[k] for k in (0, 5, 6, 7, 8, 9)}, 2)
    drawn = {k: each.public for k, each in made.dealt.items()}
    second = {k: drawn[k] for k in (0, 5, 6, 7, 8, 9)}
    x = torch.tensor([1, 1])
    made.at[0].masked(later, 0, x, {k: made.peers[k] for k in second}, ABOUT, PARTS, second)
    for k in range(1, 5):
        made.at[k].masked(later, k, x, made.peers, ABOUT, PARTS, drawn)
    shown = {k: made.at[k].show(later, k, range(5), 2, (0,), [0]) for k in range(1, 5)}
    secrets = unsealed(shown)
    helpers = {made.place(k): secrets[k] for k in range(1, 5)}
    vanished, _ = recovered(later, ABOUT.key, made.dealt, [0], range(5, 10), helpers)
    assert vanished == {}


def vanishes(at: Mapping[int, Masker], asked: Iterable[int], named: Iterable[int], attempt: str) -> None:
    """Have client 0 deal shares and mask its answer in a try, and vanish from the list of it."""
    context, named = replace(CONTEXT, attempt=attempt), list(named)
    names = {k: (at[k].node, at[k].bundle.public) for k in asked}
    drawn = {k: at[k].deal(context, k, names, 3).public for k in names}
    peers = {k: public for k, (_, public) in names.items()}
    for k in named:
        at[k].masked(context, k, torch.tensor([1, 1]), peers, ABOUT, PARTS, drawn)
    for k in named[1:]:
        assert at[k].show(context, k, named, 3, (0,), [0]).seeds


def test_a_client_vanishes_from_few_lists_of_others(tmp_path):
    """Each is opened by three others. The mean of many sums would be nearly the answer of client 0, and a constant."""
    at = {k: Masker("run", f"node-{k}") for k in range(16)}
    at[0] = Masker("run", "node-0", lists=tmp_path / "opened")
    lists = [[0, k, k + 1, k + 2] for k in range(1, 16, 3)]
    for k in range(masks.SETS):
        vanishes(at, lists[k], lists[k], f"a.{k}")
    with pytest.raises(FedtideError, match="among at most 3 sets of clients"):
        vanishes(at, lists[3], lists[3], "a.3")
    at[0] = Masker("run", "node-0", lists=tmp_path / "opened")
    with pytest.raises(FedtideError, match="among at most 3 sets of clients"):
        vanishes(at, lists[4], lists[4], "b.0")
    names = {k: at[k].node for k in lists[0]}
    assert f"among {at[0]._question(ABOUT, 0)} {masks._digest_of(names)}\n" in (tmp_path / "opened").read_text()
    about = replace(ABOUT, asked="other"), replace(ABOUT, round=4)
    assert {at[0]._question(each, 0) for each in about}.isdisjoint(at[0]._sets), "of another question it may"


def test_a_client_vanishes_from_one_list_of_a_set():
    """Three nodes have five clients each. In each list one of each would be left, and the others had not answered."""
    nodes = [Masker("run", f"node-{k}") for k in range(4)]
    at = {0: nodes[0]} | {k: nodes[1 + k % 3] for k in range(1, 16)}
    vanishes(at, at, range(4), "a.0")
    with pytest.raises(FedtideError, match="for one list"):
        vanishes(at, at, [0, 4, 5, 6], "a.1")
    # A node that is started again makes no new set, and is told of no other list.
    at[0] = Masker("run", "node-0")
    with pytest.raises(FedtideError, match="for one list"):
        vanishes(at, at, [0, 7, 8, 9], "a.2")


def test_nodes_of_a_set_that_are_started_again_know_the_list_of_it(tmp_path):
    """A server that asks nothing for a while, or too much, has their workers started again."""
    nodes = [Masker("run", f"node-{k}", lists=tmp_path / f"{k}") for k in range(4)]
    at = {0: nodes[0]} | {k: nodes[1 + k % 3] for k in range(1, 16)}
    vanishes(at, at, range(4), "a.0")
    nodes = [Masker("run", f"node-{k}", lists=tmp_path / f"{k}") for k in range(4)]
    at = {0: nodes[0]} | {k: nodes[1 + k % 3] for k in range(1, 16)}
    with pytest.raises(FedtideError, match="for one list"):
        vanishes(at, at, [0, 4, 5, 6], "b.0")
    vanishes(at, at, range(4), "b.1")  # the same list may be opened again


def test_a_set_has_nodes_and_keys_that_all_were_told():
    """Else a helper could call itself otherwise at each try, so that nodes count another set than client 0."""
    made = cohort([0, 1, 2, 3, 4, 5], [[1, 1]] * 6)
    names = {k: (node.node, node.bundle.public) for k, node in made.at.items()}
    later = replace(CONTEXT, attempt="a.1")
    keys = set[str]()
    for told in (names, names | {5: ("other", names[5][1])}, names | {5: ("node-5", names[4][1])}):
        made.at[0].deal(replace(later, attempt=str(told)), 0, told, 2)
        keys.add(made.at[0]._dealt[replace(later, attempt=str(told)), 0].among)
    assert len(keys) == 3


def test_a_node_keeps_all_its_clients_to_a_list():
    """Also one that is said to have vanished: in another list it would tell of the first one alone."""
    made = cohort([0, 0, 1, 2, 3, 4], [[1, 1]] * 6)
    assert made.at[0].show(CONTEXT, 0, range(6), 2, (0,), [1])
    later = replace(CONTEXT, attempt="a.1")
    peers = {k: node.bundle.public for k, node in made.at.items()}
    made.at[1].masked(later, 1, torch.tensor([1, 1]), peers, ABOUT, PARTS)
    with pytest.raises(FedtideError, match="for one list"):
        made.at[1].show(later, 1, range(1, 6), 2)


def test_as_many_vanish_as_would_let_lists_cancel():
    """Two of six clients are at one node, and two helpers are left. Sums of lists that lose others would cancel."""
    made = cohort([0, 1, 2, 2, 3, 4], [[1, 1]] * 6, fewest=4)
    with pytest.raises(FedtideError, match="with clients of 4 nodes left"):
        made.at[0].show(CONTEXT, 0, range(6), 4, (0,), [2, 3])
    assert made.at[0].show(CONTEXT, 0, range(6), 4, (0,), [5]).seeds, "one may vanish, as 5 less 3 are left"


def test_clients_that_a_node_makes_up_let_no_lists_cancel():
    """Two honest clients would be left and two vanish, with eight of one helper: four such lists tell of one client."""
    made = cohort([0, 1, 2, 2, *[3] * 8], [[1, 1]] * 12, fewest=3)
    with pytest.raises(FedtideError, match="with clients of 3 nodes left"):
        made.at[0].show(CONTEXT, 0, range(12), 3, (0,), [2, 3])
    assert made.at[0].show(CONTEXT, 0, range(12), 3, (0,), [1]).seeds, "one may vanish, as more are left"


def test_what_clients_show_opens_only_if_all_were_told_the_same():
    """Each is told its own list, with enough left: none of their shares can be read."""
    made = cohort(list(range(12)), [[1, 1]] * 12)
    shown = {}
    for k in range(1, 12):
        lost = [0] if k % 2 else [0, k % 11 + 1]
        shown[k] = made.at[k].show(CONTEXT, k, range(12), 2, (0,), lost)
    assert made.recovered(range(12), [0], {k: each for k, each in shown.items() if k % 2}) == ({}, ANY)
    same = made.shown(range(12), [0], (0,))
    assert made.recovered(range(12), [0], same)[0]


def test_a_node_gives_shares_for_one_list_of_a_try():
    """Client 6 is at the node of client 0. Of two lists the node would give shares of both secrets of one client."""
    made = cohort([0, 1, 2, 3, 4, 5, 0], [[1, 1]] * 7)
    made.at[0].show(CONTEXT, 0, range(7), 2, (0,), [1])
    with pytest.raises(FedtideError, match="for one list"):
        made.at[6].show(CONTEXT, 6, [0, 2, 3, 4, 5, 6], 2, (0,), [2])
    with pytest.raises(FedtideError, match="for one list"):
        made.at[0].show(CONTEXT, 0, [0, 2, 3, 4, 5, 6], 2, (0,), [2])
    assert made.at[6].show(CONTEXT, 6, range(7), 2, (0,), [2]).opens, "of one list others may vanish meanwhile"


def test_one_client_of_a_node_gives_its_shares():
    made = cohort([0, 1, 2, 3, 4, 5, 0], [[1, 1]] * 7)
    shown = made.shown(range(7), [1])
    assert [bool(shown[k].seeds) for k in (0, 6, 2)] == [True, False, True]


@pytest.mark.parametrize(
    ("alive", "lost", "fewest", "words"),
    [
        (range(6), [0], 2, "others than 0 in the list, each once"),
        (range(6), [1, 1], 2, "others than 0 in the list, each once"),
        (range(5), [5], 2, "others than 0 in the list, each once"),
        (range(6), [1, 2, 3], 2, "with clients of 4 nodes left, and without at most a third of its own"),
        (range(5), [1, 2], 2, "with clients of 4 nodes left"),
        (range(3), [], 2, "with clients of 4 nodes left"),
        (range(6), [1, 2], 5, "found 4, allowed: 5 clients or more"),
    ],
)
def test_what_a_node_gives_no_shares_for(alive, lost, fewest, words):
    made = cohort(list(range(6)), [[1, 1]] * 6)
    with pytest.raises(FedtideError, match=words):
        made.at[0].show(CONTEXT, 0, list(alive), fewest, (0,), lost)
    assert made.at[0].show(CONTEXT, 0, range(6), 2, (0,), [5]).seeds, "nothing was opened, so another list may be"


def test_a_sum_without_shares_is_opened_by_all_alone():
    nodes = {k: Masker("run", f"node-{k}") for k in range(6)}
    peers = {k: node.bundle.public for k, node in nodes.items()}
    nodes[0].masked(CONTEXT, 0, torch.tensor([1]), peers)
    with pytest.raises(FedtideError, match="no shares were dealt of this sum"):
        nodes[0].show(CONTEXT, 0, range(6), 2, (0,), [5])


def test_secrets_are_dealt_once_and_to_all_who_are_asked():
    made = cohort(list(range(6)), [[1, 1]] * 6, masked=set())
    names = {k: (node.node, node.bundle.public) for k, node in made.at.items()}
    assert made.at[0].deal(CONTEXT, 0, names, 2) == made.dealt[0], "a question that comes twice is answered as before"
    with pytest.raises(FedtideError, match="dealt once in a try"):
        made.at[0].deal(CONTEXT, 0, dict(list(names.items())[:5]), 2)
    later = replace(CONTEXT, attempt="a.1")
    with pytest.raises(FedtideError, match="found 101, allowed: at most 100"):
        made.at[0].deal(later, 0, {k: (f"node-{k}", f"{k}") for k in range(101)}, 2)
    drawn, x = {k: each.public for k, each in made.dealt.items()}, torch.tensor([1, 1])
    made.at[0].deal(later, 0, dict(list(names.items())[:5]), 2)
    few = drawn | {0: made.at[0]._dealt[later, 0].dealing.public}
    with pytest.raises(FedtideError, match="dealt without some of those who are asked"):
        made.at[0].masked(later, 0, x, made.peers, drawn=few)
    with pytest.raises(FedtideError, match="dealt without some of those who are asked"):
        made.at[0].masked(CONTEXT, 0, x, made.peers, drawn={k: drawn[k] for k in range(5)})
    with pytest.raises(FedtideError, match="another than the server knows"):
        made.at[0].masked(CONTEXT, 0, x, made.peers, drawn=drawn | {0: drawn[1]})
    made.at[0].masked(CONTEXT, 0, x, made.peers, drawn=drawn)
    with pytest.raises(FedtideError, match="masked once"):
        made.at[0].masked(CONTEXT, 0, x, made.peers, drawn=drawn | {1: drawn[2]})
    made.at[0]._dealt.clear()
    with pytest.raises(FedtideError, match="dealt once in a try"):
        made.at[0].deal(CONTEXT, 0, names, 2)


def test_a_wrong_share_is_found_and_the_sum_opens_by_the_others():
    made = cohort(list(range(6)), [[1, 1]] * 6)
    shown = made.shown(range(6), [1])
    for key in ({1: bytes(32)}, {1: shown[2].seeds[1]}):  # made up, or another one's
        wrong = shown | {3: replace(shown[3], seeds=key)}
        vanished, named = made.recovered(range(6), [1], wrong)
        assert named == [Wrong(1, made.place(3))]
        assert torch.cat(unmasked(made.sent, wrong, PARTS, vanished, (0, 1))).tolist() == [6, 6]
    for k in (2, 4):
        shown[k] = replace(shown[k], seeds={1: bytes(32)})
    vanished, named = made.recovered(range(6), [1], shown)
    assert vanished == {}
    assert {each.place for each in named} == {made.place(k) for k in (2, 4)}


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_shares_of_another_secret_are_found_and_open_nothing(kind):
    """A client that deals wrong shares, or a server that puts old ones in their place."""
    made = cohort(list(range(7)), [[1, 1]] * 7)
    shown, other = made.shown(range(6), [1]), {"seeds": 1, "keys": 6}[kind]
    letter = {"seeds": "seed", "keys": "key"}[kind]
    secret = (letter, other, made.dealt[other].public, made.at[other]._dealt[CONTEXT, other].among)
    keys = [made.at[other]._share(CONTEXT, secret, made.peers[k], made.peers[k]) for k in range(7)]
    said, rest = made.dealt[other], {k: each for k, each in made.dealt.items() if k != other}
    made.dealt = rest | {other: replace(said, **{kind: deal(b"another secret!!", keys, said.needed)})}
    assert made.recovered(range(6), [1], shown) == ({}, [Wrong(other, None)])
    # Those of another try open with no key of this one.
    later = replace(CONTEXT, attempt="a.1")
    names = {k: (node.node, node.bundle.public) for k, node in made.at.items()}
    made.dealt[other] = made.at[other].deal(later, other, names, 2)
    vanished, wrong = made.recovered(range(6), [1], shown)
    assert vanished == {}
    assert {each.place for each in wrong} == {made.place(k) for k in shown}


CHANGES = ("run", "round", "number", "slot", "try", "kind", "client", "key", "asked", "holder")


@pytest.mark.parametrize("changed", CHANGES)
def test_what_seals_a_share_is_for_one_share_alone(changed):
    one, other = Masker("run", "node-1"), Masker("run", "node-2")
    base = (CONTEXT, ("seed", 1, "key", "asked"), one.bundle.public)
    contexts = {
        "run": replace(CONTEXT, run="x"), "round": replace(CONTEXT, version=(4, 0)),
        "number": replace(CONTEXT, version=(3, 1)), "slot": replace(CONTEXT, slot=1),
        "try": replace(CONTEXT, attempt="a.1"),
    }  # fmt: skip
    secrets = {"kind": ("key", *base[1][1:]), "client": ("seed", 2, "key", "asked"), "key": ("seed", 1, "x", "asked"),
               "asked": ("seed", 1, "key", "x")}  # fmt: skip
    values = {name: (CONTEXT, secret, base[2]) for name, secret in secrets.items()}
    values["holder"] = (CONTEXT, base[1], other.bundle.public)
    new = (contexts[changed], *base[1:]) if changed in contexts else values[changed]
    assert other._share(*base, one.bundle.public) == one._share(*base, other.bundle.public)
    assert other._share(*base, one.bundle.public) != other._share(*new, one.bundle.public)


def test_no_key_for_a_sum_is_taken_that_its_node_did_not_sign():
    """With keys of its own a server would know all masks of a client."""
    ec = library().hazmat.primitives.asymmetric.ec
    nodes = {k: Masker("run", f"node-{k}", ec.generate_private_key(ec.SECP384R1())) for k in range(4)}
    names = {k: (node.node, node.bundle.public) for k, node in nodes.items()}
    dealt = {k: node.deal(CONTEXT, k, names, 2) for k, node in nodes.items()}
    drawn = {k: (each.public, each.signature) for k, each in dealt.items()}
    bundles = {k: (node.node, node.bundle) for k, node in nodes.items()}
    nodes[0].check_drawn(CONTEXT, drawn, bundles)
    later = nodes[1].deal(replace(CONTEXT, attempt="a.1"), 1, names, 2)
    forged = Masker("run", "node-1").deal(CONTEXT, 1, names | {1: ("node-1", Masker("run", "x").bundle.public)}, 2)
    for wrong in ((forged.public, forged.signature), (forged.public, dealt[1].signature), drawn[2],
                  (later.public, later.signature)):  # fmt: skip
        with pytest.raises(FedtideError, match=r"^node 'node-1': its key for a sum is not signed"):
            nodes[0].check_drawn(CONTEXT, drawn | {1: wrong}, bundles)
    with pytest.raises(FedtideError, match="not signed"):
        nodes[0].check_drawn(CONTEXT, {k: drawn[k] for k in (0, 2, 3)}, bundles)


def test_no_secret_of_a_deal_can_be_read_off_a_masker():
    made = cohort(list(range(4)), [[1, 1]] * 4)
    known = made.at[0]._dealt[CONTEXT, 0]
    assert repr(known.seed) not in repr(made.at[0]) + repr(known) + repr(made.at[0]._dealt)
    vanished, _ = made.recovered(range(4), [3], made.shown(range(4), [3]))
    assert repr(vanished[3].seed) not in repr(vanished)
    assert vanished[3].seed == made.at[3]._dealt[CONTEXT, 3].seed


def test_tries_whose_secrets_are_kept_are_few():
    node = Masker("run", "node-0")
    names = {k: (f"node-{k}", Masker("run", "x").bundle.public) for k in range(1, 4)} | {
        0: ("node-0", node.bundle.public)
    }
    for number in range(masks.KEPT + 3):
        node.deal(replace(CONTEXT, attempt=str(number)), 0, names, 2)
    assert len(node._dealt) == masks.KEPT
    with pytest.raises(FedtideError, match="dealt once in a try"):
        node.deal(replace(CONTEXT, attempt="0"), 0, names, 2)  # other shares under the same keys would tell both


def test_what_opens_a_sum_is_for_one_choice_of_parts_and_of_those_who_vanished():
    made = cohort(list(range(7)), [[0, 0]] * 7)
    shown = [
        made.at[0].show(CONTEXT, 0, range(7), 2, parts, lost) for parts, lost in (((0,), ()), ((1,), ()), ((0,), (2,)))
    ]
    assert len({each.opens[1] for each in shown}) == 3
