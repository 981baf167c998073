"""A site that is watched: alarms in the log of its server and in its record, and the same bits when played again."""

import io
import json

import pytest

pytest.importorskip("cryptography")

from fedtide.evaluate.judge import Judge, views
from fedtide.runs import folder
from fedtide.site.machine import Log
from fedtide.site.parity import replay
from fedtide.site.serve import RosterFile, play_rounds
from fedtide.transforms import windows
from helpers.hospitals import NAMES, STUDY
from helpers.near_sites import fleet_at, host_at, nodes_of, site_of
from helpers.shell import done

METHOD = {**STUDY["method"][0], "transforms": [{"kind": "watch", "windows": 2}]}


@pytest.mark.parametrize("wire", [{}, {"secure": True, "fewest": 3}], ids=["plain", "masked"])
def test_alarms_of_a_site_are_in_its_log_and_its_record(tmp_path, monkeypatch, capsys, wire):
    monkeypatch.setattr(windows, "tells_drift", lambda scores, streams: len(scores) == 3)
    changes = {"wire": wire} if wire else {}
    site = site_of(tmp_path, played="FedAvg (watched)", method=[METHOD], rows=90, **changes)
    folder.create(site.experiment, site.run)
    host = host_at(site)
    fleet = fleet_at(site, nodes_of(tmp_path, site, lambda name: ""), host)
    judge = Judge(host.algorithm, fleet, views(host.population), site.method.decide_per)
    log = Log(lines=True, file=io.StringIO())
    list(play_rounds(site, fleet, judge, log, RosterFile(site.root, site.roster, log)))
    said = [json.loads(line) for line in log.file.getvalue().splitlines()]
    alarms = [line for line in said if line["event"] == "alarm"]
    assert [line["kind"] for line in alarms] == ["inputs", "labels", "meaning"]
    assert alarms[0]["text"].startswith("alarm in round 3: inputs: input ")
    kept = [json.loads(line) for line in (site.record / "alarms.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in kept] == ["inputs", "labels", "meaning"]
    again = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (again.equal, again.differs) == (True, None)
    capsys.readouterr()
    assert done("watch", site.root) == 0
    assert capsys.readouterr().out.count("alarm: ") == 3
    assert (site.root / "watch.html").is_file()


def test_a_site_that_was_never_served_has_no_windows(tmp_path, capsys):
    site = site_of(tmp_path, played="FedAvg (watched)", method=[METHOD])
    assert done("watch", site.root) == 2
    assert "no round is played yet; start the server: fedtide serve" in capsys.readouterr().err
