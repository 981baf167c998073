"""A node: questions that come again, what its owner allows, what it keeps, and how it predicts."""

import errno
import json
import os
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from fedtide.core import codec
from fedtide.core.base import Moment, Slotted, Weighted
from fedtide.core.errors import FedtideError
from fedtide.core.loop import Start, begin, play
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.fleets.ask import Ask
from fedtide.remote import node_memory
from fedtide.remote.asks import ANSWERED
from fedtide.remote.node_answers import Received, keep_wanted
from fedtide.remote.node_memory import Judged, JudgedModels, MemoryLost, NodeMemory
from fedtide.remote.offline import NearCarrier, memory_at, near_fleet
from fedtide.remote.policy import Policy
from fedtide.site.owner import MODELS, Owner
from helpers.carriers import host, told

EVERYONE = {"cohort": {"kind": "everyone"}}
ALWAYS = {"who": {"kind": "always"}}


def fleet_of(name, home, options=None, nodes=2, **own):
    """A fleet, and a list of what works are done."""
    made, done = host(name, EVERYONE | (options or {}), shift=ALWAYS), []

    def counted(work):
        return lambda *given: done.append(1) or work(*given)

    works = {question: counted(work) for question, work in made.algorithm.works.items()}
    changed = replace(made, algorithm=replace(made.algorithm, works=works))

    def carry(at):
        return NearCarrier({key: replace(node, **own) for key, node in at.items()})

    return changed, near_fleet(changed, nodes, home, carry), done


def first_rounds(made, fleet, rounds, start=None):
    start = start or begin(made.algorithm, fleet, seed=0, rounds=6)
    steps = play(made.algorithm, fleet, start, seed=0, rounds=6)
    return [next(steps) for _ in range(rounds - start.round)]


