"""A client that chose its slot alone: its sum stays masked, in a simulation too, and its choice is said to nobody."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedtide.core.base import Slotted, Weighted
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.laws.case import played, toy
from fedtide.remote.asks import closed_in
from fedtide.remote.node import show
from fedtide.remote.offline import NearCarrier, near_fleet, replayed
from fedtide.remote.policy import Policy
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire
from fedtide.wire.masks import Context, Masker, Question
from fedtide.wire.noise import simulated_noise
from fedtide.wire.pipeline import Opening, Wire
from fedtide.wire.unmask import unmasked
from fedtide.wire.vector import BITS, Form, form_of

pytest.importorskip("cryptography")

ROUNDS = 16


def odd_study(method: str, wire: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """A study of eight clients, always there, and its host: one of them has labels of its own."""
    study = toy(method, {"cohort": 8, **options}, wire=wire, rounds=ROUNDS, shift={"who": "always"})
    host = host_of(study, study.method[0], 0)
    train = host.algorithm.works["train"]

    def odd(payload, memory, shard, moment, rng):
        if len(rng.path) > 1 and int(rng.path[1]) == 5:
            shard = replace(shard, y=(shard.y + 1) % 3)
        return train(payload, memory, shard, moment, rng)

    return study, replace(host, algorithm=replace(host.algorithm, works={**host.algorithm.works, "train": odd}))


class Watched:
    """A fleet that keeps the sums of "train", as its algorithm sees them."""

    def __init__(self, fleet: Any) -> None:
        self.fleet, self.sums = fleet, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)

    def ask(self, question: str, *given: Any, **how: Any) -> Any:
        reply = self.fleet.ask(question, *given, **how)
        if question == "train":
            self.sums.append(reply.total)
        return reply


def sums_of(study: Any, host: Any, home: Path | None = None) -> tuple[Any, list[Any]]:
    """Play a study, in a simulation or at nodes; return the last state and the sums of each round."""
    seen: list[Watched] = []

    def watched(simulated: Any) -> Watched:
        seen.append(Watched(simulated if home is None else near_fleet(host, 8, home)))
        return seen[0]

    state = played(study, host=host, fleet=watched).state
    return state, seen[0].sums


def lone(sums: list[Any]) -> int:
    """In how many rounds a server reads an update that is one client's alone."""
    return sum(
        any(count == 1 and delta is not None for count, delta in
            zip(total["members"].value.tolist(), total["delta"], strict=True))
        for total in sums
    )  # fmt: skip


@pytest.mark.parametrize(("method", "rounds"), [("ifca", 8), ("aem", 1)])
def test_a_slot_of_one_client_is_not_opened(tmp_path, method, rounds):
    options = {"clusters": 2} if method == "ifca" else {}
    _, plain = sums_of(*odd_study(method, {"secure": False, "fewest": 1}, **options))
    assert lone(plain) >= rounds, "else there is nothing to hide"
    ours, simulated = sums_of(*odd_study(method, {"fewest": 3}, **options))
    theirs, deployed = sums_of(*odd_study(method, {"fewest": 3}, **options), tmp_path)
    assert lone(simulated) == lone(deployed) == 0
    assert same(simulated, deployed)
    assert same(ours, theirs)
    assert any(total["members"].value.min() == 1 for total in deployed), "there is a client alone"


def test_an_owner_counts_those_that_chose_the_same(tmp_path):
    """All owners want five: the slot of four, which the study would open, stays shut."""
    study, host = odd_study("ifca", {"fewest": 3}, clusters=2)
    fleet = near_fleet(host, 8, tmp_path)
    for name, node in fleet.carrier.nodes.items():
        fleet.carrier.nodes[name] = replace(node, policy=lambda: Policy(fewest=5))
    watched = Watched(fleet)
    played(study, host=host, fleet=lambda _: watched, rounds=6)
    opened = [
        (count, delta is not None) for total in watched.sums
        for count, delta in zip(total["members"].value.tolist(), total["delta"], strict=True)
    ]  # fmt: skip
    assert {count >= 5 for count, _ in opened} == {True, False}
    assert all(shown == (count >= 5) for count, shown in opened)


def test_a_branch_that_one_client_trained_is_not_opened():
    """Others have nothing in its tensors, if a client does not train the branches that it did not choose."""
    study, host = odd_study("min-loss", {"fewest": 3}, lam=0.0, branches=2, weighting="uniform")
    _, sums = sums_of(study, host)
    few = [total for total in sums if 0 < total["branches"].value.min() < 3]
    assert few, "else there is nothing to hide"
    for total in few:
        k = int(total["branches"].value.argmin())
        trained = {name for name, value in total["delta"].value.params.items() if value.any()}
        assert {f"copies.{1 - k}." in name for name in trained} == {True, False}, "the trunk, and the other branch"
        assert not any(f"copies.{k}." in name for name in trained)


