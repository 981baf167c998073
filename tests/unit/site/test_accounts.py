"""Sites with masked and private sums: both accounts of privacy, in this process."""

import itertools
import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.evaluate.judge import Judge, views
from fedtide.remote.node_memory import JudgedModels
from fedtide.runs.build import host_of
from fedtide.runs.privacy import plan_of
from fedtide.runs.runner import Run, run_rounds
from fedtide.site import accounts
from fedtide.site.accounts import OTHER, SEEDS, Budget, describe_spent, forget, ledger_for, private_wire
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.owner import Owner
from fedtide.site.seat import RECORD, Seat
from fedtide.site.site import Site, admit, invite
from fedtide.site.status import describe_status, describe_sums
from fedtide.site.tickets import Ticket
from fedtide.wire.accounting import Plan, epsilon_of
from fedtide.wire.clip import Adaptive, Clip, adapted
from fedtide.wire.keys import library
from fedtide.wire.ledger import LEDGER, LINES, RELEASED, Ledger, Line, eligible, read
from fedtide.wire.masks import Masker
from fedtide.wire.vector import Form, Leaf
from helpers.hospitals import NAMES
from helpers.near_sites import fleet_at, host_at, nodes_of, played, site_of, words
from helpers.toys import toy

PRIVACY = {"epsilon": 8.0, "clip": {"delta": 1.0, "loss": 5.0}, "noise": "banded", "distance": 2}


def private_site(folder: Path, secure: bool = True, **privacy: Any) -> Site:
    settings = {key: value for key, value in (PRIVACY | privacy).items() if value is not None}
    site = site_of(folder, wire={"secure": secure, "privacy": settings})
    site.record.mkdir(parents=True)
    return site


def own(folder: Path, name: str) -> list[Line]:
    return read(folder / name / "privacy" / f"{NAMES.index(name)}.jsonl")


def rules(name: str, text: str) -> Any:
    return lambda node: text if node == name else ""


# -- masked sums -------------------------------------------------------------------------------------------------------


def test_masked_sums_are_opened_and_stand_in_the_record_of_a_node(tmp_path):
    site = site_of(tmp_path, wire={"secure": True})
    assert words(played(site, nodes_of(tmp_path, site, lambda name: "secure = true\n"))) == {"answered"}
    lines = [json.loads(line) for line in (tmp_path / "berlin" / RECORD).read_text().splitlines() if line]
    assert [line["kind"] for line in lines] == ["keys", "ask", "unmask", "ask", "unmask"]
    assert [line["opened"] for line in lines if "opened" in line] == [{"0": [0, 1, 2]}] * 2
    assert set(json.loads((tmp_path / "berlin" / "peers.json").read_text())) == {"lyon", "oslo"}
    assert len(list(filter(None, (tmp_path / "berlin" / "opened").read_text().splitlines()))) == 2
    assert "sums: masked, opened for 3 clients or more" in list(describe_status(site, datetime.now(UTC)))


@pytest.mark.parametrize(
    ("secure", "policy", "reasons"),
    [
        (False, "secure = true", {"answered", "its owner allows masked sums alone, and its study does not mask them"}),
        (True, "peers = []", {"is not among the peers that the owner named"}),
        (True, "fewest = 4", {"it was not asked", "does not answer for a sum of 3; allowed: 4 clients or more"}),
    ],
)
def test_an_owner_who_wants_other_masks(tmp_path, secure, policy, reasons):
    site = site_of(tmp_path, **({"wire": {"secure": True}} if secure else {}))
    said = words(played(site, nodes_of(tmp_path, site, rules("oslo", f"{policy}\n")), rounds=1))
    assert all(any(reason in word for word in said) for reason in reasons)
    assert ("answered" in said) == ("answered" in reasons), "of two no masked sum is opened"


def test_a_node_that_would_know_all_but_one_of_every_sum(tmp_path):
    line = "--nodes: found '2 of 3 clients at lyon', allowed: 2 clients or more at other nodes"
    with pytest.raises(FedtideError, match=line):
        site_of(tmp_path, "berlin,lyon:2", wire={"secure": True})


# -- private sums ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> tuple[Path, Site, Any]:
    folder = tmp_path_factory.mktemp("private")
    site = private_site(folder)
    return folder, site, played(site, nodes_of(folder, site, lambda name: "epsilon = 9.0\n"), rounds=3)


