"""What is said of the disk before a run whose clients keep much."""

import re
from collections import namedtuple

import pytest

from fedtide.core.errors import FedtideError
from fedtide.runs import preflight
from helpers.studies import A, study

WIDE = {"kind": "mlp", "hidden": [2000, 2000]}
SAID = "clients keep about {} MB on disk, for moments up to {} MB"
KEEPER = {"name": "S", "algorithm": "scaffold", "cohort": 2}
Usage = namedtuple("Usage", "total used free")


def said(experiment, root):
    return preflight.check_room(preflight.preflight(experiment).need, root)


def wide(*methods, **named):
    return study(*methods, model=WIDE, **named)


def test_what_clients_keep_is_said_with_its_reasons(tmp_path):
    """4-2000-2000-3 has 4,018,003 parameters, 16.1 MB; the toy has 8 clients, and 3 rounds of 2 reach 6 of them.

    At most a client keeps two versions, and while they are asked two have a third: 2 x (2 x 6 + 2) x 16.1 MB.
    """
    told = said(wide(A, KEEPER, rounds=3, seeds=[0, 1]), tmp_path / "run")
    assert told.startswith(f"{SAID.format(192.9, 450.0)} ('S': 2 seeds x 6 clients x 16.1 MB); ")
    more = said(wide(A, KEEPER, rounds=50, seeds=[0, 1, 2]), tmp_path / "run")
    assert "'S': 3 seeds x 8 clients" in more
    swept = wide(KEEPER, rounds=3, sweep={"method.local.lr": [0.1, 0.2, 0.3]})
    assert said(swept, tmp_path / "run").startswith(f"{SAID.format(289.3, 675.0)} ('S': 1 seed x")


def test_nothing_is_said_where_nothing_or_little_is_kept(tmp_path):
    assert said(wide(A, rounds=3), tmp_path / "run") == ""
    assert said(study(KEEPER, rounds=3), tmp_path / "run") == ""


def test_too_small_a_disk_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, 10**8))
    run = tmp_path / "x" / "run"
    line = f"{run}: {SAID.format(128.6, 289.3)} ('S': 1 seed x 8 clients x 16.1 MB), and "
    with pytest.raises(FedtideError, match=re.escape(f"{line}{tmp_path} has 100.0 MB free; allowed: fewer clients")):
        said(wide(KEEPER, rounds=50), tmp_path / "x" / "run")


def test_a_small_disk_is_seen_where_little_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(10**6, 0, 10**6))
    small = study(KEEPER, model={"kind": "mlp", "hidden": [200, 200]}, rounds=3)
    with pytest.raises(FedtideError, match=r"up to 2\.3 MB .* has 1\.0 MB free"):
        said(small, tmp_path / "run")