class Noting(NearCarrier):
    """Keeps the questions."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.asked = []

    def push(self, questions):
        self.asked.extend(questions)
        super().push(questions)


# -- once more --------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
    """A node that has done its work in a round of SCAFFOLD and was judged, the questions, and what works are done."""
    made, fleet, done = fleet_of("scaffold", tmp_path)
    fleet.carrier = fleet.attendance.carrier = fleet._mail.carrier = carrier = Noting(fleet.carrier.nodes)
    (step,) = first_rounds(made, fleet, 1)
    payload, slot = made.algorithm.serve(step.state, fleet.clients)
    fleet.score(payload, fleet.clients, slot=slot)
    mine = [question for question in carrier.asked if question.node == "node-0"]
    return carrier.nodes["node-0"], mine, done


def plain(question):
    return json.loads(json.dumps(question.header))


def test_a_question_that_comes_again_is_answered_without_work(asked):
    node, (train, score), done = asked
    before = len(done)
    told, sent = node.handle(plain(train), train.payload)
    again, resent = node.handle(plain(train) | {"deadline": 3.0}, train.payload)
    assert len(done) == before
    assert sent == resent
    assert {**told, "seconds": 0} == {**again, "seconds": 0}
    assert set(told["clients"].values()) == {"answered"}
    assert told["kept"] == train.header["clients"]
    assert node.handle(plain(score), score.payload)[1] == node.handle(plain(score), score.payload)[1]


@pytest.mark.parametrize("change", ["payload", "round", "memory"])
def test_another_question_is_worked_on(asked, change, tmp_path):
    node, (train, _), done = asked
    before, header, payload = len(done), plain(train), train.payload
    _, first = node.handle(header, payload)
    if change == "payload":
        tree = codec.from_bytes(payload)
        name = next(iter(tree["weights"].params)) if isinstance(tree, dict) else None
        weights = tree["weights"] if isinstance(tree, dict) else tree.weights
        weights.params[name or next(iter(weights.params))].add_(1.0)
        payload = codec.to_bytes(tree)
    elif change == "round":
        header["moment"]["round"] = 3
    else:
        for file in tmp_path.glob("node-0/*/*.*"):
            file.unlink()
    told, other = node.handle(header, payload)
    assert len(done) == before + len(header["clients"])
    assert set(told["clients"].values()) == {"answered"}
    assert (other == first) == (change == "memory")


def test_a_refused_answer_is_not_kept(asked):
    node, (train, _), _ = asked
    node._sent.clear()
    late, _ = node.handle(plain(train) | {"deadline": 0.0}, train.payload)
    assert set(late["clients"].values()) == {"refused: too late"}
    assert not node._sent
    again, _ = node.handle(plain(train), train.payload)
    assert set(again["clients"].values()) == {"answered"}


def test_an_answer_does_not_leave_again_if_its_owner_has_changed_what_answers_say(asked):
    """With the first one it would tell the difference of a bound, which no sum hides."""
    node, (train, _), done = asked
    node.handle(plain(train), train.payload)
    before = len(done)
    for rules, word in (
        (Policy(fewest=2), "answered"),
        (Policy(clip={"delta": 0.01}), "refused: the rules of its owner have changed since it answered this"),
    ):
        object.__setattr__(node, "policy", lambda rules=rules: rules)
        told, _ = node.handle(plain(train), train.payload)
        assert set(told["clients"].values()) == {word}
    assert len(done) == before


# -- its owner --------------------------------------------------------------------------------------------------------


def test_few_rows_are_not_judged(tmp_path):
    made, fleet, _ = fleet_of("fedavg", tmp_path)
    fleet.begin(Moment(0, 6))
    weights = made.algorithm.init(None, Rng(0)).weights
    whole = fleet.score(weights, fleet.clients)

    careful = Policy(rows_at_least=int(whole.rows[5]) + 1)
    node = fleet.carrier.nodes["node-1"]
    fleet.carrier.nodes["node-1"] = replace(node, policy=lambda: careful)
    some = fleet.score(weights, fleet.clients)
    kept = (fleet.clients < 4) | (whole.rows >= careful.rows_at_least)
    assert not kept[5]
    assert same(some.rows, whole.rows * kept)
    assert same(some.correct, whole.correct * kept)


def test_a_sum_of_fewer_than_an_owner_wants_is_not_counted(tmp_path):
    """Of four clients in two slots, with three and one, the one is left out, in words."""
    made, fleet, _ = fleet_of("fedavg", tmp_path, policy=lambda: Policy(fewest=3))
    fleet.begin(Moment(0, 6))
    weights = made.algorithm.init(None, Rng(0)).weights
    slot = torch.tensor([0, 0, 0, 1])
    reply = fleet.ask("train", fleet.clients[:4], [weights, weights], slot=slot)
    assert reply.clients.tolist() == [0, 1, 2]
    assert reply.refused.tolist() == [3]
    words = told(fleet)[-1]["asks"][0]["nodes"]["node-0"]["clients"]
    assert words["3"] == "refused: its owner wants 3 clients in a sum, and fewer answered"
    assert words["0"] == "answered"


def test_a_cluster_that_clients_choose_is_a_sum_too():
    """Of five clients three chose the first cluster and two the second; what weighs nothing is in no sum."""
    ask = Ask("train", "train", Moment(0, 6), torch.arange(5))

    def heard(first: float, second: float, fewest: int = 3) -> Received:
        parts = {k: Weighted(torch.ones(2), weight) for k, weight in enumerate((first, second))}
        total = {"models": Slotted(parts, 2), "loss": Weighted(1.0, 4.0)}
        return Received(ANSWERED, {"total": total}, False, ask, 0.0, fewest)

    came = {**{client: heard(20.0, 0.0) for client in (0, 1, 4)}, 2: heard(0.0, 20.0), 3: heard(0.0, 20.0, fewest=2)}
    assert keep_wanted(set(came), ask, came) == {0, 1, 4}
    came[2] = heard(0.0, 20.0, fewest=1)
    assert keep_wanted(set(came), ask, came) == {0, 1, 2, 3, 4}


def header(**changes):
    asked = {"kind": "score", "question": "adapt", "clients": [4], "members": 1, "reveal": [], "part": "test"}
    asked |= {"purpose": "adapt", "grouping": "client"}
    return {**asked, "moment": {"round": 2, "rounds": 6, "seconds": 0.0}, "other": "", "personal": True, **changes}


def test_a_client_is_judged_with_few_models_in_a_round(tmp_path):
    """Also after the node was started again; the same model is judged as often as it is asked."""
    owner = Owner(None, tmp_path / "judged.jsonl", rounds=6)
    for model in "abc":
        assert owner.refuses(header(), model) is None
    for each in (owner, Owner(None, tmp_path / "judged.jsonl", rounds=6)):
        assert each.refuses(header(), "a") is None
        assert each.refuses(header(), "d") == f"it was judged with {MODELS} models in round 2, and with no more"
        assert each.refuses(header(clients=[5, 4]), "d") is not None
    assert owner.refuses(header(clients=[5]), "d") is None
    assert owner.refuses(header(part="val"), "d") is None
    assert owner.refuses(header(moment={"round": 3, "rounds": 6, "seconds": 0.0}), "d") is None
    assert owner.refuses(header(kind="ask", question="train", part="train"), "d") is None
    # A sum of scores is of the same rows.
    assert owner.refuses(header(kind="ask", question="score test client"), "a") is None
    assert owner.refuses(header(kind="ask", question="score test client"), "d") is not None
    assert owner.refuses(header(kind="ask", question="score test batch other"), "d") is None


@pytest.mark.parametrize("changes", [
    [{"slot": {"4": slot}} for slot in (3, 0, 7, 9)],
    [{"counted": {"4": version}} for version in ([0, 0], [1, 0], [1, 1], [1, 2])],
    [{"purpose": purpose} for purpose in "pqrs"],  # by which it draws as it adapts
    [{"grouping": grouping} for grouping in ("client", "batch", "sample", "none")],
    [{"kind": "ask", "question": f"score test {grouping}"} for grouping in ("client", "batch", "sample", "none")],
], ids=["slot", "counted", "purpose", "grouping", "grouping of a sum"])  # fmt: skip
def test_what_predictions_follow_from_beside_the_payload_makes_models_of_their_own(changes, tmp_path):
    """Else one payload with many models, or many versions of what a client keeps, would count as one."""
    owner = Owner(None, tmp_path / "judged.jsonl", rounds=6)
    headers = [header(**each) for each in changes]
    assert [owner.refuses(each, "a") for each in headers[:MODELS]] == [None] * MODELS
    for each in (owner, Owner(None, tmp_path / "judged.jsonl", rounds=6)):
        assert each.refuses(headers[0], "a") is None
        assert each.refuses(headers[MODELS], "a") is not None
        assert each.refuses(header(), "b") is not None


def test_a_question_that_a_method_does_not_have_is_written_nowhere(asked):
    node, (train, _), done = asked
    before, said = len(done), []
    asked_for = plain(train) | {"question": "x\x1b]0;owned\x07\n12:00:00 masks: all is well"}
    told, _ = replace(node, log=said.append).handle(asked_for, train.payload)
    assert set(told["clients"].values()) == {"refused: its method has no such question"}
    assert (len(done), said) == (before, [])


def test_uses_that_a_method_does_not_have_fill_no_disk(asked, tmp_path):
    """They are refused before the owner's record of judgments has a line of them."""
    node, (_, score), _ = asked
    file = tmp_path / "judged.jsonl"
    node = replace(node, refuses=Owner(None, file, rounds=6).refuses)
    told, _ = node.handle(plain(score) | {"other": "made up"}, score.payload)
    assert set(told["clients"].values()) == {"refused: it is no evaluation of its study"}
    assert not file.exists()
    told, _ = node.handle(plain(score), score.payload)
    assert set(told["clients"].values()) == {"answered"}
    assert file.exists()