def total_of(*, slot: int, likelihood: bool) -> dict[str, Any]:
    more = {"likelihood": Weighted(2.0)} if likelihood else {}
    return {"n": Weighted(1.0), "delta": Slotted({slot: Weighted(torch.tensor([1.0, 2.0]), 7.0)}, 2), **more}


FORM = form_of(total_of(slot=0, likelihood=True), 4, counted=True, optional=frozenset({"likelihood"}))


def test_units_are_opened_by_the_number_of_clients_by_hand():
    """Three clients choose slot 0 and one slot 1; two send what may be left out."""
    wire = Wire(fewest=3)
    answers = [(0, True), (0, False), (0, True), (1, False)]
    total = sum(wire.send(FORM, total_of(slot=slot, likelihood=said)) for slot, said in answers)
    opening = Opening("train", (0, 0), None, (0, 1, 2, 3), FORM)
    assert (total[FORM.end :] >> BITS).tolist() == [3, 1, 2]  # both slots, and what may be left out
    assert wire.find_units(total, opening) == [0]
    assert wire.find_units(total, opening, fewest=4) == []
    read = wire.receive(total, opening, total_of(slot=0, likelihood=True), frozenset({"likelihood"}))
    assert read["n"].value == 4.0
    assert "likelihood" not in read
    assert read["delta"][1] is None
    assert read["delta"][0].value.tolist() == [21.0, 42.0]


def test_parts_are_opened_one_by_one_and_the_others_stay_noise():
    """Two nodes of one client each: the second unit of three numbers is never opened."""
    form = Form(FORM.leaves[:2], people=2, counted=True)
    at = {k: Masker("run", str(k)) for k in (1, 2)}
    peers = {k: node.bundle.public for k, node in at.items()}
    wire, context = Wire(fewest=2), Context("run", (0, 0), 0, "a")
    vectors = {k: wire.send(form, total_of(slot=0, likelihood=False)) for k in at}
    sent = {k: at[k].masked(context, k, vectors[k], peers, parts=form.parts) for k in at}
    whole = vectors[1] + vectors[2]
    for numbers in ([0], [1]):
        shown = {k: at[k].show(context, k, [1, 2], 2, numbers) for k in at}
        (opened,) = unmasked(sent, shown, [form.parts[numbers[0]]])
        assert torch.equal(opened, whole[form.parts[numbers[0]]])
        (wrong,) = unmasked(sent, shown, [form.parts[2]])
        assert not torch.equal(wrong, whole[form.parts[2]]), "secrets of one part open no other"
    mixed = {1: at[1].show(context, 1, [1, 2], 2, [0, 1]), 2: at[2].show(context, 2, [1, 2], 2, [0, 2])}
    assert not torch.equal(unmasked(sent, mixed, [form.parts[0]])[0], whole[form.parts[0]]), "two told other parts"


@pytest.mark.parametrize(
    ("nodes", "counts", "least"), [("abcd", [], 3), ("abcd", [2], 3), ("abcd", [3, 3], 3), ("aabb", [3], 4)]
)
def test_a_node_opens_no_slot_that_the_server_does_not_call_large_enough(nodes, counts, least):
    """A slot of two clients of a node and one of another would tell that node of the one."""
    peers, clients = {str(k): node for k, node in enumerate(nodes)}, list(range(len(nodes)))
    asked = SimpleNamespace(
        clients=[0], slot=None, parts={"0": [1]}, counts={"0": counts}, alive={"0": clients},
        mask=SimpleNamespace(peers={"0": peers}),
    )  # fmt: skip
    with pytest.raises(FedtideError, match=f"allowed: {least} or more"):
        show(Masker("run", "a"), asked, 3, counted=True)


def test_a_slot_of_clients_of_one_node_and_one_other_is_not_opened(tmp_path):
    """In a simulation it is; what the record says of it plays the same again."""
    study, host = odd_study("ifca", {"fewest": 3}, clusters=2)
    fleet = near_fleet(host, 4, tmp_path)  # of two clients each
    watched = Watched(fleet)
    ours = played(study, host=host, fleet=lambda _: watched, rounds=8).state
    opened = [
        (count, delta is not None) for total in watched.sums
        for count, delta in zip(total["members"].value.tolist(), total["delta"], strict=True)
    ]  # fmt: skip
    assert all(shown == (count >= 4) for count, shown in opened)
    lines = json.loads(json.dumps(fleet.record_lines()))
    assert any(ask.get("closed") for line in lines for ask in line["asks"])
    told = closed_in(lines)
    assert all(few.name in ("cluster 0", "cluster 1") and few.most < few.needed == 4 for few in told)
    shut = sum(0 < count < 4 for total in watched.sums for count in total["members"].value.tolist())
    assert sum(few.times for few in told) == shut
    again = Watched(replayed(host, lines))
    assert same(ours, played(study, host=host, fleet=lambda _: again, rounds=8).state)


