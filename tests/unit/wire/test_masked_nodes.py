"""Masked sums over nodes: who vanishes between the messages, what nodes refuse, and where secrets never are."""

import json
import random
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedtide.core import codec
from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.laws.case import played, toy
from fedtide.laws.every import Time
from fedtide.remote import opening
from fedtide.remote.asks import LOST, REFUSED, UNOPENED, UNSIGNED
from fedtide.remote.messages import (
    KeyHeader,
    Response,
    dealt_tree,
    read_dealt,
    read_question,
    read_secrets,
    secrets_tree,
)
from fedtide.remote.node import masked, objection
from fedtide.remote.node_answers import ROOM
from fedtide.remote.offline import NearCarrier, near_fleet
from fedtide.remote.opening import MaskedSums, Opened
from fedtide.remote.policy import Policy
from fedtide.remote.schedule import Present, RoundClock
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire
from fedtide.wire import masks
from fedtide.wire.masks import SEED, Dealt, Masker, Shown
from fedtide.wire.noise import simulated_noise
from fedtide.wire.pipeline import Wire
from fedtide.wire.shares import SEALED
from fedtide.wire.vector import Form, Leaf, quantized

EXPERIMENT = toy("fedavg", {"cohort": 6}, wire={"fewest": 3, "shares": True}, rounds=3)


THREE = ("node-2", "node-3", "node-4")
"""More than a third of six."""


class Meddling(NearCarrier):
    """A carrier whose answers somebody changes: (kind of question, node, how often it was asked that) -> what is lost.

    It keeps what was asked, and what came of it.
    """

    def __init__(self, nodes: Any, lost: Any = lambda kind, node, times: False) -> None:
        super().__init__(nodes)
        self.lost, self.times, self.asked, self.came = lost, Counter[Any](), list[Any](), list[Response]()

    def pull(self) -> list[Response]:
        if not self._questions:
            return []
        question = self._questions[0].question
        self.asked.append(question)
        key = question.header["kind"], question.node
        self.times[key] += 1
        lost = self.lost(*key, self.times[key])
        came = [replace(each, header={}, payload=b"", error="lost") if lost else each for each in super().pull()]
        self.came += came
        return came


def fleet_of(
    home: Path, lost: Any = lambda kind, node, times: False, nodes: int = 8, study: Any = EXPERIMENT, fewest: int = 1
) -> tuple[Any, Any, Counter[int]]:
    """Clients at nodes, mostly of their own, of whom somebody is lost; and how often each of them trained."""
    host, trained, time = host_of(study, study.method[0], 0), Counter[int](), Time()
    train = host.algorithm.works["train"]

    def counted(payload, memory, shard, moment, rng):
        if len(rng.path) > 1:  # else the server learns what answers look like
            trained[int(rng.path[1])] += 1
        return train(payload, memory, shard, moment, rng)

    host = replace(host, algorithm=replace(host.algorithm, works={**host.algorithm.works, "train": counted}))
    clock = RoundClock(monotonic=time, sleep=time.sleep)
    fleet = near_fleet(host, nodes, home, lambda nodes: Meddling(nodes, lost), clock=clock, patience=1.0, fewest=fewest)
    fleet.begin(replace(fleet.moment, round=0, rounds=3))
    return host, fleet, trained


def asked(host: Any, fleet: Any, clients: torch.Tensor) -> Any:
    return fleet.ask("train", clients, host.algorithm.init(fleet, Rng(0)).weights)


def test_where_more_than_a_third_vanish_between_the_messages_it_costs_a_retry_and_no_training(tmp_path):
    host, plain, _ = fleet_of(tmp_path)
    whole = asked(host, plain, torch.arange(6))
    host, fleet, trained = fleet_of(
        tmp_path / "b", lambda kind, node, times: kind == "unmask" and node in THREE and times < 3
    )
    reply = asked(host, fleet, torch.arange(6))
    assert reply.clients.tolist() == list(range(6))
    assert same(whole.total, reply.total)
    assert trained == dict.fromkeys(range(6), 1)
    assert fleet.carrier.times["ask", "node-0"] == 3


def test_the_books_name_the_clients_of_the_sum_after_a_retry(tmp_path):
    """A client that is late in the last try may have answered an earlier one first."""
    options = {"cohort": {"clients_per_round": 4, "over_selection": 1.25}}
    study = toy("fedavg", options, wire={"fewest": 3}, rounds=3)
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-1") and times < 2,
                              study=study)  # fmt: skip
    reply = asked(host, fleet, torch.arange(5))
    host, plain, _ = fleet_of(tmp_path / "b", study=study)
    assert same(asked(host, plain, reply.clients).total, reply.total)
    (line,) = fleet.record_lines()
    assert line["asks"][0]["answered"] == [0, 1, 2, 3]
    assert line["asks"][0]["nodes"]["node-4"]["clients"] == {"4": "late"}


def test_a_client_whose_key_is_removed_while_a_sum_is_opened_is_in_the_books_as_it_is_in_the_sum(tmp_path):
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-2"))
    removed = [frozenset({"node-2"})]
    fleet.carrier.removed = lambda: (
        removed.pop() if removed and fleet.carrier.times["unmask", "node-0"] else frozenset()
    )
    reply = asked(host, fleet, torch.arange(6))
    host, plain, _ = fleet_of(tmp_path / "b")
    assert reply.clients.tolist() == list(range(6))
    assert same(asked(host, plain, reply.clients).total, reply.total)
    (line,) = fleet.record_lines()
    assert line["asks"][0]["amiss"]["2"].startswith("its node did not open the sum")


def test_a_sum_of_fewer_than_the_server_wants_is_not_even_opened(tmp_path):
    """In a private study its nodes would have paid for it."""
    lost = {("ask", "node-4"), ("ask", "node-5")}
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) in lost, fewest=5)
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == []
    assert not any(kind == "unmask" for kind, _ in fleet.carrier.times)


def test_a_sum_is_never_opened_without_those_that_vanished_between_the_messages(tmp_path):
    """Their answers may only be late: with them the server would have two sums, and their difference is few clients."""
    host, fleet, trained = fleet_of(tmp_path, lambda kind, node, times: kind == "unmask" and node in THREE)
    reply = asked(host, fleet, torch.arange(6))
    assert reply.total is None
    assert set(trained.values()) == {1}
    lists = [each.header["alive"]["0"] for each in fleet.carrier.asked if each.header["kind"] == "unmask"]
    assert all(each == list(range(6)) for each in lists)
    words = {name: line["clients"] for name, line in fleet.record.asks[0]["nodes"].items()}
    assert words["node-2"]["2"].startswith(LOST)
    assert words["node-1"] == {"1": UNOPENED}


GONE = {
    "one": {"unmask": ("node-2",)},
    "a third": {"unmask": ("node-2", "node-5")},
    "the first": {"unmask": ("node-0",)},
    "one, and one before it answered": {"ask": ("node-4",), "unmask": ("node-1",)},
    "one, and one before it dealt shares": {"deal": ("node-4",), "unmask": ("node-1",)},
}
"""At which message nodes vanish, of six."""


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("method", ["fedavg", "ifca", "min-loss"])
def test_a_third_of_the_nodes_may_vanish_and_it_costs_no_try(tmp_path, gone, method):
    """The sum of who answered has the same bits, of slots and branches too, which are opened by a second message."""
    answered = [k for k in range(6) if f"node-{k}" not in (*GONE[gone].get("ask", ()), *GONE[gone].get("deal", ()))]
    study = toy(method, {"cohort": 6}, wire={"fewest": 3, "shares": True}, rounds=3)
    host, plain, _ = fleet_of(tmp_path, study=study)
    payload = host.algorithm.serve(host.algorithm.init(plain, Rng(0)), plain.clients)[0]
    whole = plain.ask("train", torch.tensor(answered), payload)
    for again in (1, 2):  # they vanish, or do so before units are opened
        host, fleet, trained = fleet_of(
            tmp_path / str(again), study=study,
            lost=lambda kind, node, times, again=again: node in GONE[gone].get(kind, ())
            and (kind != "unmask" or times >= again),
        )  # fmt: skip
        reply = fleet.ask("train", torch.arange(6), payload)
        assert reply.clients.tolist() == answered
        assert same(whole.total, reply.total)
        assert set(trained.values()) == {1}
        assert fleet.carrier.times["ask", "node-3"] == 1
        units = method != "fedavg"
        vanished = {node[-1] for node in GONE[gone]["unmask"]}
        assert fleet.record.asks[0].get("amiss", {}).keys() == (vanished if again == 1 or units else set())