def test_rounds_are_apart_and_both_ends_count_the_same(private):
    folder, site, fleet = private
    assert [line.round for line in read(site.record / LEDGER)] == [0, 2]
    assert all(line.clients == (0, 1, 2) for line in fleet.ledger.lines)
    for client, name in enumerate(NAMES):
        mine = own(folder, name)
        assert [line.round for line in mine] == [0, 2]
        assert mine[-1].epsilon == fleet.ledger.epsilon(client) == fleet.ledger.lines[-1].epsilon


def test_the_plan_of_a_site_is_written_out_and_that_of_its_simulation(private):
    _, site, fleet = private
    settings = site.experiment.wire.privacy
    assert (settings.distance, settings.times) == (2, 2)
    host = host_of(site.experiment, site.method, site.seed)
    assert fleet.ledger.plan == plan_of(settings, site.experiment, site.method, host) == Plan(4, 2, 2, 2)
    ticket = site.ticket(site.roster.node[0]).experiment
    at_node = ledger_for(ticket, algorithm_without_rows(ticket, site.about.rows))
    assert (at_node.plan, at_node.z) == (fleet.ledger.plan, fleet.ledger.z)


def test_real_clients_gain_nothing_by_sampling(tmp_path):
    """Though the study's simulation is of clients that are always there, drawn uniformly."""
    method = {"name": "FedAvg", "algorithm": "fedavg", "local": {"lr": 0.1, "batch_size": 20}}
    method["cohort"] = {"kind": "uniform", "clients_per_round": 3}
    privacy = {"epsilon": 8.0, "clip": PRIVACY["clip"]}
    site = site_of(tmp_path, method=[method], shift={"who": "always"}, wire={"privacy": privacy})
    host = host_of(site.experiment, site.method, site.seed)
    assert ledger_for(site.experiment, host.algorithm).plan == Plan(4, 4)
    assert plan_of(site.experiment.wire.privacy, site.experiment, site.method, host) == Plan(4, 4)


@pytest.mark.parametrize(("delta", "warned"), [(1e-5, False), (0.1, True)])
def test_a_delta_that_makes_epsilon_say_little_is_warned_of(tmp_path, delta, warned):
    site = private_site(tmp_path, delta=delta)
    seat = Seat.read(
        Ticket.read(site.root / "tickets" / "oslo.ticket"), [tmp_path / "oslo.csv"], None, tmp_path / "oslo"
    )
    warning = "warning: delta 0.1 is too large for 3 clients; ask for one well below 1/3"
    assert (warning in list(seat.describe())) == warned


def test_secrets_of_noise_are_private(private):
    _, site, _ = private
    assert site.private.stat().st_mode & 0o077 == 0
    lines = (site.private / SEEDS).read_text().splitlines()
    assert [json.loads(line)[:2] for line in lines] == [["train/0/None", k] for k in range(3)]


def test_a_node_refuses_in_words_what_its_own_ledger_has_no_room_for(private):
    """The server's ledger is lost, as if it lied: it asks in the next round, or the same of another model."""
    folder, site, _ = private
    nodes = nodes_of(folder, site, lambda name: "")
    (site.record / LEDGER).rename(site.record / "lost")
    with pytest.raises(FedtideError, match=r"ledger.jsonl: lines: found 0, but an older ledger.*allowed: 2 or more"):
        played(site, nodes, rounds=1)
    (site.private / RELEASED / LINES).write_text("x")
    with pytest.raises(FedtideError, match=r"lines: damaged"):
        played(site, nodes, rounds=1)
    forget(site)
    assert words(played(site, nodes, rounds=1)) == {"answered"}, "the same of the same model, as after a crash"
    moved = played(site, nodes, rounds=2)
    assert not [line for line in moved.ledger.lines if line.round == 1]
    assert [len(own(folder, name)) for name in NAMES] == [2, 2, 2]


class Other:
    """A node that is asked, or answers, in another way."""

    def __init__(self, node: Any, handle: Any) -> None:
        self.node, self._handle = node, handle

    def handle(self, header: Any, payload: bytes) -> Any:
        return self._handle(self.node, header, payload)