@pytest.mark.parametrize(
    "damage", [b"\xff\n", b"[" * 5000 + b"\n", b"7\n", b"null\n"], ids=["bytes", "deep", "number", "nothing"]
)
def test_a_node_whose_record_of_evaluations_is_damaged_is_not_judged(damage, tmp_path):
    """Models that are forgotten would not count."""
    (tmp_path / "judged.jsonl").write_bytes(damage)
    said = []
    owner = Owner(None, tmp_path / "judged.jsonl", 6, said.append)
    assert owner.refuses(header(), "a") == "its own record of evaluations cannot be read now"
    assert "judged.jsonl: " in said[0]
    assert "damaged" in said[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"part": "train"}, "it is judged on test and validation rows alone, with what it keeps"),
        ({"personal": False}, "it is judged on test and validation rows alone, with what it keeps"),
        ({"moment": {"round": 6, "rounds": 9, "seconds": 0.0}}, "it is judged in rounds 0 to 5, and this is round 6"),
        ({"moment": {"round": -1, "rounds": 9, "seconds": 0.0}}, "it is judged in rounds 0 to 5, and this is round -1"),
    ],
)
def test_what_no_study_asks_is_refused(changes, why, tmp_path):
    assert Owner(None, tmp_path / "judged.jsonl", rounds=6).refuses(header(**changes), "a") == why
    assert not (tmp_path / "judged.jsonl").exists()


def test_rules_may_be_edited_while_a_node_runs(tmp_path):
    file, said = tmp_path / "policy.toml", []
    owner = Owner(file, tmp_path / "judged.jsonl", 6, said.append)
    file.write_text("")
    assert owner.refuses(header(), "a") is None
    file.write_text('questions = ["train"]\nfewest = 5\nrows_at_least = 7\n')
    assert owner.refuses(header(), "a") == "its owner does not allow the question 'score'; allowed: train"
    assert (owner.policy().fewest, owner.policy().rows_at_least) == (5, 7)
    file.write_text("fewest = ")
    for _ in range(2):
        assert owner.refuses(header(), "a") == "its owner's rules cannot be read now"
    (line,) = said
    assert "policy.toml" in line
    file.unlink()
    assert owner.refuses(header(), "a") == "its owner's rules cannot be read now"