def test_clients_of_one_node_vanish_together(tmp_path):
    """Two clients at each of four nodes, of whose shares three are needed."""
    host, plain, _ = fleet_of(tmp_path, nodes=4)
    whole = asked(host, plain, torch.arange(8))
    host, fleet, _ = fleet_of(tmp_path / "b", lambda kind, node, times: (kind, node) == ("unmask", "node-2"), nodes=4)
    reply = asked(host, fleet, torch.arange(8))
    assert reply.clients.tolist() == list(range(8))
    assert same(whole.total, reply.total)
    assert sorted(fleet.record.asks[0]["amiss"]) == ["4", "5"]


def test_of_three_nodes_all_open_a_sum(tmp_path):
    """With shares for two of them one could help the server against another."""
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-2"), nodes=3)
    assert asked(host, fleet, torch.arange(8)).total is None
    assert "deal" not in {each.header["kind"] for each in fleet.carrier.asked}


def test_a_node_that_sends_a_wrong_share_is_named_and_costs_nothing(tmp_path, monkeypatch):
    host, plain, _ = fleet_of(tmp_path)
    whole = asked(host, plain, torch.arange(6))
    host, fleet, _ = fleet_of(tmp_path / "b", lambda kind, node, times: (kind, node) == ("unmask", "node-2"))
    masker = fleet.carrier.nodes["node-1"].masker
    shows = masker.show

    def lying(*given: Any) -> Any:
        shown = shows(*given)
        return replace(shown, seeds=dict.fromkeys(shown.seeds, bytes(SEED)))

    monkeypatch.setattr(masker, "show", lying)
    assert same(whole.total, asked(host, fleet, torch.arange(6)).total)
    said = (
        "its share of client 2 does not open: client 2 dealt a wrong one, or one of the nodes that are left sent a "
        "wrong secret"
    )
    assert fleet.record.asks[0]["amiss"] == {"1": said, "2": "its node did not open the sum: lost"}


def test_a_node_that_dealt_wrong_shares_and_vanished_is_named_and_no_sum_is_wrong(tmp_path, monkeypatch):
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-2"))
    masker = fleet.carrier.nodes["node-2"].masker
    deals, made = masker.deal, masks.deal

    def lying(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(masks, "deal", lambda secret, keys, enough: made(bytes(16), keys, enough))
            return deals(*given)

    monkeypatch.setattr(masker, "deal", lying)
    assert asked(host, fleet, torch.arange(6)).total is None
    words = fleet.record.asks[0]["nodes"]["node-2"]["clients"]
    assert words == {"2": "lost: its shares are not of the secret that it dealt"}


def test_a_node_that_says_nothing_leaves_time_for_the_shares_of_the_others(tmp_path, monkeypatch):
    host, fleet, _ = fleet_of(tmp_path)
    silent, pull = fleet.carrier.nodes["node-2"], NearCarrier.pull

    def heard(carrier: Any) -> Any:
        question = carrier._questions[0].question if carrier._questions else None
        if question is None or question.header["kind"] != "unmask" or carrier.nodes[question.node] is not silent:
            return pull(carrier)
        carrier._questions.popleft()
        return []

    monkeypatch.setattr(NearCarrier, "pull", heard)
    began = fleet.clock.monotonic()
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == list(range(6))
    assert 0.5 <= fleet.clock.monotonic() - began < 0.6, "half of the time"


def test_bytes_of_shares_are_counted_and_within_the_bounds_of_a_message(tmp_path):
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    ups = [len(each.payload) for each in fleet.carrier.came if each.node == "node-0"]
    assert fleet.record.asks[0]["nodes"]["node-0"]["up"] == sum(ups)
    most = Dealt("0" * 64, "00" * 200, 67, bytes(SEED), bytes(SEALED * 100), bytes(SEALED * 100))
    assert len(codec.to_bytes({1: dealt_tree(most)})) < ROOM
    assert read_dealt(codec.decode_message(codec.to_bytes(dealt_tree(most)))) == most


BAD_DEALS: dict[str, list[Any]] = {
    "public": [None, "0" * 63, "G" * 64, 5],
    "signature": [None, "0", "00" * 201],
    "needed": [None, 0, 101, 4.0, True],
    "digest": [None, torch.zeros(31, dtype=torch.uint8), torch.zeros(32), "00" * 32],
    "seeds": [None, torch.zeros(31, dtype=torch.uint8), torch.zeros(101 * 32, dtype=torch.uint8), bytes(160).hex()],
    "keys": [None, torch.zeros(4 * 32, dtype=torch.uint8), torch.zeros(5, 32, dtype=torch.uint8), torch.zeros(160)],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, all_ in BAD_DEALS.items() for value in all_])
def test_what_are_no_shares_is_refused(place, value):
    made = dealt_tree(Dealt("0" * 64, "", 4, bytes(SEED), bytes(SEALED * 5), bytes(SEALED * 5)))
    assert read_dealt(made).seeds == bytes(SEALED * 5)
    for wrong in (
        made | {place: value},
        {key: each for key, each in made.items() if key != place},
        made | {"more": 1},
        None,
    ):
        with pytest.raises(FedtideError, match=r"(shares|secrets|key for a sum).*: found .*allowed: "):
            read_dealt(wrong)


def test_a_node_that_was_started_again_before_shares_are_dealt_takes_part(tmp_path):
    host, fleet, trained = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    fleet.begin(replace(fleet.moment, round=1))
    nodes = fleet.carrier.nodes
    nodes["node-2"] = replace(nodes["node-2"], masker=Masker("", "node-2"))
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == list(range(6))
    assert trained == dict.fromkeys(range(6), 2)


def test_a_node_that_has_masked_much_draws_another_key_and_forgets(tmp_path, monkeypatch):
    """A server could fill its memory with tries, which a node may never mask again under one key."""
    monkeypatch.setattr(masks, "USED", 3)
    host, fleet, trained = fleet_of(tmp_path)
    masker = fleet.carrier.nodes["node-0"].masker
    first = masker.bundle
    for number in range(5):
        fleet.begin(replace(fleet.moment, round=number))
        assert asked(host, fleet, torch.arange(6)).clients.tolist() == list(range(6))
        known = (masker._used, masker._ever_dealt, masker._lists_of)
        assert all(len(kept) <= 3 for kept in known[:2])
    assert masker.bundle != first
    assert trained == dict.fromkeys(range(6), 5)
    sent = question(fleet, "unmask")  # of the first key
    told, _ = fleet.carrier.nodes["node-0"].handle(json.loads(json.dumps(sent.header)), sent.payload)
    assert told["clients"]["0"] == REFUSED + masks.STALE


