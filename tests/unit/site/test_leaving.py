"""`fedtide forget SITE NODE`: a node is locked out, and its rounds are played again by the others."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedtide.core.atomic import sha256
from fedtide.core.checkpoint import file_of
from fedtide.core.errors import FedtideError
from fedtide.core.record import ASKS, LEDGER, read_lines
from fedtide.site.accounts import ledger_for
from fedtide.site.leaving import describe_released, take_out
from fedtide.site.serve import hold
from fedtide.site.site import Site, admit, read_roster
from fedtide.site.status import describe_way_in
from fedtide.wire.ledger import Line
from helpers.near_sites import host_at, nodes_of, serve_near, site_of

DEPLOY = {"address": "127.0.0.1:7400", "fewest": 2}
BUDGET = {"epsilon": 8.0, "delta": 0.01, "clip": {"delta": 1.0, "loss": 2.0}}
PRIVATE = {"wire": {"secure": False, "fewest": 2, "privacy": BUDGET}}


def made(folder: Path, **changes: Any) -> tuple[Site, dict[str, Any]]:
    folder.mkdir()
    site = site_of(folder, **{"played": "SCAFFOLD", "deploy": DEPLOY, **changes})
    return site, nodes_of(folder, site, lambda name: "")


def took_out(site: Site, name: str = "lyon") -> str:
    return "\n".join(take_out(site.root, name))


def test_the_others_play_again_and_come_to_the_bits_of_a_study_without_it(tmp_path):
    """Their folders have memory of the rounds with it, which nobody counts any more."""
    site, nodes = made(tmp_path / "one")
    serve_near(site, nodes)
    with_it = sha256(file_of(site.record))
    said = took_out(site)
    for fact in ("rounds 0, 1, 2 and 3", with_it[:16], "cannot be taken back: models"):
        assert fact in said
    assert not site.run.exists()
    assert len(read_lines(site.root / "run-with-lyon" / "scaffold" / "0")) == 4
    serve_near(site, nodes)
    other, fresh = made(tmp_path / "other")
    took_out(other)
    serve_near(other, fresh)
    assert sha256(file_of(site.record)) == sha256(file_of(other.record)) != with_it
    for name in ("berlin", "oslo"):
        rows = [sorted((tmp_path / folder / name).rglob("memory/*/*/3.0")) for folder in ("one", "other")]
        assert rows[0]
        assert [path.read_bytes() for path in rows[0]] == [path.read_bytes() for path in rows[1]]


def test_it_stays_away(tmp_path):
    site, _ = made(tmp_path / "one")
    said = took_out(site)
    assert "nothing to play again" in said
    assert took_out(site) == said
    (lyon,) = (node for node in read_roster(site.root).node if node.name == "lyon")
    assert lyon.left
    assert lyon.key is None
    assert "has left" in describe_way_in(site.root, lyon)
    with pytest.raises(FedtideError, match="node 'lyon': has left for good; allowed: a new name"):
        admit(site.root, "lyon", tmp_path / "one" / "lyon" / "lyon.pub")


def test_saved_rounds_without_it_stay(tmp_path):
    site, nodes = made(tmp_path / "one")
    away = {name: node for name, node in nodes.items() if name != "lyon"}
    took_out(site)
    serve_near(site, away, rounds=2)
    before = {path: path.read_bytes() for path in site.run.rglob("*") if path.is_file()}
    took_out(site)
    assert {path: path.read_bytes() for path in site.run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("until", ["the roster is written", "the run is put aside"])
def test_a_killed_command_is_ended_by_the_same(tmp_path, monkeypatch, until):
    site, nodes = made(tmp_path / "one")
    serve_near(site, nodes, rounds=2)

    class Killed(BaseException):
        pass

    def die(*given: Any) -> None:
        raise Killed

    name = "fedtide.site.leaving.write_roster" if until == "the roster is written" else "fedtide.site.leaving.os.rename"
    with monkeypatch.context() as patch:
        patch.setattr(name, die)
        with pytest.raises(Killed):
            took_out(site)
    assert len(read_lines(site.record)) == 2
    took_out(site)
    assert len(read_lines(site.root / "run-with-lyon" / "scaffold" / "0")) == 2
    assert "nothing to play again" in took_out(site)


def test_masked_and_private_studies_say_what_cannot_be_taken_back(tmp_path):
    (tmp_path / "masked").mkdir()
    site = site_of(tmp_path / "masked", "berlin,lyon,oslo,paris", wire={"secure": True, "fewest": 3}, deploy=DEPLOY)
    line = {"round": 3, "asks": [{"nodes": {"lyon": {"clients": {"1": "answered"}}}}], "scored": {}}
    site.record.mkdir(parents=True)
    (site.record / ASKS).write_text(f"{json.dumps(line)}\n")
    said = took_out(site)
    assert "in round 3\n" in said
    assert "cannot be taken back: masked sums" in said
    assert site.run.exists()
    site, nodes = made(tmp_path / "private", played="FedAvg", **PRIVATE)
    serve_near(site, nodes, rounds=2)
    said = took_out(site)
    lines = [json.loads(line) for line in (site.record / "ledger.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]
    assert "client 1: " in said
    assert "rounds 0 and 1" in said
    assert len(read_lines(site.record)) == 2


def test_released_scores_are_named_with_what_they_cost(tmp_path):
    privacy = BUDGET | {"scores": 900.0}
    wire = {"secure": False, "fewest": 2, "privacy": privacy}
    site, _ = made(tmp_path / "one", played="FedAvg", rounds=4, eval_every=2, wire=wire)
    site.record.mkdir(parents=True)
    ledger = ledger_for(site.experiment, host_at(site).algorithm, site.record / LEDGER)
    asked = {"ask": 1, "question": "score test client", "slot": None, "bounds": {}, "sha256": "a"}
    ledger.add(Line(round=1, z=ledger.score_ledger.z, clients=(1,), **asked))
    assert (ledger.rounds(1), ledger.released(1)) == ([], [1])
    (said,) = describe_released(site, [1])
    assert "round 1," in said
    assert f"epsilon {ledger.epsilon(1):.3g} " in said


def test_mistakes_are_one_line_and_change_nothing(tmp_path):
    site, _ = made(tmp_path / "one")
    before = (site.root / "roster.toml").read_bytes()
    with pytest.raises(FedtideError, match="NODE: found 'paris', allowed: berlin, lyon, oslo"):
        took_out(site, "paris")
    with hold(site), pytest.raises(FedtideError, match="a server plays this site already; end it first"):
        took_out(site)
    with pytest.raises(FedtideError, match="not a site"):
        take_out(tmp_path, "lyon")
    assert (site.root / "roster.toml").read_bytes() == before


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_text(path.read_text().replace("lyon", "oslo"))]
)
def test_a_damaged_record_does_not_say_that_a_node_never_answered(tmp_path, damage):
    site, nodes = made(tmp_path / "one")
    serve_near(site, nodes)
    before = (site.root / "roster.toml").read_bytes()
    damage(site.record / ASKS)
    with pytest.raises(FedtideError, match=r"asks.jsonl: (missing|damaged)"):
        took_out(site)
    assert (site.root / "roster.toml").read_bytes() == before


def test_too_few_may_be_left(tmp_path):
    site, _ = made(tmp_path / "one", deploy={**DEPLOY, "fewest": 3})
    assert "too few are left" in took_out(site)
    assert next(node.left for node in read_roster(site.root).node if node.name == "lyon")
