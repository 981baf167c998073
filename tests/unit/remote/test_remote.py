"""Real clients as a fleet: what is lost, late, wrong or away, and the record from which it is played again."""

import math
import random
import shutil
from dataclasses import replace

import pytest
import torch

from fedtide.core import checkpoint
from fedtide.core.base import Moment, Slotted, Weighted
from fedtide.core.errors import FedtideError
from fedtide.core.loop import Start, begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.record import read_lines
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves, same
from fedtide.evaluate.judge import Judge, views
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.machine_facts import RecentLog
from fedtide.remote.offline import NearCarrier, memory_at, near_fleet, replayed
from fedtide.remote.schedule import Present, RoundClock, WallClock
from fedtide.runs.build import host_of
from helpers.carriers import Time, host, lossy, lying, resealed, told, words
from helpers.studies import SCAFFOLD, A, lines_of, record_of, run_of, study

ROUNDS = 6


def rounds(made, fleet, start=None, until=ROUNDS):
    start = start or begin(made.algorithm, fleet, seed=0, rounds=ROUNDS)
    steps = play(made.algorithm, fleet, start, seed=0, rounds=ROUNDS)
    return [next(steps) for _ in range(until - start.round)]


def weights(made):
    return made.algorithm.init(None, Rng(0)).weights