@pytest.mark.parametrize("forged", [False, True])
def test_keys_for_a_sum_are_signed_by_registered_ones(tmp_path, forged, monkeypatch):
    """A node whose key is not is left out; else all others would refuse to mask with it."""
    ec = masks.library().hazmat.primitives.asymmetric.ec
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-4"))
    for name, node in fleet.carrier.nodes.items():
        fleet.carrier.nodes[name] = replace(node, masker=Masker("", name, ec.generate_private_key(ec.SECP384R1())))
    fleet._masked.signed = lambda node, key, *about: masks.verified("", node, key, *about)
    masker = fleet.carrier.nodes["node-2"].masker
    deals = masker.deal
    if forged:
        monkeypatch.setattr(masker, "deal", lambda *given: replace(deals(*given), signature=masker.bundle.signature))
    reply = asked(host, fleet, torch.arange(6))
    assert reply.clients.tolist() == ([0, 1, 3, 4, 5] if forged else list(range(6)))
    word = fleet.record.asks[0]["nodes"]["node-2"]["clients"]["2"]
    assert word == (UNSIGNED if forged else "answered")
    # A server that puts another key in its place is refused by each node.
    sent = question(fleet, "ask")
    header = json.loads(json.dumps(sent.header))
    header["mask"]["drawn"]["1"] = {"public": masker.bundle.public, "signature": masker.bundle.signature}
    told, _ = fleet.carrier.nodes["node-0"].handle(header, sent.payload)
    assert told["clients"]["0"] == "refused: node 'node-1': its key for a sum is not signed by its registered key"


def test_a_node_with_many_clients_checks_the_keys_of_a_sum_once(tmp_path, monkeypatch):
    """Each takes about a millisecond, and 60 clients of 300 would have 18,000 to check."""
    host, fleet, _ = fleet_of(tmp_path, nodes=4)
    checked = list[Any]()
    monkeypatch.setattr(Masker, "check_drawn", lambda self, context, drawn, nodes: checked.append(sorted(drawn)))
    assert asked(host, fleet, torch.arange(8)).clients.tolist() == list(range(8))
    assert checked == [list(range(8))] * 4


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
def test_the_keys_of_very_many_clients_would_fit_no_header_so_none_are_dealt(tmp_path, method, monkeypatch):
    """The sum is opened all the same, by all of them."""
    key = {"public": "0" * 64, "signature": "0" * 208}
    names = {"keys": {f"{'n' * 60}{k}": {**key, "identity": "k" * 200} for k in range(100)}}
    most = names | {"drawn": {str(10**9 + k): key for k in range(opening.CLIENTS)}}
    peers = {"0": {str(10**9 + k): "n" * 20 for k in range(opening.CLIENTS)}}
    assert len(json.dumps(most | {"peers": peers})) < HEADER - ROOM
    study = toy(method, {"cohort": 6}, wire={"fewest": 3, "shares": True}, rounds=3)
    for clients, deals in ((6, True), (5, False)):
        monkeypatch.setattr(opening, "CLIENTS", clients)
        host, fleet, _ = fleet_of(tmp_path / str(clients), study=study)
        payload = host.algorithm.serve(host.algorithm.init(fleet, Rng(0)), fleet.clients)[0]
        assert fleet.ask("train", torch.arange(6), payload).clients.tolist() == list(range(6))
        assert ("deal" in {each.header["kind"] for each in fleet.carrier.asked}) == deals


def test_a_node_that_deals_for_other_nodes_than_are_asked_is_left_out(tmp_path, monkeypatch):
    host, fleet, _ = fleet_of(tmp_path)
    masker = fleet.carrier.nodes["node-2"].masker
    deals = masker.deal

    def few(*given: Any) -> Any:
        dealt = deals(*given)
        return replace(dealt, seeds=dealt.seeds[SEALED:], keys=dealt.keys[SEALED:])

    monkeypatch.setattr(masker, "deal", few)
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == [0, 1, 3, 4, 5]
    word = fleet.record.asks[0]["nodes"]["node-2"]["clients"]["2"]
    assert word == "refused: its shares are not for the nodes that are asked"


def test_a_second_list_of_clients_is_not_asked_to_open_the_same_sum(tmp_path):
    """Of two lists that both were opened the difference would be one client."""

    def lost(kind: str, node: str, times: int) -> bool:
        return (times == 1 and kind == "unmask" and node in THREE) or (kind, node, times) == ("ask", "node-5", 2)

    host, fleet, _ = fleet_of(tmp_path, lost)
    reply = asked(host, fleet, torch.arange(6))
    lists = [tuple(each.header["alive"]["0"]) for each in fleet.carrier.asked if each.header["kind"] == "unmask"]
    assert set(lists) == {tuple(range(6))}
    assert len(lists) == 12, "in the first try and in the third, in which all answer again"
    assert reply.clients.tolist() == list(range(6))


def test_who_does_not_open_a_sum_is_left_out_of_the_next_round(tmp_path):
    kind = "unmask"
    host, fleet, _ = fleet_of(tmp_path, nodes=3)  # with more the others open it with their shares
    fleet.attendance.who, node = Present(0), fleet.carrier.nodes["node-2"]

    def handle(header: Any, payload: bytes) -> Any:
        if header["kind"] == kind and fleet.moment.round == 0:
            return {"clients": {str(client): REFUSED + masks.STALE for client in header["clients"]}}, b""
        return node.handle(header, payload)

    fleet.carrier.nodes["node-2"] = SimpleNamespace(handle=handle)
    everybody = fleet.clients.tolist()
    others = [client for client in everybody if fleet.attendance.node_of[client] != "node-2"]
    assert asked(host, fleet, fleet.clients).total is None
    for number, there in ((1, others), (2, everybody)):
        fleet.begin(replace(fleet.moment, round=number))
        assert fleet.reachable.tolist() == there
        assert fleet.arrivals(len(everybody)).tolist() == there
        assert asked(host, fleet, fleet.reachable).total is not None
    fleet._left_out.note(2, Opened({}, frozenset(), {}, {}, frozenset(everybody[1:])))
    fleet.begin(replace(fleet.moment, round=3))
    assert fleet.reachable.tolist() == everybody, "else too few were left"


def stubborn(fleet: Any, name: str, refuses: Any, fewest: int = 1) -> None:
    """Have a node refuse what a function says: header -> reason or None; its owner wants some clients in a sum."""
    node = fleet.carrier.nodes[name]

    def handle(header: Any, payload: bytes) -> Any:
        if (why := refuses(header)) is not None:
            return {"clients": {str(client): REFUSED + why for client in header["clients"]}}, b""
        told, sent = node.handle(header, payload)
        return ({**told, "fewest": fewest} if header["kind"] == "ask" else told), sent

    fleet.carrier.nodes[name] = SimpleNamespace(handle=handle)
    fleet.attendance.who = Present(0)


@pytest.mark.parametrize(("nodes", "fewest"), [(3, 1), (8, 8)])
def test_a_node_that_speaks_of_another_list_is_left_out_where_there_was_none(tmp_path, nodes, fewest):
    """Shares replace it neither of three nodes, nor if its owner wants all clients in a sum."""
    host, fleet, _ = fleet_of(tmp_path, nodes=nodes)
    stubborn(fleet, "node-2", lambda header: masks.ONE_LIST if header["kind"] == "unmask" else None, fewest)
    opened = []
    for number in range(3):
        fleet.begin(replace(fleet.moment, round=number))
        opened.append(asked(host, fleet, fleet.reachable).total is not None)
    # In the first round it may be true: the server was started, and may have named another list before.
    assert opened == [False, False, True]