def test_a_node_that_does_not_open_a_sum_costs_the_others_that_round_and_is_named(tmp_path):
    """The others have shown what opens it: their nodes count the round, and so does the server, over restarts."""
    site = private_site(tmp_path, noise="plain")
    nodes, honest = nodes_of(tmp_path, site, lambda name: ""), [name for name in NAMES if name != "oslo"]

    def shut(node: Any, header: Any, payload: bytes) -> Any:
        if header["kind"] == "unmask" and header["moment"]["round"] == 0:
            return {"clients": dict.fromkeys(map(str, header["clients"]), "refused: no")}, b""
        return node.handle(header, payload)

    nodes["oslo"] = Other(nodes["oslo"], shut)
    fleet = played(site, nodes, rounds=1)
    said = {name: set(line["clients"].values()) for name, line in fleet.record.asks[0]["nodes"].items()}
    assert said["oslo"] == {"lost: its node did not open the sum: refused: no"}
    assert all("too few answered, or some vanished" in word for name in honest for word in said[name])
    started = private_wire(site, host_at(site)).ledger
    again = played(site, nodes, rounds=3)
    for ledger in (fleet.ledger, started, again.ledger):
        assert eligible(ledger, fleet.clients, 1).tolist() == [False] * 3
    assert [line.round for line in read(site.record / LEDGER)] == [2]
    assert [[line.round for line in own(tmp_path, name)] for name in (*honest, "oslo")] == [[0, 2], [0, 2], [2]]


def test_the_server_takes_no_key_for_masks_that_another_key_than_the_registered_one_signed(tmp_path):
    site = private_site(tmp_path)
    nodes = nodes_of(tmp_path, site, lambda name: "")
    keys = {name: nodes[name].node.masker.bundle for name in NAMES}
    fleet = played(site, nodes, rounds=1)
    assert all(fleet.signed(name, keys[name]) for name in NAMES), "before keys are registered each says its own"
    assert not fleet.signed("oslo", keys["lyon"]), "it is signed for another node"
    assert not fleet.signed("oslo", replace(keys["oslo"], signature=b"")), "it is not signed"
    admit(site.root, "oslo", tmp_path / "oslo" / "oslo.pub")
    assert fleet.signed("oslo", keys["oslo"])
    ec = library().hazmat.primitives.asymmetric.ec
    other = Masker(site.digest, "oslo", ec.generate_private_key(ec.SECP384R1()))
    assert not fleet.signed("oslo", other.bundle), "its registered key is another"


def test_a_question_that_is_refused_for_its_sum_spends_nothing(tmp_path):
    site = private_site(tmp_path, secure=False, noise="plain")
    nodes = nodes_of(tmp_path, site, lambda name: "")
    reveal = lambda node, header, payload: node.handle({**header, "reveal": ["utility"]}, payload)  # noqa: E731
    nodes["berlin"] = Other(nodes["berlin"], reveal)
    assert any("shows nothing of a client by itself" in word for word in words(played(site, nodes, rounds=1)))
    assert [len(own(tmp_path, name)) for name in ("berlin", "lyon")] == [0, 1]


# -- a node's own account ----------------------------------------------------------------------------------------------


def header(kind: str = "ask", number: int = 0, **changes: Any) -> dict[str, Any]:
    moment = {"round": number, "rounds": 10, "seconds": 0.0}
    return {"kind": kind, "version": [number, 0], "moment": moment, "question": "train", "clients": [0]} | changes


def budget(folder: Path, plan: Plan = Plan(10, 3, 2), z: float = 2.0) -> Budget:
    return Budget(Ledger(plan, z, 1e-5), Clip({}), folder / "privacy")


