"""A study over gRPC has the states and facts of its simulation bit for bit, whatever happens to its streams."""

import json
import random
import threading
from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from fedtide.core.trees import same
from fedtide.laws.case import Case, played
from fedtide.remote.grpc import door, line
from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.remote.node_memory import NodeMemory
from fedtide.remote.offline import near_fleet
from helpers.between import Between, at_random
from helpers.callers import Near, elsewhere
from helpers.federation import Federation, until
from helpers.toys import toy

METHODS = ("fedavg", "scaffold", "ifca")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("bits"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(line, "SHORTEST", 0.02)
    monkeypatch.setattr(line, "LONGEST", 0.1)


@pytest.fixture(params=METHODS)
def case(request):
    return Case(partial(toy, request.param), lambda: None)


class Counting:
    """Answers questions of a node, one node at a time, and counts them.

    Args:
        node: answers.
        lock: of all nodes of a fleet.
    """

    def __init__(self, node, lock):
        self._node, self._lock = node, lock
        self.asked = []

    def __call__(self, header, payload, seconds):
        with self._lock:
            self.asked.append(header)
            told, sent = self._node.handle(json.loads(header), payload)
        return json.dumps(told).encode(), sent


def compared(federation, case, home, way=None):
    """Play a case over gRPC and compare it with its simulation; return what the nodes were asked, and the nodes."""
    lock, answers, nodes = threading.Lock(), {}, []
    with ExitStack() as stack:

        def carry(at):
            for name, node in at.items():
                answers[name] = Counting(node, lock)
                known = federation.known(name)
                nodes.append(stack.enter_context(Near(known if way is None else elsewhere(known, way), answers[name])))
            until(lambda: set(at) <= federation.carrier.present(), 30.0)
            federation.carrier.nodes = at
            return federation.carrier

        here = case.reference
        fleet = near_fleet(here.host, 3, home, carry, patience=60.0)
        there = played(case.experiment, fleet=lambda _: fleet)
        for ours, theirs in zip(here.steps, there.steps, strict=True):
            assert same([ours.state, dict(ours.facts)], [theirs.state, dict(theirs.facts)])
        for client in fleet.clients.tolist():
            (name,) = (name for name, clients in fleet.roster.items() if client in clients)
            memory = NodeMemory(federation.carrier.nodes[name].folder, {client: fleet.counted(client)})
            kept = memory.read(client, (0, 0))
            assert same(here.host.memory.read(client, (99, 0)), kept)
    until(lambda: not federation.carrier.present(), 20.0)
    return [header for each in answers.values() for header in each.asked], nodes


def test_nodes_over_grpc_have_the_bits_of_the_simulation(federation, case, tmp_path):
    asked, nodes = compared(federation, case, tmp_path)
    assert len(set(asked)) == len(asked)  # each question was worked on once
    assert all(len(node.lines) == 1 for node in nodes)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_streams_that_are_cut_at_random_change_no_bit(federation, case, tmp_path, seed, monkeypatch):
    """Questions and answers are lost half way, and said again."""
    monkeypatch.setattr(door, "STRANGERS", 1000)
    with Between(federation.port, cut=at_random(seed, 0.02, 0.3)) as between:
        compared(federation, case, tmp_path, between.port)
        assert between.count > 4


def test_answers_that_are_lost_or_said_again_change_no_bit(federation, case, tmp_path, monkeypatch):
    """Streams end after an answer was worked out and before it counts, and answers come three times.

    One answer of three, the first among them, is lost at first and then said three times; the rest is drawn.
    """
    draw, said, left = random.Random(0), [], {}

    async def lossy(call, out):
        while True:
            message = await out.get()
            plan = left.setdefault(message.id, [0, 3] if len(left) % 3 == 0 else [])
            times = plan.pop(0) if plan else draw.choice((0, 1, 3))
            for _ in range(times):
                said.append(message.id)
                for piece in message.pieces():
                    await call.write(piece)
            if not times or draw.random() < 0.3:
                raise line.Closed("Socket closed")

    monkeypatch.setattr(line, "_write", lossy)
    asked, _ = compared(federation, case, tmp_path)
    assert len(said) > len(set(said))
    assert len(asked) > len(set(asked))


def test_a_server_that_comes_back_in_a_study_changes_no_bit(federation, case, tmp_path):
    """Each of its rounds begins with nodes that have to come in anew."""
    carriers = []

    class Restarting:
        """A carrier whose server is another one every few pushes, with the questions that were open."""

        def __init__(self):
            self._pushes, self._open = 0, {}

        def present(self):
            return federation.carrier.present()

        def removed(self):
            return federation.carrier.removed()

        def push(self, questions):
            self._pushes += 1
            self._open |= {each.id: each for each in questions}
            federation.carrier.push(questions)
            if self._pushes % 4 == 0:
                federation.carrier.close()
                federation.serve()
                federation.carrier.push(list(self._open.values()))
                carriers.append(federation.carrier)

        def drop(self, questions):
            for name in questions:
                self._open.pop(name, None)
            federation.carrier.drop(questions)

        def pull(self):
            found = federation.carrier.pull()
            for each in found:
                del self._open[each.id]
            return found

    with pytest.MonkeyPatch.context() as patch:
        own = Restarting()
        patch.setattr(GrpcCarrier, "nodes", None, raising=False)

        lock, answers = threading.Lock(), {}
        with ExitStack() as stack:

            def carry(at):
                for name, node in at.items():
                    answers[name] = Counting(node, lock)
                    stack.enter_context(Near(federation.known(name), answers[name]))
                until(lambda: set(at) <= federation.carrier.present(), 30.0)
                return own

            here = case.reference
            fleet = near_fleet(here.host, 3, tmp_path, carry, patience=60.0)
            there = played(case.experiment, fleet=lambda _: fleet)
            for ours, theirs in zip(here.steps, there.steps, strict=True):
                assert same([ours.state, dict(ours.facts)], [theirs.state, dict(theirs.facts)])
        assert carriers
        until(lambda: not federation.carrier.present(), 20.0)