# -- what it keeps ----------------------------------------------------------------------------------------------------


def test_files_that_no_checkpoint_counts_are_bounded(tmp_path):
    memory = NodeMemory(tmp_path, {0: (1, 0)})
    for number in range(3 * node_memory.MOST):
        memory.write(0, (number, 0), {"round": number}, settled=None)
    left = sorted(int(file.name.partition(".")[0]) for file in (tmp_path / "0").iterdir())
    assert left[0] == 1  # what counts is not removed
    assert len(left) <= node_memory.MOST + 2
    assert left[-1] == 3 * node_memory.MOST - 1
    assert memory.read(0, (99, 0)) == {"round": 1}


def test_rows_older_than_the_settled_version_are_removed_and_files_of_others_are_left_alone(tmp_path):
    memory, others = NodeMemory(tmp_path, {0: (2, 0)}), {"notes.txt", "0.0.bak", "x.0"}
    (tmp_path / "0").mkdir()
    for name in others:
        (tmp_path / "0" / name).write_text("mine")
    for version in ((0, 0), (1, 0), (1, 1), (2, 0)):
        memory.write(0, version, {}, settled=None)
    memory.write(0, (3, 0), {}, settled=(1, 1))
    assert {file.name for file in (tmp_path / "0").iterdir()} == others | {"1.1", "2.0", "3.0"}


def test_a_full_disk_is_said_and_nothing_is_lost(asked, monkeypatch, tmp_path):
    node, (train, _), _ = asked
    kept = {file: file.read_bytes() for file in tmp_path.glob("node-0/*/*.*")}
    assert kept
    header, said = plain(train), []
    header |= {"version": [1, 0], "counted": {client: [0, 0] for client in header["counted"]}}
    header["moment"]["round"] = 1

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(node_memory.os, "fsync", full)
        answer, _ = replace(node, log=said.append).handle(header, train.payload)
    why = "the node cannot keep its memory; see whether its disk is full"
    assert set(answer["clients"].values()) == {f"refused: {why}"}
    assert answer["kept"] == []
    assert f"round 2, 'train' of client 0: {why} ([Errno 28] No space left on device)" in said
    assert all(file.read_bytes() == content for file, content in kept.items())
    answer, _ = node.handle(header, train.payload)
    assert set(answer["clients"].values()) == {"answered"}


def test_damaged_memory_is_said(tmp_path):
    memory = NodeMemory(tmp_path, {0: (3, 0)})
    (tmp_path / "0").mkdir()
    for held in (b"", b"nonsense", codec.to_bytes({"rows": {}})):
        memory.file(0, (3, 0)).write_bytes(held)
        with pytest.raises(MemoryLost, match=r"^its memory of round 3 is damaged at the node; restore its folder$"):
            memory.read(0, (4, 0))


# -- use --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "ifca", "pfedem shares", "fedem", "scaffold", "ditto"])
def test_a_node_predicts_as_it_was_judged(name, tmp_path):
    """Its own rows with its own model: as many hits as the server was told of; also when its clients went on.

    The same holds for the model that was best, which is that of an earlier evaluation.
    """
    made, fleet, _ = fleet_of(name, tmp_path)
    folders = {key: JudgedModels(tmp_path / f"judged-{key}") for key in fleet.roster}
    fleet.carrier.nodes = {key: replace(node, judged=folders[key]) for key, node in fleet.carrier.nodes.items()}
    step, hits = first_rounds(made, fleet, 2)[-1], {}
    hits["best"] = judged_in(made, fleet, step)
    fleet.memory.settle((2, 0))
    fleet.best = 2
    step = first_rounds(made, fleet, 4, Start(step.state, 2, step.seconds))[-1]
    hits["last"] = judged_in(made, fleet, step)
    fleet.memory.settle((4, 0))
    first_rounds(made, fleet, 6, Start(step.state, 4, step.seconds))
    for model, rounds in (("best", 2), ("last", 4)):
        count = 0
        for key, node in fleet.carrier.nodes.items():
            judged = folders[key].read(model)
            assert judged.rounds == rounds
            for client in fleet.roster[key]:
                rows, _ = made.population.pool(torch.tensor([client]), Moment(rounds - 1, 4), "test")
                if not len(rows):
                    continue
                received, memory = node.last_evaluation(judged, client)
                together = torch.zeros(len(rows), dtype=torch.int64)
                predicted = node.algorithm.predict(received, [memory], rows.x, together)
                count += int((predicted.told.argmax(1) == rows.y).sum())
        assert count == hits[model], model


