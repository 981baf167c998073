"""Statements about masks, for all cohorts, drop-outs and vectors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import chdtri

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.wire.masks import Context, Masker, Question, library, link, seed_of
from fedtide.wire.unmask import unmasked
from helpers.examples import examples

CONTEXT = Context("run", (0, 0), 0, "a.0")
WHOLE = st.integers(-(2**63), 2**63 - 1)
LEAST, MOST = chdtri(255, [1 - 1e-9, 1e-9])
"""Beyond these chi-square of 256 kinds of bytes lies once in 10^9 times each."""


def asked(nodes: list[int]) -> tuple[dict[int, Masker], dict[int, bytes]]:
    """The node of each client, and its public key."""
    maskers = {name: Masker("run", f"node-{name}") for name in set(nodes)}
    at = {client: maskers[name] for client, name in enumerate(nodes)}
    return at, {client: node.bundle.public for client, node in at.items()}


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """The node of each client, who answers, and their vectors."""
    count, size = draw(st.integers(2, 7)), draw(st.integers(1, 5))
    nodes = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    alive = sorted(draw(st.sets(st.integers(0, count - 1), min_size=2)))
    return nodes, alive, [draw(st.lists(WHOLE, min_size=size, max_size=size)) for _ in range(count)]


@examples(60)
@given(cohorts())
def test_the_sum_of_who_answered_comes_out_exactly(cohort):
    nodes, alive, rows = cohort
    at, peers = asked(nodes)
    sent = {k: at[k].masked(CONTEXT, k, torch.tensor(rows[k]), peers) for k in range(len(nodes))}
    shown = {k: at[k].show(CONTEXT, k, alive, 2) for k in alive}
    expected = [sum(column) % 2**64 for column in zip(*(rows[k] for k in alive), strict=True)]
    assert unmasked({k: sent[k] for k in alive}, shown)[0].numpy().view(np.uint64).tolist() == expected


@examples(40)
@given(cohorts(), st.data())
def test_nothing_opens_where_two_were_told_different_lists(cohort, data):
    """A server that tells one client that another vanished, and that other one that all are there, sees noise."""
    nodes, _, rows = cohort
    nodes = list(range(len(nodes)))
    if len(nodes) < 3:
        return
    at, peers = asked(nodes)
    sent = {k: at[k].masked(CONTEXT, k, torch.tensor(rows[k]), peers) for k in nodes}
    victim = data.draw(st.sampled_from(nodes))
    others = [k for k in nodes if k != victim]
    shown = {k: at[k].show(CONTEXT, k, others, 2) for k in others}
    mine = at[victim].show(CONTEXT, victim, nodes, 2)
    # All that the server has of the victim: what it sent, its sealed b, and what every other one shares with it.
    with pytest.raises(KeyError):
        unmasked({victim: sent[victim], others[0]: sent[others[0]]}, {**shown, victim: mine})
    pads = {other: shown[other].opens.get(victim) for other in others}
    assert set(pads.values()) == {None}, "nobody gives what opens a client that it was told to have vanished"


def test_what_one_client_sends_is_uniform_whatever_its_numbers():
    """Chi-square of all bytes, and how they go with the numbers beneath; chance lies beyond once in 10^9 runs."""
    count = 2**15
    at, peers = asked([0, 1, 2])
    for place, vector in enumerate((torch.zeros(count), torch.full((count,), 2**40), torch.arange(count) * 2**34)):
        x = vector.to(torch.int64)
        sent = at[0].masked(Context("run", (place, 0), 0, "a"), 0, x, peers).numpy().view(np.uint64)
        for column in sent.view(np.uint8).reshape(count, 8).T:
            found = np.bincount(column, minlength=256)
            statistic = ((found - count / 256) ** 2 / (count / 256)).sum()
            assert LEAST < statistic < MOST
        high = (sent >> np.uint64(63)).astype(float) - 0.5
        beneath = np.arange(count) - (count - 1) / 2
        assert abs(high @ beneath) / np.sqrt((high @ high) * (beneath @ beneath)) < 6.2 / np.sqrt(count)


def test_what_those_send_who_vanished_is_uniform_even_without_the_masks_that_others_show():
    """Their messages may come late, when all others have shown what they share with them. Nor has what two of them
    send, or one sends in two tries, anything in common then."""
    count, late = 2**15, []
    at, peers = asked([0, 1, 2, 3])
    for attempt, gone in (("a", (0, 1)), ("b", (0,))):
        context, alive = Context("run", (0, 0), 0, attempt), [k for k in peers if k not in gone]
        x, about = torch.zeros(count, dtype=torch.int64), Question(0, attempt)
        sent = {k: at[k].masked(context, k, x, peers, about).numpy().view(np.uint64) for k in peers}
        links = {k: at[k].show(context, k, alive, 2).links for k in alive}
        for k in gone:
            bare = sent[k].copy()
            for other in alive:
                link(bare, k, other, links[other][k], off=True)
            late.append(bare)
    # Those who vanished together still share a mask; let the server have that, too.
    for k, other in ((0, 1), (1, 0)):
        secret = at[k]._open[Context("run", (0, 0), 0, "a"), k].links[other]
        link(late[k], k, other, seed_of(secret, 0), off=True)
    for bare in (*late, late[0] - late[1], late[0] - late[2]):
        found = np.bincount(bare.view(np.uint8), minlength=256)
        statistic = ((found - 8 * count / 256) ** 2 / (8 * count / 256)).sum()
        assert LEAST < statistic < MOST


CHANGES = {
    "run": (replace(CONTEXT, run="other"), Question(0, "q", "m")),
    "round": (replace(CONTEXT, version=(1, 0)), Question(0, "q", "m")),
    "number": (replace(CONTEXT, version=(0, 1)), Question(0, "q", "m")),
    "slot": (replace(CONTEXT, slot=1), Question(0, "q", "m")),
    "try": (replace(CONTEXT, attempt="a.1"), Question(0, "q", "m")),
    "model": (CONTEXT, Question(0, "q", "other")),
}
"""Everything that a secret is for, changed one by one."""


@pytest.mark.parametrize("changed", CHANGES)
def test_every_secret_is_for_one_sum_of_one_model_alone(changed):
    at, peers = asked([0, 1, 2])
    shown = []
    for fresh, (context, about) in enumerate(((CONTEXT, Question(0, "q", "m")), CHANGES[changed])):
        node = at[0]
        node._open.clear()
        node._used.clear()
        node.masked(context, 0, torch.tensor([fresh]), peers, about)
        shown.append(node.show(context, 0, [0, 1], 2))
    one, other = shown
    assert one.links[2] != other.links[2]
    assert one.opens[1] != other.opens[1]


def test_every_secret_is_for_one_pair_of_clients_whatever_node_they_share():
    """Clients 0 and 1 are at one node, 2 and 3 at another, so one key agreement is behind all that they share."""
    at, peers = asked([0, 0, 1, 1, 2])
    for k in peers:
        at[k].masked(CONTEXT, k, torch.tensor([0]), peers)
    shown = {k: at[k].show(CONTEXT, k, [0, 1, 2, 3], 2) for k in (0, 1, 2, 3)}
    opens = [each for k in shown for each in shown[k].opens.values()]
    links = [shown[k].links[4] for k in shown]
    assert len({*opens, *links}) == len(opens) + len(links) == 16


def test_what_opens_a_sum_is_for_one_list():
    at, peers = asked([0, 1, 2, 3])
    opens = []
    for place, alive in enumerate(([0, 1, 2], [0, 1, 3])):
        for known in (at[0]._open, at[0]._used, at[0]._lists_of):
            known.clear()
        at[0].masked(CONTEXT, 0, torch.tensor([0]), peers, Question(str(place), "m"))
        opens.append(at[0].show(CONTEXT, 0, alive, 2).opens[1])
    assert opens[0] != opens[1]


def test_masks_do_not_come_off_where_two_were_asked_something_else():
    at, peers = asked([0, 1, 2])
    zeros = torch.zeros(4, dtype=torch.int64)
    abouts = [Question(0, "train", model) for model in ("one model", "one model", "another")]
    sent = {k: at[k].masked(CONTEXT, k, zeros, peers, abouts[k]) for k in peers}
    shown = {k: at[k].show(CONTEXT, k, [0, 1, 2], 2) for k in peers}
    assert unmasked(sent, shown)[0].any()


def test_no_secret_can_be_read_off_a_masker_or_saved():
    at, peers = asked([0, 1])
    at[0].masked(CONTEXT, 0, torch.tensor([1]), peers)
    known = next(iter(at[0]._open.values()))
    for secret in (known.seed, *known.links.values()):
        assert repr(secret) not in repr(at[0]) + repr(known) + repr(at[0]._open)
    for kept in (at[0], at[0]._key):
        with pytest.raises(TypeError, match="cannot travel"):
            codec.to_bytes({"kept": kept})


def test_keys_are_signed_by_registered_ones():
    ec = library().hazmat.primitives.asymmetric.ec
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in "abc"}
    nodes = {name: Masker("run", name, key) for name, key in keys.items()}
    bundles = {name: node.bundle for name, node in nodes.items()}
    for node in nodes.values():
        node.check(bundles)
    with pytest.raises(FedtideError, match="another than the server knows"):
        nodes["a"].check({**bundles, "a": Masker("run", "a", keys["a"]).bundle})
    wrong = [Masker("other", "b", keys["b"]).bundle, Masker("run", "c", keys["b"]).bundle, Masker("run", "b").bundle]
    for bundle in wrong:
        with pytest.raises(FedtideError, match=r"^node 'b': its key for masks is not signed by its registered key$"):
            nodes["a"].check({**bundles, "b": bundle})
    strict = Masker(
        "run", "a", keys["a"], lambda node, key: None if key == bundles["b"].identity else "nobody knows it"
    )
    with pytest.raises(FedtideError, match=r"^node 'c': nobody knows it$"):
        strict.check({**bundles, "a": strict.bundle})


def test_two_nodes_cannot_have_one_key():
    node, other = Masker("run", "a"), Masker("run", "b").bundle
    with pytest.raises(FedtideError, match="two nodes have the same key for masks"):
        node.check({"a": node.bundle, "b": other, "c": other})
