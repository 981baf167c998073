"""A node's own policy: rules, peers, and the terms of a study in words."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("cryptography")

import fedtide as ft
from fedtide.core.base import Scores, Shard
from fedtide.core.errors import FedtideError
from fedtide.learn.target import LabelsTarget, NumberTarget
from fedtide.runs.build import host_of
from fedtide.site import certificates, owner
from fedtide.site.owner import LARGEST, Peers, Policy, describe_terms, read_policy, terms_of
from fedtide.wire.clip import Clip
from fedtide.wire.pipeline import FLOATING, Wire
from helpers.toys import toy

STRICT = Policy(reveals=("pi",), questions=("train", "score"), fewest=3)
LIKE = Shard(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(1))


def header(**values: Any) -> dict[str, Any]:
    return {"kind": "ask", "question": "train", "reveal": [], "members": 5, **values}


def test_rules_are_read_and_a_missing_rule_forbids_nothing(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('reveals = ["pi"]\nquestions = ["train", "score"]\nfewest = 3\n')
    assert read_policy(path) == STRICT
    path.write_text("")
    assert read_policy(path) == Policy()
    assert Policy().refuses(header(question="any", reveal=["all"], members=1)) is None


@pytest.mark.parametrize(
    ("policy", "asked", "why"),
    [
        (STRICT, header(reveal=["pi"]), None),
        (STRICT, header(kind="score", question="adapt"), None),
        (STRICT, header(members=3), None),
        (STRICT, header(question="report"), "does not allow the question 'report'; allowed: train, score"),
        (STRICT, header(reveal=["pi", "mu"]), "does not reveal 'mu'; allowed: pi"),
        (STRICT, header(members=2), "does not answer for a sum of 2; allowed: 3 clients or more"),
        (STRICT, {"kind": "ask", "question": "train"}, "does not answer for a sum of 0; allowed: 3 clients or more"),
        (Policy(questions=()), header(), "does not allow the question 'train'; allowed: nothing"),
        (Policy(questions=()), header(kind="score"), "does not allow the question 'score'; allowed: nothing"),
    ],
)
def test_questions_that_are_forbidden_are_refused_in_words(policy, asked, why):
    assert policy.refuses(asked) == (why and f"its owner {why}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("reveals = 'pi'", r"reveals: found 'pi', allowed: a list of values"),
        ("reveals = [1]", r"reveals\[0\]: found 1, allowed: a string"),
        ("questions = [\"\"]", r"questions.*: found '', allowed: 1 or more"),
        ("fewest = 0", r"fewest: found 0, allowed: 1 or more"),
        ("fewest = true", r"fewest: found True, allowed: a whole number"),
        ("reveal = []", r"reveal: unknown key; did you mean 'reveals'\? Allowed: reveals, questions, "),
        ("fewest = 3\nfewest = 4", r"not valid TOML"),
        (b"\xff", r"not valid TOML"),
        ("x = " + "[" * 5000, r"not valid TOML|nested too deeply"),
        ("#" * (LARGEST + 1), r"bytes: found .more than 65,536., allowed: at most 65,536"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_rules_is_named(tmp_path, text, line):
    path = tmp_path / "policy.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FedtideError, match=line) as caught:
        read_policy(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_evaluation_is_shown_as_the_rules_say():
    one, two = torch.tensor([40.0, 0.0]).double(), torch.tensor([[30.0, 10.0], [0.0, 0.0]]).double()
    scores = Scores(torch.arange(2), one, one, 1.23456 * one, two, two, {"gate": one, "vote": one}, one)
    shown = Policy(reveals=("weights", "vote")).shown(scores)
    assert shown.loss.tolist() == pytest.approx([49.2, 0.0])
    assert (shown.choice, shown.density, list(shown.others)) == (None, None, ["vote"])
    assert (shown.weights is two, shown.rows is one, shown.correct is one) == (True, True, True)
    whole = Policy().shown(scores)
    assert (whole.choice is two, list(whole.others)) == (True, ["gate", "vote"])
    for odd in (math.nan, math.inf):
        assert not math.isfinite(Policy().shown(replace(scores, loss=one * odd)).loss[0])


# -- peers -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("keys")
    for name in ("lyon", "oslo"):
        certificates.make_node_key(folder / name, folder / f"{name}.pub", name)
    return {name: certificates.read_public_key(folder / f"{name}.pub")[0] for name in ("lyon", "oslo")}


def test_the_first_key_of_a_name_is_taken_and_no_other_one_after_it(tmp_path, keys):
    lines: list[str] = []
    for _ in range(2):  # a node that starts again
        peers = Peers(tmp_path / "peers.json", Policy, lines.append)
        assert peers.trusts("lyon", keys["lyon"]) is None
    lyon, oslo = (certificates.fingerprint(keys[name]) for name in ("lyon", "oslo"))
    assert lines == [f"masks are shared with lyon from now on, key {lyon}: compare it with its owner"]
    assert (
        peers.trusts("lyon", keys["oslo"])
        == f"its key is {oslo}, and it was another before; ask its owner, and name it in `peers`"
    )
    assert peers.trusts("oslo", keys["lyon"]) == f"its key {lyon} is that of another node, too"
    assert json.loads((tmp_path / "peers.json").read_text()) == {"lyon": keys["lyon"]}


def test_a_node_may_come_with_another_key_if_the_owner_names_it(tmp_path, keys):
    lyon, oslo = (certificates.fingerprint(keys[name]) for name in ("lyon", "oslo"))
    peers = Peers(tmp_path / "peers.json", lambda: Policy(peers=(lyon,)), print)
    assert peers.trusts("lyon", keys["lyon"]) is None
    peers = replace(peers, policy=lambda: Policy(peers=(oslo,)))
    assert peers.trusts("lyon", keys["oslo"]) is None
    assert json.loads((tmp_path / "peers.json").read_text()) == {"lyon": keys["oslo"]}
    assert peers.trusts("lyon", keys["lyon"]) == f"its key {lyon} is not among the peers that the owner named"
    assert peers.trusts("bern", keys["oslo"]) == f"its key {oslo} is that of another node, too"


def test_keys_of_so_many_nodes_are_kept_and_no_more(tmp_path, keys, monkeypatch):
    """A server that makes up nodes could fill the disk."""
    monkeypatch.setattr(owner, "KEYS", 1)
    peers = Peers(tmp_path / "peers.json", Policy, print)
    assert peers.trusts("lyon", keys["lyon"]) is None
    assert peers.trusts("oslo", keys["oslo"]) == "it knows 1 other node, and shares masks with no more"
    assert peers.trusts("lyon", keys["lyon"]) is None
    assert list(json.loads((tmp_path / "peers.json").read_text())) == ["lyon"]


@pytest.mark.parametrize("damaged", ["", "{", "[]", "folder"])
def test_keys_that_cannot_be_read_are_not_forgotten(tmp_path, keys, damaged):
    """Else the next key of a name would be the first one."""
    file = tmp_path / "peers.json"
    file.mkdir() if damaged == "folder" else file.write_text(damaged)
    why = "the keys of other nodes that it met before cannot be read now (peers.json)"
    assert Peers(file, Policy, print).trusts("lyon", keys["lyon"]) == why
    assert file.is_dir() or file.read_text() == damaged


def test_keys_that_do_not_count(tmp_path, keys):
    def broken() -> Policy:
        raise FedtideError("policy.toml: damaged")

    lyon, oslo = (certificates.fingerprint(keys[name]) for name in ("lyon", "oslo"))
    for policy, key, why in (
        (lambda: Policy(peers=(lyon,)), keys["lyon"], None),
        (lambda: Policy(peers=(lyon,)), keys["oslo"], f"its key {oslo} is not among the peers that the owner named"),
        (Policy, "ssh-rsa AAAA", "its registered key is none, or the owner's rules cannot be read now"),
        (broken, keys["lyon"], "its registered key is none, or the owner's rules cannot be read now"),
    ):
        assert Peers(tmp_path / "peers.json", policy, print).trusts("node", key) == why


# -- terms -------------------------------------------------------------------------------------------------------------


def terms(name: str, policy: Policy = Policy(), wire: Wire = FLOATING) -> list[str]:
    experiment = toy(name)
    algorithm = host_of(experiment, experiment.method[0], 0).algorithm
    return list(describe_terms(algorithm, LIKE, 3, policy, 3, wire))


@pytest.mark.parametrize(
    ("name", "policy", "steps", "line"),
    [
        ("fedavg", Policy(), {"delta": 0.5, "loss": 2.0}, "delta (43 numbers, cut to a length of 0.5), "),
        ("fedavg", Policy(secure=True), None, "refused: every question but score, because your policy allows masked"),
        ("scaffold", Policy(), None, "keeps here, in the node's folder: 172 B for each client, its key, "),
        ("fedem", Policy(), None, "sends after work on the rows here, of each client by itself: rows, "),
        ("fedem", Policy(), None, "mean loss to three digits, choice, weights"),
        ("fedem", Policy(reveals=()), None, "left out of score: choice, weights (forbidden by your policy)"),
        ("fedem", Policy(rows_at_least=20), None, "refused: score of a client with fewer than 20 rows for it"),
        ("flexcfl drifts", Policy(), None, "asks: shifted: receives 0 B, sends 4 B: nothing to be summed"),
        ("flexcfl drifts", Policy(), None, "for each client by itself: shifted (1 number), at shifted"),
        ("flexcfl drifts", Policy(reveals=("update",)), None, "refused: shifted, because its owner does not reveal "),
    ],
)
def test_a_line_of_the_terms(name, policy, steps, line):
    lines = terms(name, policy, FLOATING if steps is None else Wire(clip=Clip(steps)))
    assert any(line in text for text in lines)


def test_slots_are_counted():
    experiment = toy("ifca")
    algorithm = host_of(experiment, experiment.method[0], 0).algorithm
    (train,) = [term for term in terms_of(algorithm, LIKE, 3)[0] if term.question == "train"]
    assert (train.down, train.sums["delta"]) == (2 * 172, "43 numbers for some of 2")


@pytest.mark.parametrize(
    ("target", "y"),
    [
        (NumberTarget(0.0, 1.0, (0.0,), (0.0,)), torch.tensor([-1.0, 1.0])),
        (LabelsTarget(3), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])),
    ],
)
def test_rows_that_have_no_classes(target, y):
    algorithm = ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(4, target.width or 3), target=target))
    like = Shard(torch.zeros(2, 4), y, torch.arange(2), bins=torch.arange(2))
    (train, evaluation), _ = terms_of(algorithm, like, 2)
    assert train.sums["delta"].endswith("numbers")
    assert evaluation.up == 0