def test_who_misses_a_question_ends_it_in_this_round_and_nobody_is_blamed(tmp_path):
    """Others would refuse to open it for another list, if it is asked again."""
    _, host = odd_study("ifca", {"fewest": 3}, clusters=2)
    fleet = near_fleet(host, 8, tmp_path, Keeping)
    fleet.begin(replace(fleet.moment, round=0, rounds=ROUNDS))
    payload = host.algorithm.serve(host.algorithm.init(fleet, Rng(0)), fleet.clients)[0]
    assert len(fleet.ask("train", fleet.clients, payload).clients) == 8
    asked = len(fleet.carrier.asked)
    assert fleet.ask("train", fleet.clients[:5], payload).total is None
    assert not any(question.header["kind"] == "unmask" for question in fleet.carrier.asked[asked:])
    fleet.begin(replace(fleet.moment, round=1))
    assert len(fleet.reachable) == len(fleet.clients)


def test_a_question_of_a_round_is_opened_for_one_list_however_often_it_is_asked():
    """And no sum of an earlier round after one of a later round, nor after the node was started again."""
    at = {k: Masker("run", str(k)) for k in (1, 2, 3)}
    peers = {k: node.bundle.public for k, node in at.items()}

    def opened(number: int, ask: int, alive: list[int], question: str = "train") -> None:
        context = Context("run", (number, ask), 0, f"{number}.{ask}.{alive}")
        for k in alive:
            at[k].masked(context, k, torch.tensor([1]), peers, Question(number, question, str(ask)))
        for k in alive:
            at[k].show(context, k, alive, 2)

    opened(4, 0, [1, 2, 3])
    opened(4, 1, [1, 2, 3])
    with pytest.raises(FedtideError, match="for one list"):
        opened(4, 2, [1, 2])
    opened(4, 3, [1, 2], "loss")
    opened(5, 0, [1, 2])
    opened(4, 4, [1, 2, 3])  # a server that was killed plays a round again
    with pytest.raises(FedtideError, match="none of an earlier round"):
        opened(3, 0, [1, 2, 3])


def test_a_masked_study_does_not_say_which_model_a_client_uses(tmp_path):
    study, host = odd_study("ifca", {"fewest": 3, "sum_scores": False}, clusters=2)
    fleet = near_fleet(host, 8, tmp_path)
    run = played(study, host=host, fleet=lambda _: fleet, rounds=2)
    payload, slot = host.algorithm.serve(run.state, fleet.clients)
    assert fleet.score(payload, fleet.clients, slot=slot).choice is None
    for name, node in fleet.carrier.nodes.items():
        fleet.carrier.nodes[name] = replace(node, policy=lambda: Policy(reveals=("choice",)))
    assert fleet.score(payload, fleet.clients, slot=slot).choice is not None


def test_a_private_server_opens_the_slots_whose_noised_weight_can_be_read(tmp_path):
    """Bits as in a simulation, which has all slots: what is not opened is what noise would drown."""
    clip = {"delta": 1.0, "loss": 5.0, "members": 1.0}
    wire = {"fewest": 3, "privacy": {"multiplier": 0.4, "distance": 1, "clip": clip}}
    study, host = odd_study("ifca", wire, clusters=2)

    def server() -> Wire:
        return server_wire(study, study.method[0], host, simulated_noise(0))

    seen, carriers = list[Watched](), list[Any]()

    def watched(simulated: Any, home: Path | None = None) -> Watched:
        def carry(nodes: Any) -> Any:
            carriers.append(Keeping(nodes))
            return carriers[0]

        seen.append(Watched(simulated if home is None else near_fleet(host, 8, home, carry, server())))
        return seen[-1]

    ours = played(study, host=host, fleet=watched, rounds=6).state
    theirs = played(study, host=host, fleet=lambda fleet: watched(fleet, tmp_path), rounds=6).state
    assert same(ours, theirs)
    assert same(seen[0].sums, seen[1].sums)
    asked = [question.header for question in carriers[0].asked if question.header["kind"] == "unmask"]
    assert {"counts" in header and bool(header["counts"]) for header in asked} == {False}, "nothing exact is said"
    readable = [delta is not None for total in seen[1].sums for delta in total["delta"]]
    assert set(readable) == {True, False}
    opened = {(header["moment"]["round"], *header["parts"]["0"]) for header in asked if header["parts"]["0"] != [0]}
    assert sum(len(parts) - 1 for parts in opened) == sum(readable)


class Keeping(NearCarrier):
    """A carrier that keeps the questions."""

    def push(self, questions: Any) -> None:
        self.asked = [*getattr(self, "asked", []), *questions]
        super().push(questions)