def test_a_nodes_own_account(tmp_path):
    mine = budget(tmp_path)
    for _ in range(2):
        assert mine.refuses(header(number=0), "a", None) is None
    assert mine.refuses(header(number=0), "b", None) == OTHER
    for changes in ({"purpose": "train#1"}, {"question": "other"}, {"counted": {"0": [0, 0]}}):
        assert mine.refuses(header(number=0, **changes), "a", None) == OTHER
    room = (
        "its own ledger has no room for round {}: it was in {}; allowed: each question once, in 3 of 10 rounds, 2 apart"
    )
    assert mine.refuses(header(number=1), "a", None) == room.format(1, 0)
    assert "asked in round 3" in mine.refuses(header(number=2, moment={"round": 3}), "a", None)
    assert mine.refuses(header(number=10), "a", None) == room.format(10, 0)
    assert mine.refuses(header(version=[0, 1]), "a", None) == room.format(0, 0)
    assert mine.refuses(header(number=2), "c", None) is None
    again = budget(tmp_path)
    assert [line.round for line in again.ledger(0).lines] == [0, 2]
    assert again.refuses(header(number=4), "d", None) is None
    assert again.refuses(header(number=8), "e", None) == room.format(8, "0, 2, 4")
    epsilons = [epsilon_of(math.sqrt(times) / 2, 1e-5) for times in (1, 2, 3)]
    assert [line.epsilon for line in again.ledger(0).lines] == pytest.approx(epsilons)


def test_a_masked_answer_counts_when_its_sum_is_opened(tmp_path):
    mine, masked = budget(tmp_path), {"mask": {"attempt": "a"}}
    assert mine.refuses(header("unmask", **masked), "", None) == "it has not answered what is to be opened"
    assert mine.refuses(header(**masked), "a", None) is None
    assert mine.ledger(0).lines == []
    for _ in range(2):
        assert mine.refuses(header("unmask", **masked), "", None) is None
    assert mine.refuses(header(**masked), "b", None) == OTHER
    assert len(mine.ledger(0).lines) == 1


def test_a_masked_answer_counts_at_once_if_others_may_open_its_sum(tmp_path):
    """They have shares of its secrets. What the node itself opens later is no other answer."""
    mine, masked = budget(tmp_path), {"mask": {"attempt": "a", "drawn": {"0": {}}}}
    assert mine.refuses(header(**masked), "a", None) is None
    assert len(mine.ledger(0).lines) == 1
    again = {"mask": {"attempt": "b", "drawn": {"0": {}}}}
    assert mine.refuses(header(**again), "b", None) == OTHER
    assert mine.refuses(header(**again), "a", None) is None
    assert mine.refuses(header("unmask", mask={"attempt": "b"}), "", None) is None
    assert len(mine.ledger(0).lines) == 1
    assert mine.refuses(header(**masked), "a", 1e-3) is None, "it was written down"


def test_a_try_is_of_one_model(tmp_path):
    """Else the line of the last one would stand for the sums of all."""
    mine = budget(tmp_path)
    tries = [{"mask": {"attempt": name}} for name in "ab"]
    for masked, model in zip(tries, "mn", strict=True):
        assert mine.refuses(header(**masked), model, None) is None
    assert [mine.refuses(header(**masked), "o", None) for masked in tries] == [OTHER] * 2
    assert [mine.refuses(header("unmask", **masked), "", None) for masked in tries] == [None, OTHER]


def test_a_line_pays_for_what_was_masked_alone(tmp_path):
    """Neither slot 0, which is masked as no slots are, nor another question, nor another length of the study."""
    mine, masked = budget(tmp_path), {"mask": {"attempt": "a"}}
    assert mine.refuses(header(**masked), "m", None) is None
    assert mine.refuses(header(**masked, slot={"0": 0}), "n", None) == OTHER
    assert mine.refuses(header(**masked, moment={"round": 0, "rounds": 99}), "m", None) == OTHER
    assert mine.refuses(header("unmask", **masked, question="score"), "", None) is not None
    assert mine.refuses(header("unmask", **masked, slot={"0": 0}), "", None) is None
    assert len(mine.ledger(0).lines) == 1


def test_a_masked_answer_is_not_forgotten_while_its_sum_can_be_opened(tmp_path, monkeypatch):
    """Else the same try could be noted once more, as of a model that is paid for."""
    monkeypatch.setattr(accounts, "MASKED", 2)
    mine = budget(tmp_path)
    tries = [header(mask={"attempt": name}) for name in "abc"]
    assert [mine.refuses(each, "m", None) is None for each in tries] == [True, True, False]
    assert mine.refuses(header(number=2, mask={"attempt": "a"}), "m", None) is None
    assert mine.refuses(tries[0], "n", None) == "it was asked in round 2, so nothing of round 0 is masked"
    assert mine.refuses(header("unmask", mask={"attempt": "a"}), "", None) is not None