def states(steps):
    return [step.state for step in steps]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("scaffold", {}),
        ("fielding", {}),
        ("pfedem shares", {}),
        ("fedbuff", {"buffer": 2, "cohort": 4}),
        ("fedavg oort", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_lost_or_late_is_played_again_in_simulation_with_the_same_bits(name, options, seed, tmp_path):
    made, time = host(name, options), Time()
    fleet = lossy(made, tmp_path, seed, patience=1.0, clock=RoundClock(monotonic=time, sleep=time.sleep))
    deployed = rounds(made, fleet)
    lines = told(fleet)
    assert {"late", "at work", "lost"} & words(lines)
    again = replace(made, memory=MemoryStore(None))
    simulated = rounds(again, replayed(again, lines))
    assert same(states(deployed), states(simulated))
    assert [step.seconds for step in deployed] == [step.seconds for step in simulated]
    for client in fleet.clients.tolist():
        assert same(memory_at(fleet, client), again.memory.read(client, (ROUNDS, 0)))


@pytest.mark.parametrize(("name", "options"), [("scaffold", {}), ("fedbuff", {"buffer": 1, "cohort": 4})])
def test_a_server_that_goes_back_to_its_checkpoint_ends_with_the_same_bits(name, options, tmp_path):
    """What it asked since is asked again; nodes have kept what the checkpoint counts, and who was at work is again."""
    made = host(name, options)
    whole = rounds(made, near_fleet(made, 3, tmp_path / "whole"))
    fleet = near_fleet(made, 3, tmp_path / "nodes")
    first = rounds(made, fleet, until=3)
    last = first[-1]
    fleet.memory.save(tmp_path / "memory", (3, 0))
    fleet.memory.settle((3, 0))
    rounds(made, fleet, Start(last.state, 3, last.seconds), until=5)  # these are lost with the server
    other = near_fleet(made, 3, tmp_path / "nodes")
    other.memory.restore(tmp_path / "memory", (3, 0))
    rest = rounds(made, other, Start(last.state, 3, last.seconds))
    assert same(states([*first, *rest]), states(whole))


def test_a_folder_that_is_lost_is_said_and_the_others_go_on(tmp_path):
    made = host("scaffold", {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    fleet = near_fleet(made, 4, tmp_path)
    first = rounds(made, fleet, until=2)
    shutil.rmtree(tmp_path / "node-1")
    fleet.record_lines()
    step = rounds(made, fleet, Start(first[-1].state, 2, 2.0), until=3)[0]
    (line,) = told(fleet)
    lost = line["asks"][0]["nodes"]["node-1"]["clients"]
    why = "refused: its memory of round 1 is gone from the node; restore its folder"
    assert lost == {"2": why, "3": why}
    assert fleet.queries[0].refused.tolist() == [2, 3]
    assert len(fleet.queries[0].answered) == 6
    assert not same(step.state, first[-1].state)


def test_clients_that_answer_where_too_few_do_are_not_late(tmp_path):
    made = host("scaffold", {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    fleet = near_fleet(made, 4, tmp_path, fewest=8)
    first = rounds(made, fleet, until=2)
    shutil.rmtree(tmp_path / "node-1")
    fleet.record_lines()
    step = rounds(made, fleet, Start(first[-1].state, 2, 2.0), until=3)[0]
    (line,) = told(fleet)
    said = line["asks"][0]["nodes"]
    assert said["node-0"]["clients"] == dict.fromkeys("01", "lost: too few others answered")
    assert all(word.startswith("refused: its memory") for word in said["node-1"]["clients"].values())
    assert same(step.state, first[-1].state)


def test_what_a_node_said_before_its_key_was_removed_counts_no_more(tmp_path):
    class Removing(NearCarrier):
        def removed(self):
            return frozenset(() if self._questions else {"node-1"})  # once the last of them has answered

    made = host("scaffold", {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    fleet = near_fleet(made, 4, tmp_path, Removing)
    rounds(made, fleet, until=1)
    line = told(fleet)[-1]
    assert line["asks"][0]["nodes"]["node-1"]["clients"] == dict.fromkeys("23", "lost: its key was removed")
    assert fleet.counted(2) is None
    assert len(fleet.queries[0].answered) == 6


@pytest.mark.parametrize("name", ["new", "0.0"])
def test_a_disk_that_is_full_is_said_and_nothing_is_counted(name, tmp_path):
    made = host("scaffold", {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    fleet = near_fleet(made, 4, tmp_path)
    (tmp_path / "node-1/2" / name / "in the way").mkdir(parents=True)
    rounds(made, fleet, until=1)
    (line, *_) = told(fleet)[-1:]
    why = "refused: the node cannot keep its memory; see whether its disk is full"
    assert line["asks"][0]["nodes"]["node-1"]["clients"] == {"2": why, "3": "answered"}
    assert fleet.counted(2) is None
    assert fleet.counted(3) == (0, 0)


LIES = {
    "garbage": lambda r: replace(r, payload=b"garbage"),
    "empty": lambda r: replace(r, payload=b""),
    "400 MB": lambda r: replace(r, payload=bytes(2**20)),
    "no header": lambda r: replace(r, header={"clients": [1]}),
    "other clients": lambda r: resealed(r, lambda tree: {client + 90: tree[client] for client in tree}),
    "NaN": lambda r: resealed(r, lambda tree: map_leaves(lambda x: x * torch.nan if hasattr(x, "shape") else x, tree)),
    "shape": lambda r: resealed(r, lambda tree: map_leaves(lambda x: x.sum() if hasattr(x, "shape") else x, tree)),
    "weight": lambda r: resealed(r, lambda tree: heavier(tree, 1e30)),
    "negative": lambda r: resealed(r, lambda tree: heavier(tree, -1.0)),
    "more rows": lambda r: resealed(
        r, lambda tree: {k: {**answer, "rows": {"secret": torch.ones(1)}} for k, answer in tree.items()}
    ),
    "slots": lambda r: resealed(
        r, lambda tree: {k: {**a, "total": Slotted({0: Weighted(1.0)}, 10**9)} for k, a in tree.items()}
    ),
}


def heavier(tree, weight):
    stop = lambda node: isinstance(node, Weighted)  # noqa: E731
    return map_leaves(lambda leaf: replace(leaf, weight=weight) if stop(leaf) else leaf, tree, stop=stop)


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_cannot_be_summed_is_refused_in_words_and_the_others_count(lie, tmp_path):
    made = host("fedavg", {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    fleet = near_fleet(made, 4, tmp_path, lying(lambda header, r: LIES[lie](r), "node-2"))
    (step,) = rounds(made, fleet, until=1)
    (query,) = fleet.queries
    assert query.refused.tolist() == [4, 5]
    assert query.answered.tolist() == [0, 1, 2, 3, 6, 7]
    lines = told(fleet)
    said = lines[-1]["asks"][0]["nodes"]["node-2"]["clients"]
    assert all(word.startswith("refused: ") and "\n" not in word and len(word) < 400 for word in said.values())
    again = replace(made, memory=MemoryStore(None))
    assert same(states(rounds(again, replayed(again, lines), until=1)), [step.state])


def test_a_node_may_refuse(tmp_path):
    made = host("fielding")

    def refuses(header, model):
        return "its owner reveals nothing" if header.get("reveal") else None

    fleet = near_fleet(made, 4, tmp_path, with_node(refuses=refuses))
    rounds(made, fleet, until=1)
    (line, *_) = told(fleet)
    (ask, *_) = line["asks"]
    assert set(ask["nodes"]["node-0"]["clients"].values()) == {"refused: its owner reveals nothing"}


def with_node(**changes):
    """The carrier of which one node is another."""
    return lambda nodes: NearCarrier({**nodes, "node-0": replace(nodes["node-0"], **changes)})


def test_questions_of_another_run_or_protocol_are_refused(tmp_path):
    made = host("fedavg")
    fleet = near_fleet(made, 2, tmp_path, run="a")
    rounds(made, fleet, until=1)
    (word,) = {word for node in fleet.record.asks[0]["nodes"].values() for word in node["clients"].values()}
    assert word == "refused: it takes part in run , and the question is of run a"


@pytest.mark.parametrize("kind", [ValueError, FedtideError])
def test_an_error_of_a_node_says_nothing_of_its_data(kind, tmp_path):
    made, said = host("fedavg"), []
    log = RecentLog(said.append)

    def broken(*given):
        raise kind("patient Bloggs is ill")

    other = replace(made.algorithm, works={"train": broken})
    fleet = near_fleet(made, 2, tmp_path, with_node(algorithm=other, log=log))
    rounds(made, fleet, until=1)
    assert "Bloggs" not in str(fleet.record.asks)
    assert f"{kind.__name__} at the node, whose log says more" in str(fleet.record.asks)
    assert "patient Bloggs is ill" in said[0]
    assert not log.lines


def test_the_first_answers_count_and_the_rest_are_late(tmp_path):
    made = host("fedavg", {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    fleet = near_fleet(made, 8, tmp_path)
    fleet.begin(Moment(0, 1))
    reply = fleet.ask("train", fleet.clients, weights(made), first=3)
    assert reply.clients.tolist() == [0, 1, 2]
    assert not len(reply.silent)
    assert words(told(fleet)) == {"answered", "late"}
    assert {last.word for last in fleet.heard.values()} == {"answered", "late"}


def test_a_roster_has_each_client_once(tmp_path):
    with pytest.raises(FedtideError, match=r"^roster: found "):
        RemoteFleet(NearCarrier({}), {"berlin": [0, 1], "lyon": [1]}, Present(0))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ifca"])
def test_a_node_that_is_admitted_later_has_clients_from_the_next_round_on(name, tmp_path):
    """And so it has when the deployment is played again."""
    made = host(name, {"cohort": {"kind": "everyone"}})
    fleet = near_fleet(made, 4, tmp_path, who=Present(0))
    whole = fleet.roster
    fleet.attendance.roster = dict(list(whole.items())[:3])
    steps = play(made.algorithm, fleet, begin(made.algorithm, fleet, seed=0, rounds=ROUNDS), seed=0, rounds=ROUNDS)
    deployed = [next(steps) for _ in range(2)]
    assert len(fleet.queries[-1].answered) == 6
    fleet.attendance.roster = whole
    deployed += steps
    assert len(fleet.queries[-1].answered) == 8
    again = replace(made, memory=MemoryStore(None))
    assert same(states(rounds(again, replayed(again, told(fleet)))), states(deployed))


def test_present_clients_are_drawn_from_seed_and_round():
    present, moment = torch.tensor([1, 4, 6, 7]), Moment(3, 10)
    draws = [Present(0).arrivals(2, present, moment).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    assert set(draws[0]) < {1, 4, 6, 7}
    assert Present(0).arrivals(9, present, moment).tolist() == [1, 4, 6, 7]


# -- judging and records ----------------------------------------------------------------------------------------------


def remote(run, home, **options):
    made = host_of(run.experiment, run.method, run.seed)
    fleet = near_fleet(made, 3, home, **options)
    return Judge(made.algorithm, fleet, views(made.population, named=("train_clients", "val")))


def test_a_run_on_nodes_is_recorded_stopped_and_resumed_as_one_in_simulation(tmp_path):
    settings = study(SCAFFOLD, eval_every=2, data={"held_out_clients": {"clients": 0}})
    simulated, whole, halves = (run_of(settings, tmp_path / name) for name in ("simulated", "whole", "halves"))
    list(simulated.play())
    list(whole.play(judge_of=lambda run: remote(run, tmp_path / "one")))
    list(halves.play(stop=lambda: True, judge_of=lambda run: remote(run, tmp_path / "two")))
    list(halves.play(judge_of=lambda run: remote(run, tmp_path / "two")))
    assert record_of(whole.folder) == record_of(halves.folder)
    asks = [(folder / "asks.jsonl").read_text().count("\n") for folder in (whole.folder, halves.folder)]
    assert asks == [7, 7]  # with that of the beginning
    for known, unknown in zip(lines_of(simulated.folder), lines_of(whole.folder), strict=True):
        for key in unknown.keys() - {"participants", "scores", "down", "up", "losses"}:
            assert unknown[key] == known[key], key
        for view, scores in unknown.get("scores", {}).items():
            assert scores["accuracy"] == known["scores"][view]["accuracy"]


def test_a_run_whose_answers_are_all_refused_ends_after_three_rounds_and_is_saved(tmp_path):
    all_of_them = {**A, "cohort": 8}
    run = run_of(study(all_of_them, rounds=9, checkpoint_every=1, data={"held_out_clients": {"clients": 0}}), tmp_path)
    for rounds_done in (3, 6, 9):  # the same command goes on, and ends again
        with pytest.raises(FedtideError, match=r"no answer has counted for 3 rounds: refused: .*weight.* \(24\)"):
            list(run.play(judge_of=lambda run: remote(run, tmp_path / "nodes", heaviest=1e-9)))
        assert len(lines_of(run.folder)) == rounds_done
    with pytest.raises(FedtideError, match="no answer has counted for 9 rounds: refused"):  # no round is left
        list(run.play(judge_of=lambda run: remote(run, tmp_path / "nodes", heaviest=1e-9)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kills_of_the_server_among_losses_leave_a_run_that_is_played_again_with_the_same_bits(seed, tmp_path):
    draw = random.Random(seed)
    settings = study(SCAFFOLD, rounds=8, eval_every=4, checkpoint_every=2, data={"held_out_clients": {"clients": 0}})
    run, again = (run_of(settings, tmp_path / name) for name in ("deployed", "again"))

    def lossy_judge(run):
        made = host_of(run.experiment, run.method, run.seed)
        time = Time()
        clock = RoundClock(monotonic=time, sleep=time.sleep)
        fleet = lossy(made, tmp_path / "nodes", draw.randrange(1000), patience=1.0, clock=clock)
        return Judge(made.algorithm, fleet, [])

    def replaying(run_again):
        made = host_of(run.experiment, run.method, run.seed)
        lines = read_lines(run.folder, "asks.jsonl")
        return Judge(made.algorithm, replayed(made, lines), [])

    for _ in range(4):
        play = run.play(judge_of=lossy_judge)
        for _ in range(draw.randrange(1, 4)):
            next(play, None)
        play.close()  # no checkpoint is written
    list(run.play(judge_of=lossy_judge))
    list(again.play(judge_of=replaying))
    ours, theirs = (checkpoint.file_of(each.folder).read_bytes() for each in (run, again))
    assert ours == theirs
    for known, unknown in zip(lines_of(again.folder), lines_of(run.folder), strict=True):
        for key in unknown.keys() - {"participants", "down", "up", "losses", "refused"}:
            assert unknown[key] == known[key], key


def test_a_client_that_is_not_heard_of_counts_as_having_no_rows(tmp_path):
    made = host("fedavg")
    fleet = near_fleet(made, 4, tmp_path)
    fleet.begin(Moment(0, 1))
    whole = fleet.score(weights(made), fleet.clients)
    fleet = near_fleet(made, 4, tmp_path, lying(lambda header, r: replace(r, payload=b"?"), "node-1"))
    fleet.begin(Moment(0, 1))
    some = fleet.score(weights(made), fleet.clients)
    assert some.clients.tolist() == whole.clients.tolist()
    assert some.rows[[2, 3]].tolist() == [0.0, 0.0]
    others = torch.tensor([0, 1, 4, 5, 6, 7])
    assert same(some.pick(others), whole.pick(others))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {**s, "correct": s["rows"] + 1},
        lambda s: {**s, "rows": -s["rows"]},
        lambda s: {**s, "rows": s["rows"] * 1e300},
        lambda s: {**s, "rows": s["rows"] + 0.5},
        lambda s: {**s, "loss": s["loss"][:1]},
        lambda s: {**s, "clients": s["clients"] + 1},
        lambda s: {**s, "others": {"mine": 3}},
        lambda s: {**s, "others": {1: s["rows"]}},
        lambda s: {**s, "rows": "many", "others": {"rows": s["rows"]}},
        lambda s: {**s, "rows": None},
        lambda s: {**s, "rows": s["rows"].float()},
        lambda s: {**s, "clients": s["clients"].double()},
        lambda s: {**s, "choice": s["rows"]},
        lambda s: {**s, "choice": s["rows"][:, None] * torch.nan},
        lambda s: {**s, "weights": -s["rows"][:, None]},
        lambda s: {**s, "choice": s["rows"].new_empty(len(s["rows"]), 0)},
        lambda s: {**s, "choice": s["rows"].new_zeros(len(s["rows"]), 257)},
        lambda s: {**s, "others": {"mine": s["rows"] + 1}},
        lambda s: {**s, "others": {"mine": s["rows"] * math.nan}},
        lambda s: {**s, "others": {"mine\x1b[2J": s["rows"]}},
        lambda s: {**s, "others": {"mi\nne": s["rows"]}},
        lambda s: {**s, "others": {"m" * 1000: s["rows"]}},
        lambda s: {**s, "more": None},
        lambda s: [s],
    ],
)
def test_scores_that_cannot_be_are_none(change, tmp_path):
    made = host("fedavg")
    fleet = near_fleet(made, 4, tmp_path, lying(lambda header, r: resealed(r, change), "node-1"))
    fleet.begin(Moment(0, 1))
    assert fleet.score(weights(made), fleet.clients).rows[[2, 3]].tolist() == [0.0, 0.0]


# -- time -------------------------------------------------------------------------------------------------------------

NOON = 1_792_663_200.0  # 2026-10-22 12:00 in Berlin, three days before clocks are set back


def wall(time, **options):
    return WallClock(NOON, "Europe/Berlin", now=time, monotonic=time, sleep=time.sleep, **options)


def test_rounds_begin_at_multiples_of_the_hour(tmp_path):
    made, time = host("fedavg"), Time(NOON + 100)
    fleet = near_fleet(made, 2, tmp_path, clock=wall(time, every=3600.0))
    began = []
    steps = play(made.algorithm, fleet, begin(made.algorithm, fleet, seed=0, rounds=5), seed=0, rounds=5)
    for step in steps:
        began.append(fleet.moment.seconds / 3600)
        if step.moment.round == 1:
            time.sleep(2.5 * 3600)  # a round that takes longer than the time between two
    assert began == [pytest.approx(12.03, abs=0.01), 13, pytest.approx(15.5, abs=0.01), 16, 17]
    # From the beginning of a round to the next: an hour at most, of round 0 as of the others.
    lines = told(fleet)
    ends = [(line["seconds"] + line["elapsed"]) / 3600 for line in lines]
    assert ends == [pytest.approx(12.03, abs=0.01), 13, 14, 16, 17, 18]
    again = replace(made, memory=MemoryStore(None))
    simulated = replayed(again, lines)
    assert [step.seconds / 3600 for step in rounds(again, simulated, until=5)] == ends[1:]


def test_a_server_that_was_away_begins_its_round_when_it_is_back(tmp_path):
    made, time = host("fedavg"), Time(NOON)
    fleet = near_fleet(made, 2, tmp_path, clock=wall(time))
    (step,) = rounds(made, fleet, until=1)
    time.sleep(7200)
    rounds(made, fleet, Start(step.state, 1, step.seconds), until=2)
    assert fleet.moment.seconds == 14 * 3600
    lines = told(fleet)
    again = replace(made, memory=MemoryStore(None))
    simulated = replayed(again, lines)
    rounds(again, simulated, Start(step.state, 1, step.seconds), until=2)
    assert simulated.moment.seconds == 14 * 3600


@pytest.mark.parametrize(("every", "waits"), [(None, 0.0), (600.0, 600.0)])
def test_a_clock_that_was_ahead_does_not_stop_the_server(every, waits):
    """A day ahead in one round and mended after it: the run's clock stands still, and the server waits a period."""
    time, ahead = Time(NOON), Moment(3, 9, 12 * 3600 + 86400.0)
    before, clock = time(), wall(time, every=every)
    assert clock.begin(ahead) == ahead.seconds
    assert time() - before == waits
    assert clock.elapsed(ahead) == 0.0
    time.sleep(86400.0)
    assert clock.begin(ahead) == ahead.seconds + waits


def test_no_round_begins_before_enough_clients_are_there(tmp_path):
    """It waits for longer than answers are waited for, and goes on when the other node comes."""
    made, time = host("fedavg"), Time()
    clock = RoundClock(monotonic=time, sleep=time.sleep)
    told = []

    class Late(NearCarrier):
        def present(self):
            return frozenset(self.nodes) if time() >= 3600 else frozenset({"node-0"})

    fleet = near_fleet(made, 2, tmp_path, Late, fewest=8, patience=60.0, clock=clock, waits=told.append)
    fleet.begin(Moment(0, 1))
    assert time() >= 3600
    assert fleet.attendance.present.tolist() == list(range(8))
    assert (told[0], told[-1]) == (4, 8)