def test_a_question_that_comes_again_in_a_round_goes_to_the_list_of_before(tmp_path):
    """Nodes keep to it. A client that comes later would make another one."""
    host, fleet, _ = fleet_of(tmp_path)
    times = Counter[str]()

    def refuses(header: Any) -> str | None:
        times[header["kind"]] += 1
        return "not now" if header["kind"] == "ask" and times["ask"] == 1 else None

    stubborn(fleet, "node-2", refuses)
    replies = [asked(host, fleet, torch.arange(6)) for _ in range(2)]
    assert [reply.clients.tolist() for reply in replies] == [[0, 1, 3, 4, 5]] * 2
    assert times["ask"] == 1
    fleet.begin(replace(fleet.moment, round=1))
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == list(range(6))


def test_a_client_that_is_missing_from_a_later_list_of_a_round_is_left_out(tmp_path):
    """For twice as long when it does so again, though sums of before opened with it."""
    host, fleet, _ = fleet_of(tmp_path)
    times = Counter[int]()

    def refuses(header: Any) -> str | None:
        times[header["moment"]["round"]] += header["kind"] == "ask"
        return "not now" if header["kind"] == "ask" and times[header["moment"]["round"]] == 2 else None

    stubborn(fleet, "node-2", refuses)
    opened, there = [], []
    for number in range(6):
        fleet.begin(replace(fleet.moment, round=number))
        there.append(2 in fleet.reachable.tolist())
        replies = [asked(host, fleet, fleet.reachable) for _ in range(3)]
        opened.append([reply.total is not None for reply in replies])
    assert there == [True, False, True, False, False, True]
    assert opened == [[True, not away, True] for away in there]


def spoiled(tree: Any, rng: random.Random) -> Any:
    """Return a tree in which one value is another."""
    if isinstance(tree, dict) and tree:
        key = rng.choice(list(tree))
        if rng.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return tree | {key if rng.random() < 0.95 else 77: spoiled(tree[key], rng)}
    if isinstance(tree, torch.Tensor) and tree.numel() and rng.random() < 0.9:
        made = tree.clone()
        made.view(-1)[rng.randrange(tree.numel())] += 1
        return rng.choice([made, torch.zeros_like(tree), tree.flip(0), tree[:-1]])
    return rng.choice([None, -1, "x", {}, "0" * 64, "ff" * 32, "09" + "00" * 31, True, torch.zeros(3)])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_one_node_says_about_masks_no_sum_is_wrong_and_the_server_goes_on(tmp_path, seed):
    """Another one vanishes. What the node does not spoil is opened, and a sum that it spoils is lost."""
    rng, kind = random.Random(seed), ("keys", "deal", "unmask")[seed % 3]
    host, plain, _ = fleet_of(tmp_path / "plain")
    host, fleet, _ = fleet_of(tmp_path / "lied", lambda kind, node, times: (kind, node) == ("unmask", "node-4"))
    node, model = fleet.carrier.nodes["node-2"], host.algorithm.init(plain, Rng(0)).weights

    def handle(header: Any, payload: bytes) -> Any:
        told, sent = node.handle(header, payload)
        lies = header["kind"] == kind and sent and header["moment"]["round"] == 0
        return told, codec.to_bytes(spoiled(codec.decode_message(sent), rng)) if lies else sent

    fleet.carrier.nodes["node-2"] = SimpleNamespace(handle=handle)
    for number in range(3):
        for each in (plain, fleet):
            each.begin(replace(each.moment, round=number))
        reply = fleet.ask("train", torch.arange(6), model)
        assert reply.total is not None or (number, kind) == (0, "unmask")
        if reply.total is not None:
            assert same(reply.total, plain.ask("train", reply.clients, model).total)


def test_a_client_that_is_not_asked_again_is_not_missing(tmp_path):
    host, fleet, _ = fleet_of(tmp_path)
    fleet.attendance.who = Present(0)
    assert asked(host, fleet, torch.arange(6)).total is not None
    assert asked(host, fleet, torch.arange(5)).total is None, "nodes keep to the list of six"
    fleet.begin(replace(fleet.moment, round=1))
    assert fleet.reachable.tolist() == fleet.clients.tolist()


def test_a_wrong_share_may_be_that_of_who_dealt_it(tmp_path, monkeypatch):
    """One of the shares was never sealed. Its holder is honest."""
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-2"))
    masker = fleet.carrier.nodes["node-2"].masker
    deals = masker.deal

    def lying(*given: Any) -> Any:
        dealt = deals(*given)
        return replace(dealt, seeds=bytes(SEALED) + dealt.seeds[SEALED:])

    monkeypatch.setattr(masker, "deal", lying)
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == list(range(6))
    word = fleet.record.asks[0]["amiss"]["0"]
    assert word.startswith("its share of client 2 does not open: client 2 dealt a wrong one, or ")


def test_a_node_that_vanishes_from_a_sum_of_scores_costs_nothing(tmp_path):
    """Nothing else was asked in the round: evaluations have no line in the record of questions."""
    study = toy("fedavg", {"cohort": 6}, wire={"fewest": 3, "shares": True, "sum_scores": True}, rounds=3)
    replies = []
    for gone in ("nobody", "node-2"):
        host, fleet, _ = fleet_of(
            tmp_path / gone, lambda kind, node, times, gone=gone: (kind, node) == ("unmask", gone), study=study
        )
        model = host.algorithm.init(fleet, Rng(0)).weights
        replies.append(fleet.score(model, fleet.clients, record=True).by_sum)
        assert fleet.record.asks == []
    assert replies[0] is not None
    assert replies[0] == replies[1]


def test_a_node_whose_key_for_masks_is_not_signed_costs_no_sum_and_is_left_out(tmp_path):
    host, fleet, trained = fleet_of(tmp_path)
    fleet.attendance.who, fleet._masked.signed = Present(0), lambda node, key, *about: node != "node-2"
    reply = asked(host, fleet, fleet.reachable)
    assert reply.total is not None
    assert reply.clients.tolist() == sorted(trained) == [client for client in fleet.clients.tolist() if client != 2]
    word = fleet.record.asks[0]["nodes"]["node-2"]["clients"]["2"]
    assert word == UNSIGNED
    fleet.begin(replace(fleet.moment, round=1))
    assert 2 not in fleet.reachable.tolist()


@pytest.mark.parametrize("copied", [True, False])
def test_a_key_that_other_nodes_would_refuse_costs_no_sum(tmp_path, copied, monkeypatch):
    """It is signed as it should be, but another node's, or spelled with the bit that is ignored."""
    ec = masks.library().hazmat.primitives.asymmetric.ec
    host, fleet, _ = fleet_of(tmp_path)
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in fleet.carrier.nodes}
    for name, node in fleet.carrier.nodes.items():
        fleet.carrier.nodes[name] = replace(node, masker=Masker("", name, keys[name]))
    fleet._masked.signed = lambda node, key, *about: masks.verified("", node, key, *about)
    masker = fleet.carrier.nodes["node-5"].masker
    public = fleet.carrier.nodes["node-1"].masker.bundle.public
    if not copied:
        public = masker.bundle.public[:-2] + f"{int(masker.bundle.public[-2:], 16) | 128:02x}"
    signature = masks.sign(keys["node-5"], masks._signed_bytes("", "node-5", public))
    monkeypatch.setattr(masker, "bundle", replace(masker.bundle, public=public, signature=signature))
    monkeypatch.setattr(masker, "check", lambda bundles: None)
    reply = asked(host, fleet, torch.arange(6))
    assert reply.clients.tolist() == [0, 1, 2, 3, 4]
    assert fleet.record.asks[0]["nodes"]["node-5"]["clients"]["5"] == UNSIGNED