def test_the_owners_epsilon(tmp_path):
    mine = budget(tmp_path)
    assert mine.refuses(header(number=0), "a", 2.5) is None
    why = "its owner allows epsilon 2.5, and with this answer it would be 2.94"
    assert mine.refuses(header(number=2), "a", 2.5) == why
    assert mine.refuses(header(number=0), "a", 2.5) is None, "the same answer once more"
    policy, lines = tmp_path / "policy.toml", list[str]()
    policy.write_text("epsilon = 2.5\n")
    asked = {**header(number=2), "reveal": [], "members": 3}
    owner = Owner(policy, tmp_path / "judged", 10)
    assert owner.refuses(asked, "a") == "its owner allows epsilon 2.5, and its study adds no noise"
    (tmp_path / "privacy" / "0.jsonl").write_text("{}\n")
    damaged = Owner(policy, tmp_path / "judged", 10, lines.append, budget(tmp_path))
    assert damaged.refuses(asked, "a") == "its own ledger cannot be read now"
    assert "0.jsonl: line 1" in lines[0]


def test_a_node_that_has_had_enough_is_left_out(tmp_path):
    privacy = PRIVACY | {"distance": 1, "noise": "plain"}
    site = site_of(tmp_path, wire={"secure": False, "fewest": 2, "privacy": privacy})
    site.record.mkdir(parents=True)
    fleet = played(site, nodes_of(tmp_path, site, rules("oslo", "epsilon = 4.0\n")), rounds=2)
    assert [line.clients for line in fleet.ledger.lines] == [(0, 1, 2), (0, 1)]
    (word,) = {word for word in words(fleet) if word.startswith("refused")}
    assert word.startswith("refused: its owner allows epsilon 4, and with this answer it would be ")


def test_an_owners_bounds_are_no_larger(tmp_path):
    site = private_site(tmp_path, secure=False)
    node = nodes_of(tmp_path, site, lambda name: "clip = { delta = 0.25, other = 1.0 }\n")["berlin"].node
    form = Form((Leaf("delta", 2), Leaf("loss", 1)), people=3)
    vector = torch.tensor([3.0, 4.0, 1.0, 9.0, 1.0], dtype=torch.float64)
    for wire, length in ((node.wire.within(node.policy().clip), 0.25), (node.wire.within({}), 1.0)):
        sent = wire.clip.apply(vector, form)
        assert (float(sent[:2].norm()), float(sent[3])) == pytest.approx((length, 5.0))


# -- nothing exact leaves a node ---------------------------------------------------------------------------------------

NAMED = 'questions = ["train", "score"]\n'


def judged_rows(site: Site, nodes: dict[str, Any], rounds: int = 1) -> list[float]:
    """How many rows each client tells of in an evaluation behind some rounds."""
    fleet = played(site, nodes, rounds)
    algorithm = host_at(site).algorithm
    payload = algorithm.serve(algorithm.init(fleet, Rng(0)), fleet.clients)[0]
    return fleet.score(payload, fleet.clients).rows.tolist()


def plain_site(folder: Path) -> Site:
    site = site_of(folder)
    site.record.mkdir(parents=True)
    return site


@pytest.mark.parametrize(
    ("make", "epsilon", "named"),
    [(private_site, "", False), (private_site, "", True), (plain_site, "epsilon = 4.0\n", False),
     (plain_site, "epsilon = 4.0\n", True)],
)  # fmt: skip
def test_exact_scores_leave_no_private_study_and_with_a_limit_only_if_the_owner_names_them(
    tmp_path, make, epsilon, named
):
    site = make(tmp_path)
    nodes = nodes_of(tmp_path, site, lambda name: epsilon + NAMED * (named and name == "oslo"))
    told = [rows > 0 for rows in judged_rows(site, nodes)]
    assert told == [named and make is plain_site and name == "oslo" for name in NAMES]
    lines = [json.loads(line) for line in (tmp_path / "berlin" / RECORD).read_text().splitlines() if line]
    (word,) = {word for line in lines if line["kind"] == "score" for word in line["clients"].values()}
    assert ("its study is private" if make is private_site else "do not name 'score'") in word
    assert JudgedModels(tmp_path / "berlin" / "judged").read().payload, "a node predicts with the model all the same"