def judged_in(made, fleet, step):
    """The hits of all clients with the state of a round, which is judged."""
    payload, slot = made.algorithm.serve(step.state, fleet.clients)
    return int(fleet.score(payload, fleet.clients, slot=slot).correct.sum())


def evaluation(folder, rounds):
    """An evaluation of client 0 after so many rounds, with what it kept then."""
    memory = NodeMemory(folder / "memory", {0: (rounds, 0)})
    memory.write(0, (rounds, 0), {"rounds": rounds}, settled=(rounds, 0))
    return Judged({"moment": {"round": rounds - 1}, "counted": {"0": [rounds, 0]}}, b"%d" % rounds, memory)


def there(models):
    return sorted(int(path.name.partition(".")[2]) for path in models.folder.iterdir() if path.is_dir())


def test_a_node_keeps_the_last_evaluation_and_the_best_that_the_server_tells_of(tmp_path):
    """The server says which was best after it, in its next question."""
    models, found = JudgedModels(tmp_path / "judged"), []
    with pytest.raises(FedtideError, match="not there yet; a model comes with the first evaluation"):
        models.read("best")
    for rounds, best in ((2, 2), (4, 4), (6, 4), (8, 4), (10, 10)):
        models.write(evaluation(tmp_path, rounds))
        found.append(there(models))
        models.note_best(best)
        judged = models.read("best")
        assert (judged.payload, judged.memory.read(0, (99, 0))) == (b"%d" % best, {"rounds": best})
        assert models.read().rounds == models.read("last").rounds == models.read(str(rounds)).rounds == rounds
    assert found == [[2], [2, 4], [4, 6], [4, 8], [4, 10]]
    with pytest.raises(FedtideError, match="--model: found '6', allowed: 4, 10, last, best"):
        models.read("6")


def test_a_best_model_that_a_node_has_not_is_named(tmp_path):
    models = JudgedModels(tmp_path / "judged")
    models.write(evaluation(tmp_path, 4))
    with pytest.raises(FedtideError, match="but the server keeps no models, or has not said which is best; allowed: 4"):
        models.read("best")
    models.note_best(2)
    with pytest.raises(FedtideError, match="but the best is that after 2 rounds, with which this node was not eva"):
        models.read("best")


def test_a_round_that_is_played_again_takes_the_place_of_the_one_before(tmp_path):
    """A study that begins anew, without a node that left, has nothing of the one before."""
    models = JudgedModels(tmp_path / "judged")
    for rounds, payload in ((2, b"first"), (4, b"first"), (4, b"again"), (2, b"anew")):
        models.write(replace(evaluation(tmp_path, rounds), payload=payload))
        models.note_best(4)
        assert models.read().payload == payload
    assert there(models) == [2]


@pytest.mark.parametrize("call", range(12))
def test_a_kill_while_an_evaluation_is_kept_loses_no_other(tmp_path, monkeypatch, call):
    """Whatever file is not written, removed or renamed any more, the best and the last are there."""
    models, left = JudgedModels(tmp_path / "judged"), [call]
    for rounds in (2, 4):
        models.write(evaluation(tmp_path, rounds))
        models.note_best(2)
    last = evaluation(tmp_path, 6)

    def killed(function):
        def maybe(*words, **named):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return function(*words, **named)

        return maybe

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        for name in ("mkdir", "link", "unlink", "rmdir", "rename"):
            patch.setattr(os, name, killed(getattr(os, name)))
        models.write(last)
    assert models.read("best").payload == b"2"
    assert models.read().payload in (b"4", b"6")
    models.write(last)
    assert there(models) == [2, 6]


# -- the server's notes -----------------------------------------------------------------------------------------------


def test_what_made_up_clients_keep_is_there_after_a_restart(tmp_path):
    """A question that only clients with memory answer is known to a server that never put the one before it."""
    made, fleet, _ = fleet_of("flexcfl drifts", tmp_path)
    whole = first_rounds(made, fleet, 4)
    again, other, _ = fleet_of("flexcfl drifts", tmp_path / "other")
    first = first_rounds(again, other, 2)
    other.memory.save(tmp_path / "memory", (2, 0))
    _, restarted, _ = fleet_of("flexcfl drifts", tmp_path / "other")
    restarted.memory.restore(tmp_path / "memory", (2, 0))
    rest = first_rounds(again, restarted, 4, Start(first[-1].state, 2, first[-1].seconds))
    assert restarted.vectors.schemas.memory is not None
    assert same(whole[-1].state, rest[-1].state)
    assert same(memory_at(fleet, 0), memory_at(restarted, 0))