def test_a_server_that_is_started_again_knows_whose_key_is_whose(tmp_path, monkeypatch):
    """A node knows the keys of the others, and says that of one before that one does."""
    ec = masks.library().hazmat.primitives.asymmetric.ec
    host, fleet, _ = fleet_of(tmp_path)
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in fleet.carrier.nodes}
    for name, node in fleet.carrier.nodes.items():
        fleet.carrier.nodes[name] = replace(node, masker=Masker("", name, keys[name]))
    signed = partial(masks.verified, "")
    fleet._masked = MaskedSums(fleet._mail, lambda ask: None, signed, file=tmp_path / "keys")
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == list(range(6))
    lines = (tmp_path / "keys").read_text().splitlines()
    public = {name: node.masker.bundle.public for name, node in fleet.carrier.nodes.items()}
    assert lines == [f"{public[name]} {name}" for name in list(public)[:6]]
    with open(tmp_path / "keys", "a") as file:
        file.write(f"{public['node-7']} node-")  # a kill left half a line

    masker, new = fleet.carrier.nodes["node-0"].masker, Masker("", "node-0", keys["node-0"])
    signature = masks.sign(keys["node-0"], masks._signed_bytes("", "node-0", public["node-1"]))
    monkeypatch.setattr(masker, "bundle", replace(masker.bundle, public=public["node-1"], signature=signature))
    fleet._masked = MaskedSums(fleet._mail, lambda ask: None, signed, file=tmp_path / "keys")
    fleet.begin(replace(fleet.moment, round=1))
    assert asked(host, fleet, torch.arange(8)).clients.tolist() == list(range(1, 8))
    fleet.carrier.nodes["node-0"] = replace(fleet.carrier.nodes["node-0"], masker=new)
    fleet._masked = MaskedSums(fleet._mail, lambda ask: None, signed, file=tmp_path / "keys")
    fleet.begin(replace(fleet.moment, round=2))
    assert asked(host, fleet, torch.arange(8)).clients.tolist() == list(range(8))
    assert len((tmp_path / "keys").read_text().splitlines()) == 9, "of eight nodes, and of one that was started again"


@pytest.mark.parametrize("kind", ["deal", "ask"])
def test_a_node_that_always_says_that_its_key_is_another_costs_a_try_and_is_left_out(tmp_path, kind):
    host, fleet, _ = fleet_of(tmp_path)
    fleet.attendance.who, node = Present(0), fleet.carrier.nodes["node-5"]

    def handle(header: Any, payload: bytes) -> Any:
        if header["kind"] == kind:
            return {"clients": {str(client): REFUSED + masks.STALE for client in header["clients"]}}, b""
        return node.handle(header, payload)

    fleet.carrier.nodes["node-5"] = SimpleNamespace(handle=handle)
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == [0, 1, 2, 3, 4]
    assert fleet.carrier.times["deal", "node-0"] == 2
    fleet.begin(replace(fleet.moment, round=1))
    assert 5 not in fleet.reachable.tolist()


def test_who_is_left_of_a_sum_that_one_of_them_spoils_is_not_left_out(tmp_path, monkeypatch):
    """A wrong secret of one spoils the shares of all others, so the server cannot tell who sent it."""
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-2"))
    fleet.attendance.who, masker = Present(0), fleet.carrier.nodes["node-5"].masker
    shows = masker.show

    def lying(*given: Any) -> Any:
        shown = shows(*given)
        return replace(shown, opens=dict.fromkeys(shown.opens, bytes(SEED)))

    monkeypatch.setattr(masker, "show", lying)
    assert asked(host, fleet, torch.arange(6)).total is None
    words = {name: line["clients"] for name, line in fleet.record.asks[0]["nodes"].items()}
    assert words["node-0"] == {"0": UNOPENED}
    fleet.begin(replace(fleet.moment, round=1))
    assert set(fleet.clients.tolist()) - set(fleet.reachable.tolist()) == {2}


def test_an_owner_who_wants_more_shares_to_be_needed_than_the_study_takes_no_part(tmp_path):
    """With different numbers fewer nodes than are said would have both secrets of a client."""
    host, fleet, _ = fleet_of(tmp_path)
    node = fleet.carrier.nodes["node-5"]
    fleet.carrier.nodes["node-5"] = replace(node, policy=lambda: Policy(fewest=5))
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == [0, 1, 2, 3, 4]
    word = fleet.record.asks[0]["nodes"]["node-5"]["clients"]["5"]
    but = "with shares of 4 of 6 nodes, and its owner's `fewest` of 5 wants 5"
    assert word == f"refused: its study opens a sum {but}"


def test_an_owner_whom_too_few_others_hide_is_left_out_of_the_sum_alone(tmp_path):
    """It wants five, and two of three nodes have all others. It would not open the sum, and all would lose it."""
    study = toy("fedavg", {"cohort": 6}, wire={"fewest": 3}, rounds=3)
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("ask", "node-3"), 4, study)
    fleet.attendance.who, node = Present(0), fleet.carrier.nodes["node-0"]
    fleet.carrier.nodes["node-0"] = replace(node, policy=lambda: Policy(fewest=5))
    assert asked(host, fleet, torch.arange(8)).clients.tolist() == [2, 3, 4, 5]
    fleet.begin(replace(fleet.moment, round=1))
    assert fleet.reachable.tolist() == fleet.clients.tolist(), "nobody is to blame"


def test_a_slot_has_as_many_clients_as_an_owner_wants_beside_those_of_a_node(tmp_path):
    """Two clients at each of four nodes. The owner's node would open no slot of fewer, and all would lose the sum."""
    study = toy("ifca", {"cohort": 8, "clusters": 2}, wire={"fewest": 3}, rounds=3)
    for wanted, seed, sizes in ((3, 10, [4, 4]), (4, 10, [4, 4]), (4, 1, [3, 5]), (5, 1, [3, 5])):
        host, fleet, _ = fleet_of(tmp_path / f"{wanted} {seed}", nodes=4, study=study)
        node = fleet.carrier.nodes["node-0"]
        fleet.carrier.nodes["node-0"] = replace(node, policy=lambda wanted=wanted: Policy(fewest=wanted))
        payload = host.algorithm.serve(host.algorithm.init(fleet, Rng(seed)), fleet.clients)[0]
        total = fleet.ask("train", torch.arange(8), payload).total
        assert total is not None
        assert total["members"].value.tolist() == sizes
        assert [delta is not None for delta in total["delta"]] == [size >= wanted - 1 + 2 for size in sizes]


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
def test_where_all_owners_want_more_shares_to_be_needed_none_are_dealt(tmp_path, method):
    """All of them open the sum then, as without shares."""
    study = toy(method, {"cohort": 6}, wire={"fewest": 3, "shares": True}, rounds=3)
    host, fleet, _ = fleet_of(tmp_path, study=study)
    for name, node in fleet.carrier.nodes.items():
        fleet.carrier.nodes[name] = replace(node, policy=lambda: Policy(fewest=5))
    payload = host.algorithm.serve(host.algorithm.init(fleet, Rng(0)), fleet.clients)[0]
    assert fleet.ask("train", torch.arange(6), payload).clients.tolist() == list(range(6))


def test_a_node_that_deals_with_more_shares_needed_than_the_study_is_left_out(tmp_path, monkeypatch):
    """Else the sum would be lost with anybody who vanishes."""
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: (kind, node) == ("unmask", "node-2"))
    masker = fleet.carrier.nodes["node-5"].masker
    deals = masker.deal
    monkeypatch.setattr(masker, "deal", lambda *given: replace(deals(*given), needed=6))
    assert asked(host, fleet, torch.arange(6)).clients.tolist() == [0, 1, 2, 3, 4]