def test_a_node_without_budget_answers_scores(tmp_path):
    site = plain_site(tmp_path)
    assert all(judged_rows(site, nodes_of(tmp_path, site, lambda name: "")))


@pytest.mark.parametrize(
    ("policy", "line", "not_said"),
    [
        ("", "will be refused: score", "the server learns these numbers exactly"),
        (NAMED, "will be refused: score (its study has no `privacy.scores`", "the server learns these numbers exactly"),
        ("secure = true\n", "warning: your policy has `secure` without `peers`: keys of other nodes", "but score"),
        ("secure = true\npeers = []\n", "sums: masked", "without `peers`"),
    ],
)
def test_a_node_says_what_its_rules_give_away(tmp_path, policy, line, not_said):
    site = private_site(tmp_path)
    (tmp_path / "policy.toml").write_text(policy)
    seat = Seat.read(
        Ticket.read(site.root / "tickets" / "oslo.ticket"),
        [tmp_path / "oslo.csv"],
        tmp_path / "policy.toml",
        tmp_path / "oslo",
    )
    lines = list(seat.describe_study())
    assert any(said.startswith(line) for said in lines)
    assert not any(not_said in said for said in lines)


def test_a_rule_that_needs_scores_is_refused_when_a_site_is_made(tmp_path):
    said = r"stop_at: found 0.9, but no scores .*; allowed: none with wire.privacy, or a budget for them"
    with pytest.raises(FedtideError, match=said):
        site_of(tmp_path, stop_at=0.9, wire={"privacy": PRIVACY})
    with pytest.raises(FedtideError, match=r"keep.best: found 2, but no scores .*; allowed: none with wire"):
        site_of(tmp_path, keep={"best": 2}, wire={"privacy": PRIVACY})
    assert not (tmp_path / "site").exists()
    assert site_of(tmp_path, stop_at=0.9).experiment.stop_at.accuracy == 0.9


