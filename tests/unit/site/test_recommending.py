"""Recommendation at a site: from its inspection to a tournament between clients, and from that to the best methods."""

import json
import tomllib

import pytest
import tomli_w

pytest.importorskip("cryptography")

from fedtide.config import read
from fedtide.inspection.by_sums import STAGES
from fedtide.site.parity import replay
from helpers.near_sites import site_of
from helpers.shell import done, refused
from helpers.shops import NAMES, made, play, shops


def test_from_an_inspection_over_a_tournament_to_the_best_methods(tmp_path, capsys):
    asked = made(shops(tmp_path, wire={"secure": True}), tmp_path / "site")
    line = refused(capsys, tmp_path, "recommend", asked.root)
    assert "--rounds: no value given" in line
    line = refused(capsys, tmp_path, "recommend", asked.root, "--rounds", 8)
    assert "0 of 9 questions were asked" in line
    play(asked, len(STAGES))

    # From answers to a tournament.
    out = tmp_path / "tournament"
    assert done("recommend", asked.root, "--rounds", 6, "--out", out) == 0
    said = capsys.readouterr().out
    assert f"next: fedtide deploy {out / 'study.toml'} --nodes {','.join(NAMES)}" in said
    assert "not entered: " in said  # the server would see single clients
    (method,) = read(out / "study.toml").method
    entries = [table["name"] for table in method.options["entries"]]
    assert any(name.startswith("FedAvg") for name in entries)
    values = tomllib.loads((out / "study.toml").read_text())
    few = [table for table in method.options["entries"] if table["algorithm"] in ("fedavg", "ifca")][:4]
    values["method"][0]["entries"] = few  # so that the test is short
    (out / "study.toml").write_text(tomli_w.dumps(values))
    site = made(out / "study.toml", tmp_path / "second")
    line = refused(capsys, tmp_path, "recommend", site.root)
    assert "0 of 6 rounds were played; the first decision follows round" in line
    assert "--rounds: found 6" in refused(capsys, tmp_path, "recommend", site.root, "--rounds", 6)
    play(site, 6)
    capsys.readouterr()

    # From the tournament to the best methods.
    best = tmp_path / "best"
    assert done("recommend", site.root, "--out", best, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["table"][0][1] == "highest"
    assert "has the highest score after 6 of 6 rounds" in found["verdict"]
    names = [method.name for method in read(best / "study.toml").method]
    assert found["table"][0][0] in names
    assert found["table"][0][0] in made(best / "study.toml", tmp_path / "third", names[0]).method.name
    again = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (again.rounds, again.equal) == (6, True)


def test_what_no_site_takes(tmp_path, capsys):
    site = site_of(tmp_path)
    line = refused(capsys, tmp_path, "recommend", site.root, "--rounds", 8)
    assert "found 'fedavg', allowed: 'inspection' or 'tournament', in a site made for it" in line
    assert "--budget: found a value" in refused(capsys, tmp_path, "recommend", site.root, "--budget", "9s")
    assert "--rounds: found 8" in refused(capsys, tmp_path, "recommend", "rows.csv", "--rounds", 8)