def test_a_sum_that_is_not_opened_ends_within_three_deadlines(tmp_path, monkeypatch):
    """Nothing is heard of a node: once it has answered, of its key, or of what opens the sum."""
    pull = NearCarrier.pull
    for kind, waited in (("keys", 1), ("ask", 1), ("unmask", 1)):
        host, fleet, _ = fleet_of(tmp_path / kind, nodes=3)
        silent = fleet.carrier.nodes["node-2"]

        def heard(carrier: Any, kind: str = kind, silent: Any = silent) -> Any:
            question = carrier._questions[0].question if carrier._questions else None
            if question is None or question.header["kind"] != kind or carrier.nodes[question.node] is not silent:
                return pull(carrier)
            carrier._questions.popleft()
            return []

        monkeypatch.setattr(NearCarrier, "pull", heard)
        began = fleet.clock.monotonic()
        asked(host, fleet, torch.arange(8))
        took = fleet.clock.monotonic() - began
        assert waited <= took < waited + 0.1, kind


@pytest.mark.parametrize(("nodes", "again"), [(3, True), (8, False)])
def test_a_node_that_was_started_again_between_the_messages_takes_part(tmp_path, nodes, again):
    """By another try, or by the shares of the others."""
    host, fleet, trained = fleet_of(tmp_path, nodes=nodes)
    whole = asked(host, fleet, torch.arange(8))
    host, fleet, trained = fleet_of(tmp_path / "b", nodes=nodes)
    carrier = fleet.carrier

    def restarted(kind: str, node: str, times: int) -> bool:
        if kind == "unmask" and node == "node-2" and times == 1:
            carrier.nodes[node] = replace(carrier.nodes[node], masker=Masker("", node))
        return False

    carrier.lost = restarted
    trained.clear()
    reply = asked(host, fleet, torch.arange(8))
    assert reply.clients.tolist() == list(range(8))
    assert same(whole.total, reply.total)
    # Its answers were in the memory of the process that ended.
    times = {client: 1 + (again and fleet.attendance.node_of[client] == "node-2") for client in range(8)}
    assert trained == times


def test_fewer_than_fewest_are_never_opened(tmp_path):
    host, fleet, _ = fleet_of(tmp_path, lambda kind, node, times: kind == "ask" and node not in ("node-0", "node-1"))
    reply = asked(host, fleet, torch.arange(6))
    assert reply.total is None
    assert not len(reply.clients)
    assert fleet.carrier.times["unmask", "node-0"] == 0
    words = fleet.record.asks[0]["nodes"]["node-0"]["clients"]
    assert words == {"0": UNOPENED}


def test_a_sum_of_two_clients_of_a_node_and_one_of_another_is_not_even_asked_for(tmp_path):
    """That node and the server would know the one."""
    host, fleet, _ = fleet_of(tmp_path, nodes=3)  # clients 0 to 2, 3 to 5, and the others
    assert asked(host, fleet, torch.tensor([0, 1, 3])).total is None
    assert {question.header["kind"] for question in fleet.carrier.asked} <= {"keys"}
    assert asked(host, fleet, torch.tensor([0, 1, 3, 4])).clients.tolist() == [0, 1, 3, 4]


def question(fleet: Any, kind: str) -> Any:
    return next(each for each in fleet.carrier.asked if each.header["kind"] == kind and each.node == "node-0")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("ask", {"mask": None}, "its study masks sums, and this one would not be"),
        ("ask", {"forms": None, "mask": None}, "FedtideError at the node"),
        ("ask", {"mask.peers": {"0": {"0": "node-0", "1": "node-1"}}}, "a sum of 2 clients is not masked; allowed: 3"),
        ("ask", {"mask.peers": {"0": dict.fromkeys("02", "node-0") | {"1": "node-1"}}}, masks.ALONE),
        ("ask", {"mask.peers": {"0": {"0": "node-0"} | dict.fromkeys("12", "node-1")}}, masks.ALONE),
        ("ask", {"mask.peers": {}}, "the server does not say who else is asked"),
        ("ask", {"mask.keys": {}}, "the server does not say who else is asked"),
        ("unmask", {"alive": {"0": [0, 1, 2, 3, 4]}}, "a question is opened for one list of clients"),
        ("unmask", {"alive": {"0": [0, 1, 2]}}, "allowed: with clients of 4 nodes left"),
        ("unmask", {"alive": {"0": [0]}}, "found 1, allowed: 3 clients or more"),
        ("unmask", {"alive": {"0": [1, 2, 3]}}, "allowed: clients that were asked, 0 among them"),
        ("unmask", {"mask.attempt": "another"}, "its key for masks is another than the server knows"),
        ("unmask", {"lost": {"0": [0]}}, "allowed: others than 0 in the list, each once"),
        ("unmask", {"lost": {"0": [1, 2, 3]}}, "allowed: with clients of 4 nodes left"),
        ("deal", {"mask.peers": {"0": {"0": "node-0", "1": "node-1"}}}, "a sum of 2 clients is not masked; allowed: 3"),
        ("deal", {"mask.keys": {}}, "the server does not say who else is asked"),
        ("deal", {"mask.peers": {"0": {str(k): f"node-{k}" for k in range(5)}}}, "are dealt once in a try"),
        ("deal", {"moment.round": 9, "version": [8, 0]}, "its sum is of round 8, and its question of round 9"),
    ],
)
def test_what_a_node_refuses_of_a_server(tmp_path, kind, changes, words):
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    sent, node = question(fleet, kind), fleet.carrier.nodes["node-0"]
    header = json.loads(json.dumps(sent.header))
    for key, value in changes.items():
        *above, last = key.split(".")
        (header[above[0]] if above else header)[last] = value
    told, payload = node.handle(header, sent.payload)
    word = told["clients"]["0"]
    assert word.startswith(REFUSED)
    assert words in word
    assert payload in (b"", codec.to_bytes({}))


def test_a_node_shows_nothing_that_its_method_does_not_declare(tmp_path):
    """A work may know more of a client than the server of its study is shown."""
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    sent, node = question(fleet, "ask"), fleet.carrier.nodes["node-0"]
    train = node.algorithm.works["train"]

    def work(*given: Any) -> Any:
        return replace(train(*given), rows={"labels": torch.ones(2)})

    node = replace(node, algorithm=replace(node.algorithm, works={"train": work}))
    header = json.loads(json.dumps(sent.header)) | {"reveal": ["labels"]}
    header["mask"] |= {"attempt": "other", "drawn": {}}
    word = "its study shows nothing of a client by itself, such as 'labels'"
    assert node.handle(header, sent.payload)[0]["clients"] == {"0": REFUSED + word}
    traits = replace(node.algorithm.traits, reveals=("labels",))
    told, shown = replace(node, algorithm=replace(node.algorithm, traits=traits)).handle(header, sent.payload)
    assert told["clients"] == {"0": "answered"}
    assert list(codec.decode_message(shown)[0]["rows"]) == ["labels"]


def test_a_server_cannot_ask_how_large_the_numbers_of_a_client_are(tmp_path):
    """A sum of very many has little room for each. Client 0 has eight rows, and would say that eight are too many."""
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    sent, node = question(fleet, "ask"), fleet.carrier.nodes["node-0"]
    header = json.loads(json.dumps(sent.header))
    header["mask"]["drawn"] = {}
    words = []
    for people in (1000, 1001, 2**26, 2**26 + 1):
        header["mask"]["attempt"] = f"of {people}"
        header["forms"]["0"]["people"] = people
        words.append(node.handle(header, sent.payload)[0]["clients"]["0"])
    but = "refused: a sum of 6 clients has room for {}; allowed: at most 1000"
    assert words == ["answered", *(but.format(people) for people in (1001, 2**26, 2**26 + 1))]