@pytest.mark.parametrize("secure", [True, False])
def test_a_site_that_sums_scores_is_told_of_no_client(tmp_path, secure):
    """Rule, record and report of its server have the noised sum; each node counts it in its own ledger."""
    privacy = PRIVACY | {"epsilon": 900.0, "distance": 1, "noise": "plain", "scores": 900.0}  # little noise: it learns
    wire, splits = {"secure": secure, "privacy": privacy}, ["train_clients", "val"]
    site = site_of(tmp_path, wire=wire, rounds=4, eval_every=2, eval_splits=splits, stop_at=0.01)
    host, nodes = host_at(site), nodes_of(tmp_path, site, lambda name: "")
    fleet = fleet_at(site, nodes, host)
    judge = Judge(host.algorithm, fleet, views(host.population, named=site.experiment.eval_splits))
    list(Run(site.experiment, site.method, site.seed, site.record).play(judge_of=lambda run: judge))
    lines = [json.loads(line) for line in (site.record / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(line.get("scores", {})) for line in lines] == [[], ["train_clients", "val"]]
    assert lines[-1]["stopped"]["accuracy"] == 0.01
    for entry in lines[-1]["scores"].values():
        assert set(entry) == {"accuracy", "noise", "clients"}
        assert entry["clients"] == pytest.approx(3.0, abs=1.0)
    assert len((site.record / "clients.csv").read_text().splitlines()) == 1
    for client, name in enumerate(NAMES):
        mine = own(tmp_path, name)
        assert [line.question.split()[0] for line in mine] == ["train", "train", "score", "score"]
        assert mine[-1].epsilon == pytest.approx(fleet.ledger.epsilon(client), rel=1e-9)
    assert lines[-1]["epsilon"] == fleet.ledger.lines[-1].epsilon
    said = list(describe_spent(site, host.algorithm))
    assert said[0].endswith("with answers in at most 4 of 4 rounds and scores in 2")
    text = (tmp_path / "berlin" / RECORD).read_text()
    assert '"score test client"' in text
    assert (tmp_path / "berlin" / "judged").exists() == any((tmp_path / "berlin").rglob("judged*"))


def test_an_owner_limits_what_scores_tell(tmp_path):
    privacy = PRIVACY | {"distance": 1, "noise": "plain", "scores": 900.0}
    site = site_of(tmp_path, wire={"secure": False, "fewest": 1, "privacy": privacy}, rounds=4, eval_every=2)
    site.record.mkdir(parents=True)
    host = host_at(site)
    policies = {"oslo": "epsilon = 9.0\n", "lyon": 'questions = ["train"]\n'}
    fleet = fleet_at(site, nodes_of(tmp_path, site, lambda name: policies.get(name, "")), host)
    judge = Judge(host.algorithm, fleet, views(host.population, named=("val",)))
    *_, last = run_rounds(judge, rounds=2, seed=0, every=2)
    assert round(last.line["scores"]["val"]["clients"]) == 1
    assert [line.question for line in own(tmp_path, "oslo")] == ["train", "train"]
    seat = Seat.read(
        Ticket.read(site.root / "tickets" / "oslo.ticket"),
        [tmp_path / "oslo.csv"],
        tmp_path / "oslo.toml",
        tmp_path / "oslo",
    )
    said = list(seat.describe_study())
    assert any("asks: score: " in line and "in a sum, which gets noise: accuracy" in line for line in said)
    assert not any("will be refused: score" in line for line in said)
    assert any(
        line.startswith("will be refused: answers beyond your policy's epsilon 9; the study plans") for line in said
    )


@pytest.mark.parametrize("secure", [True, False])
def test_a_private_site_masks_unless_it_says_not_to(tmp_path, secure):
    site = site_of(tmp_path, wire={"privacy": PRIVACY} | ({} if secure else {"secure": False}))
    said = " ".join(describe_sums(site))
    assert ("sums: masked" in said, "secure = false" in said) == (secure, not secure)


@pytest.mark.parametrize(("epsilon", "warned"), [(8.0, False), (25.0, True)])
def test_a_budget_that_promises_little_is_warned_of(tmp_path, epsilon, warned):
    site = private_site(tmp_path, epsilon=epsilon)
    seat = Seat.read(
        Ticket.read(site.root / "tickets" / "oslo.ticket"), [tmp_path / "oslo.csv"], None, tmp_path / "oslo"
    )
    for lines in (list(describe_sums(site)), [*seat.describe(), *seat.describe_study()]):
        assert [line for line in lines if "promises little" in line][1:] == []
        assert any("epsilon 25 at delta 1e-05 in " in line for line in lines) == warned


def test_a_budget_is_said_with_its_delta_and_its_rounds(tmp_path):
    site = private_site(tmp_path, secure=False)
    nodes = nodes_of(tmp_path, site, lambda name: "")
    algorithm = host_at(site).algorithm
    whole, *of_nodes = describe_spent(site, algorithm)
    assert "epsilon 8 at delta 1e-05, with answers in at most 2 of 4 rounds" in whole
    assert of_nodes[2] == "privacy: client 2 of oslo has spent nothing so far"
    played(site, nodes, rounds=1)
    line = list(describe_spent(site, algorithm))[3]
    assert "client 2 of oslo has spent epsilon" in line
    assert "at delta 1e-05 in 1 round, the last in round 0" in line
    seat = Seat.read(
        Ticket.read(site.root / "tickets" / "oslo.ticket"), [tmp_path / "oslo.csv"], None, tmp_path / "oslo"
    )
    at_node = "\n".join(seat.describe_study())
    assert "two answers of a client are at least 2 rounds apart" in at_node
    assert "in 1 round, the last in round 0, by this node's own ledger" in at_node


def test_a_delta_that_promises_nothing_is_refused(tmp_path):
    refused = r"wire.privacy.delta: found 0.4, allowed: below 1/3, one over the number of clients"
    with pytest.raises(FedtideError, match=refused):
        private_site(tmp_path, delta=0.4)
    site = private_site(tmp_path, delta=0.3)
    with pytest.raises(FedtideError, match=r"wire.privacy.delta: found 0.3, allowed: below 1/4"):
        invite(site.root, "paris")
    ticket = site.ticket(site.roster.node[0]).model_copy(update={"registered": 4})
    with pytest.raises(FedtideError, match=r"wire.privacy.delta: found 0.3, allowed: below 1/4"):
        Seat.read(ticket, [tmp_path / "berlin.csv"], None, tmp_path / "berlin")


# -- methods that reveal, words, restarts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"algorithm": "cfl"}, "it reveals of each client: update, weight"),
        ({"algorithm": "fedtem", "prior": {"kind": "linear", "period": 4}}, "reveals of each client: pi"),
        ({"algorithm": "fedavg", "cohort": {"kind": "oort", "clients_per_round": 3}}, "reveals of each client: count"),
    ],
)
def test_methods_that_reveal_are_refused_when_a_site_is_made(tmp_path, changes, line):
    method = {"name": "FedAvg", "local": {"lr": 0.1, "batch_size": 20}, "cohort": 3, **changes}
    with pytest.raises(FedtideError, match=f"wire.privacy: .*{line}"):
        site_of(tmp_path, method=[method], wire={"secure": False, "privacy": PRIVACY})