def test_a_node_uses_no_key_for_masks_that_the_registered_key_of_its_node_did_not_sign():
    ec = masks.library().hazmat.primitives.asymmetric.ec
    registered = {name: ec.generate_private_key(ec.SECP384R1()) for name in "abc"}
    nodes = {name: Masker("run", name, key) for name, key in registered.items()}
    peers = {"0": {str(place): name for place, name in enumerate("abc")}}

    def why(**changed: Masker) -> str | None:
        keys = {name: KeyHeader(**asdict({**nodes, **changed}[name].bundle)) for name in "abc"}
        mask = SimpleNamespace(peers=peers, keys=keys, drawn={})
        return objection(nodes["a"], SimpleNamespace(kind="ask", forms={}, mask=mask, clients=[0], slot=None), 3)

    assert why() is None
    assert why(b=Masker("run", "b", registered["b"])) is None, "a node that was started again"
    forged = "node 'b': its key for masks is not signed by its registered key"
    met: list[str] = []
    careful = Masker("run", "a", registered["a"], lambda node, key: met.append(node))
    for made in (Masker("run", "b"), Masker("other", "b", registered["b"]), Masker("run", "x", registered["b"])):
        assert why(b=made) == forged
        with pytest.raises(FedtideError, match="not signed by its registered key"):
            careful.check({"a": careful.bundle, "b": made.bundle})
    assert met == [], "a key that is not signed is not taken for that of the node"


@pytest.mark.parametrize("change", [{"version": [0, 7]}, {"slot": {"0": 0}}])
def test_a_question_under_another_number_is_not_opened_for_another_list(tmp_path, change):
    """Its answer follows from the round and the name of the question, and would be the same."""
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    node, sent, after = fleet.carrier.nodes["node-0"], question(fleet, "ask"), question(fleet, "unmask")
    header, then = (json.loads(json.dumps(each.header)) | change for each in (sent, after))
    received = codec.from_bytes(sent.payload)
    payload = codec.to_bytes({0: received}) if "slot" in change else sent.payload
    header["mask"]["attempt"] = then["mask"]["attempt"] = "other"
    header["mask"]["drawn"] = {}
    assert node.handle(header, payload)[0]["clients"]["0"] == "answered"
    then["alive"] = {"0": [0, 1, 3]}
    assert "for one list" in node.handle(then, after.payload)[0]["clients"]["0"]


@pytest.mark.parametrize("spoiled", ["opens", "sealed"])
def test_a_node_that_opens_nothing_costs_the_sum_and_not_the_server(tmp_path, spoiled, monkeypatch):
    host, fleet, _ = fleet_of(tmp_path, nodes=3)  # no shares could replace it
    masker = fleet.carrier.nodes["node-1"].masker
    shows = masker.show

    def lying(*given: Any) -> Any:
        shown = shows(*given)
        others = {k: v for k, v in shown.opens.items() if k != 0}
        return replace(shown, opens=others) if spoiled == "opens" else replace(shown, sealed=bytes(32))

    monkeypatch.setattr(masker, "show", lying)
    reply = asked(host, fleet, torch.arange(8))
    assert reply.total is None
    assert not len(reply.clients)


def test_masks_stay_on_where_a_server_sends_one_node_another_model(tmp_path):
    """If the others' answers were known for it, their sum would be the one client's."""
    host, fleet, _ = fleet_of(tmp_path)
    node, nodes = fleet.carrier.nodes["node-1"], fleet.carrier.nodes
    other = codec.to_bytes(host.algorithm.init(fleet, Rng(1)).weights)

    def handle(header: Any, payload: bytes) -> Any:
        return node.handle(header, other if header["kind"] == "ask" else payload)

    nodes["node-1"] = SimpleNamespace(handle=handle)
    assert asked(host, fleet, torch.arange(6)).total is None
    nodes["node-1"] = node
    assert asked(host, fleet, torch.arange(6)).total is not None


def test_masks_are_of_one_form_of_the_sum_whose_leaves_have_names_of_their_own(tmp_path):
    """With a leaf more in front, others' vectors would be zeros where the numbers of one stand."""
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    header = json.loads(json.dumps(question(fleet, "ask").header))
    form = header["forms"]["0"]
    fake = {**form, "leaves": [{"name": "fake", "size": 1, "slots": 1}, *form["leaves"]]}
    for other in (fake, {**form, "people": 7}):
        assert about(header) != about({**header, "forms": {"0": other}})
    assert about(header) != about({**header, "moment": {**header["moment"], "seconds": 5.0}})
    twice = {**form, "leaves": [form["leaves"][0], *form["leaves"]]}
    assert "failed" in fleet.carrier.nodes["node-0"].handle({**header, "forms": {"0": twice}}, b"")[0]


PRIVATE = {"fewest": 3, "privacy": {"multiplier": 1.0, "distance": 1, "clip": {"delta": 1.0, "loss": 5.0}}}


def lying_fleet(home: Path, wire: dict[str, Any], lie: Any) -> tuple[Any, Any]:
    """Six clients, of whom one sends what a function makes of its vector before it is masked: (vector, form)."""
    study = toy("fedavg", {"cohort": 6}, wire=wire, rounds=3)
    host = host_of(study, study.method[0], 0)
    fleet = near_fleet(host, 8, home, Meddling, server_wire(study, study.method[0], host, simulated_noise(0)))
    fleet.begin(replace(fleet.moment, round=0, rounds=3))
    node = fleet.carrier.nodes["node-2"]
    fleet.carrier.nodes["node-2"] = replace(node, wire=replace(node.wire, clip=SimpleNamespace(apply=lie)))
    return host, fleet


def weights_of(vector: Any, form: Any, weight: float) -> Any:
    for table in form.tables(vector).values():
        table[:, -1] = weight
    return vector


@pytest.mark.parametrize(
    ("private", "lie", "word"),
    [
        (False, lambda v, form: weights_of(v, form, -1.0), "found weight -1, allowed: 0 to 1e+06"),
        (False, lambda v, form: weights_of(v, form, 2e6), "found weight 2e+06, allowed: 0 to 1e+06"),
        (False, lambda v, form: weights_of(v, form, 17.0), None),
        (True, lambda v, form: weights_of(v.zero_(), form, 0.5), "found weight 0.5, allowed: 1, one of each client"),
        (True, lambda v, form: weights_of(v.fill_(0.7), form, 1.0), "delta: found length "),
        (True, lambda v, form: weights_of(v.zero_(), form, 1.0), None),
    ],
)
def test_an_answer_in_fixed_point_is_looked_at_before_it_is_added(tmp_path, private, lie, word):
    wire = {"secure": False, **(PRIVATE if private else {"fewest": 3})}
    host, fleet = lying_fleet(tmp_path, wire, lie)
    reply = asked(host, fleet, torch.arange(6))
    assert reply.clients.tolist() == ([0, 1, 2, 3, 4, 5] if word is None else [0, 1, 3, 4, 5])
    said = fleet.record.asks[0]["nodes"]["node-2"]["clients"]["2"]
    assert said == "answered" if word is None else said.startswith(REFUSED)
    assert word is None or word in said


def test_a_number_beyond_the_room_of_a_client_is_refused():
    """Two of them would wrap around to another sum."""
    form, wire = Form((Leaf("delta", 1),), people=6), Wire()
    assert wire.fault(torch.tensor([-(2**60), 1]), form, 1, 1e6) is None
    for number in (2**61, -(2**61), -(2**63)):
        assert "beyond the room" in str(wire.fault(torch.tensor([number, 1]), form, 1, 1e6))
    assert wire.fault(torch.tensor([2**61, 1]), form, 2, 1e6) is None