def test_a_ticket_that_calls_a_method_private_that_reveals_is_refused_at_the_node():
    experiment = toy("cfl", wire={"secure": False, "privacy": PRIVACY})
    algorithm = host_of(toy("cfl"), toy("cfl").method[0], 0).algorithm
    with pytest.raises(FedtideError, match=r"wire.privacy: .*it reveals of each client: update, weight"):
        ledger_for(experiment, algorithm)


def test_a_server_that_goes_on_draws_anew_what_its_ledger_does_not_know(tmp_path):
    """An older ledger was put back, or the run began anew: of later sums no noise comes again."""
    site = private_site(tmp_path)

    def release() -> Any:
        return private_wire(site, host_at(site)).server

    def noise(of: Any) -> list[torch.Tensor]:
        return [of.draw("train/0/None", number, 4) for number in range(3)]

    first = release()
    before = noise(first)
    line = Line(round=1, ask=0, question="train", slot=None, z=1.0, bounds={}, clients=(0,), epsilon=0.0, sha256="a")
    first.ledger.add(line)
    assert [torch.equal(*pair) for pair in zip(noise(release()), before, strict=True)] == [True, True, False]
    forget(site)
    assert not site.private.exists()
    (site.record / LEDGER).unlink()
    assert not torch.equal(noise(release())[0], before[0])


# -- bounds that adapt -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapting(tmp_path_factory) -> tuple[Path, Site]:
    folder = tmp_path_factory.mktemp("adapting")
    adapt = {"delta": {"rate": 2.0}}
    return folder, private_site(folder, adapt=adapt, noise="plain", distance=1, epsilon=None, multiplier=0.01)


def test_bounds_adapt_over_masked_sums_and_stay_within_their_owners(adapting):
    folder, site = adapting
    fleet = played(site, nodes_of(folder, site, rules("oslo", "clip = { delta = 1e-6 }\n")), rounds=4)
    lines = read(site.record / LEDGER)
    assert [line.round for line in lines] == [0, 1, 2, 3]
    for before, after in itertools.pairwise(lines):
        bound = adapted(before.bounds["delta"], before.within["delta"], 0.5, 2.0)
        assert after.bounds["delta"] == pytest.approx(bound, rel=1e-12), "a mean over sums of equally many clients"
    assert fleet.ledger.lines == lines
    assert lines[0].within["delta"] == pytest.approx(1.0, abs=0.2), "all are within, the one that is cut, too"
    assert [len(own(folder, name)) for name in NAMES] == [4, 4, 4]


def test_a_node_refuses_a_bound_to_which_no_round_can_have_come(tmp_path):
    """In round 2, after each of the two rounds before has at most let it grow by e."""
    clip = Clip({"delta": 1.0}, {"delta": Adaptive(0.5, 2.0)})

    def ask(mine: Budget, bound: float, name: str = "delta") -> str | None:
        leaf = {"name": name, "size": 1, "slots": 1, "bound": bound}
        return mine.refuses(header(number=2, forms={"0": {"leaves": [leaf], "people": 3}}), "a", None)

    mine = Budget(budget(tmp_path).study, clip, tmp_path)
    assert ask(mine, 7.5) == "it says a bound of 7.5 for 'delta'; allowed: 7.39 at most, in round 2"
    assert "for 'other'; allowed: 0 at most" in ask(mine, 1.0, "other")
    assert ask(mine, math.e**2) is None
    assert ask(mine, 1.0) == OTHER, "it was cut to another before"