def test_a_sum_of_scores_says_no_more_than_its_clients_can():
    """Also without a budget: else one of three could end a study by an accuracy that none can have."""
    form = Form((Leaf("score.accuracy", 1), Leaf("score.judged", 1)), people=6)
    for accuracy, fits in ((1.5, True), (-1.5, True), (1.6, False), (3e7, False)):
        sent = quantized(torch.tensor([accuracy, 3.0, 1.5, 3.0]), 6)
        assert (Wire().fault(sent, form, 3, 1.0) is None) == fits


def test_a_masked_private_sum_has_the_weight_of_its_clients_or_is_none(tmp_path):
    """Else one of them chose the divisor."""
    for lie, why in ((0.5, "delta: found weight 5.5, allowed: 6"), (1.0, None)):
        host, fleet = lying_fleet(
            tmp_path / str(lie), PRIVATE, lambda v, form, lie=lie: weights_of(v.zero_(), form, lie)
        )
        reply = asked(host, fleet, torch.arange(6))
        assert (reply.total is None) == (why is not None)
        said = {word for line in fleet.record.asks[0]["nodes"].values() for word in line["clients"].values()}
        assert said == ({"answered"} if why is None else {next(iter(said))})
        assert why is None or f"lost: its sum cannot be, by what one of its nodes sent: {why}" in next(iter(said))


def about(header: Any) -> str:
    """What the masks of a question are for."""
    kept = []
    spy = SimpleNamespace(masked=lambda *given: kept.append(given[4].key))
    masked(spy, read_question({**header, "clients": [0]}), {}, {0: {"total": torch.zeros(1)}})
    return kept[0]


def private_fleet(home: Path) -> tuple[Any, Any]:
    privacy = {"multiplier": 1.0, "distance": 1, "clip": {"delta": 1.0, "loss": 5.0}}
    study = toy("fedavg", {"cohort": 6}, wire={"fewest": 3, "shares": True, "privacy": privacy}, rounds=3)
    host = host_of(study, study.method[0], 0)
    wire = server_wire(study, study.method[0], host, simulated_noise(0))
    fleet = near_fleet(host, 8, home, Meddling, wire, patience=1.0)
    fleet.begin(replace(fleet.moment, round=0, rounds=3))
    asked(host, fleet, torch.arange(6))
    return host, fleet


def test_a_private_study_reveals_nothing_of_a_client_by_itself(tmp_path):
    _, fleet = private_fleet(tmp_path)
    sent = question(fleet, "ask")
    header = {**json.loads(json.dumps(sent.header)), "reveal": ["n"]}
    told, payload = fleet.carrier.nodes["node-0"].handle(header, sent.payload)
    word = "its study is private, and shows nothing of a client by itself, such as 'n'"
    assert (told["clients"], payload) == ({"0": REFUSED + word}, b"")


def test_zeros_are_sent_in_no_name_of_the_servers_choosing(tmp_path):
    """Where sums are private a work that fails sends zeros; a server that could bring that about would pick who."""
    _, fleet = private_fleet(tmp_path)
    sent, node = question(fleet, "ask"), fleet.carrier.nodes["node-0"]
    header = json.loads(json.dumps(sent.header))
    header["mask"]["attempt"] = "other"
    told, _ = node.handle({**header, "counted": {"0": [0, 7]}}, sent.payload)
    assert told["clients"]["0"] == f"{REFUSED}its memory of round 0 is gone from the node; restore its folder"
    ids = ["0", "1000", "1001"]
    header |= {key: dict.fromkeys(ids) for key in ("counted", "settled")} | {"clients": [0, 1000, 1001]}
    header["mask"]["peers"] = {"0": dict.fromkeys(ids, "node-0")}
    told, payload = node.handle(header, sent.payload)
    assert told["clients"] == dict.fromkeys(ids, f"{REFUSED}it has no client 1000")
    assert payload == b""


def test_a_question_that_comes_twice_is_answered_with_the_same_bytes(tmp_path):
    host, fleet, _ = fleet_of(tmp_path)
    asked(host, fleet, torch.arange(6))
    for kind in ("ask", "unmask"):
        sent = question(fleet, kind)
        before = next(each for each in fleet.carrier.came if each.id == sent.id)
        header = json.loads(json.dumps(sent.header))
        assert fleet.carrier.nodes["node-0"].handle(header, sent.payload)[1] == before.payload


def test_secrets_of_many_clients_of_a_node_travel_within_the_bounds_of_a_message():
    """Of 330 in a sum of 660."""
    table = {client: bytes([client % 251]) * SEED for client in range(659)}
    shown = {client: Shown(b"s" * SEED, table, {client: b"l" * SEED}) for client in range(330)}
    content = codec.to_bytes({client: secrets_tree(each) for client, each in shown.items()})
    assert len(content) < 330 * (660 * 40 + 2000)
    assert {client: read_secrets(tree) for client, tree in codec.decode_message(content).items()} == shown


@pytest.mark.parametrize(
    "place", ["", "sealed", "opens", "links", "opens.clients", "links.secrets", "seeds", "keys.secrets"]
)
@pytest.mark.parametrize(
    "value",
    [None, "00" * SEED, {}, torch.zeros(SEED), torch.zeros(3, SEED - 1, dtype=torch.uint8), torch.arange(3)[:, None],
     torch.zeros(2, SEED, dtype=torch.uint8), {"clients": torch.arange(1), "secrets": None, "more": 1}],
    ids=range(8),
)  # fmt: skip
def test_what_are_no_secrets_is_refused(place, value):
    table = dict.fromkeys(range(3), b"o" * SEED)
    made: Any = secrets_tree(Shown(b"s" * SEED, table, table, table, table))
    assert read_secrets(made).links == table
    first, _, second = place.partition(".")
    if second:
        made[first][second] = value
    else:
        made = made | {first: value} if first else value
    with pytest.raises(FedtideError, match=r"^secrets: found .*allowed: "):
        read_secrets(made)


def test_no_secret_lies_in_a_log_a_record_a_checkpoint_or_a_file(tmp_path, monkeypatch):
    """Nor is the answer of a client on the wire: what goes there is searched for its numbers in fixed point."""
    secret: list[bytes] = []
    for name, module in (("derived", masks), ("token_bytes", masks.secrets)):
        made = getattr(module, name)

        def kept(*given: Any, made: Any = made) -> bytes:
            secret.append(made(*given))
            return secret[-1]

        monkeypatch.setattr(module, name, kept)
    logged: list[str] = []
    host = host_of(EXPERIMENT, EXPERIMENT.method[0], 0)
    fleet = near_fleet(host, 8, tmp_path / "nodes", Meddling)
    nodes = {name: replace(node, log=logged.append) for name, node in fleet.carrier.nodes.items()}
    fleet.carrier.nodes = nodes
    run = played(EXPERIMENT, fleet=lambda _: fleet)
    secret += [node.masker._key.private_bytes_raw() for node in nodes.values()]
    secret += [shared for node in nodes.values() for shared in node.masker._shared.values()]
    assert len(secret) > 100
    fleet.memory.save(tmp_path / "memory.safetensors", (99, 0))
    codec.to_file(tmp_path / "state.safetensors", run.state)
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    words = "".join(
        [
            str(fleet.record_lines()),
            *logged,
            repr(nodes),
            repr(fleet),
            *(repr(each.header) for each in fleet.carrier.came),
        ]
    )
    for each in secret:
        assert each not in found
        assert each.hex() not in words
        assert repr(each) not in words
    vectors = [
        codec.from_bytes(sent[2])[client]["total"].numpy().tobytes()
        for node in nodes.values()
        for (_, client), sent in node._sent.items()
    ]
    assert vectors
    wire = b"".join(each.payload for each in fleet.carrier.came)
    for vector in vectors:
        assert vector[:64] not in wire
