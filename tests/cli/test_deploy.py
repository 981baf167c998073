"""Real clients, as a person types the commands: a site, its tickets, a node that looks before it joins."""

import csv
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.site.certificates import make_node_key
from fedtide.site.seat import Seat
from fedtide.site.tickets import Ticket
from fedtide.wire.keys import library
from helpers.hospitals import hospitals
from helpers.shell import contents, done, refused

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory) -> Path:
    """A folder with a study, rows, and a site; and with files that are wrong."""
    folder = tmp_path_factory.mktemp("hospital")
    study = hospitals(folder)
    assert done("deploy", study, "--method", "SCAFFOLD", "--nodes", "berlin,lyon,oslo", "--out", folder / "site") == 0
    ticket = (folder / "site" / "tickets" / "berlin.ticket").read_text()
    (folder / "cut.ticket").write_text(ticket[:700])
    (folder / "cut-line.ticket").write_text("".join(ticket.splitlines(keepends=True)[:4]))
    (folder / "puls.csv").write_text((folder / "berlin.csv").read_text().replace("pulse", "puls"))
    (folder / "trian.toml").write_text('questions = ["trian"]\n')
    return folder


@pytest.fixture
def here(hospital, monkeypatch) -> Path:
    monkeypatch.chdir(hospital)
    return hospital


def test_looking_before_joining_changes_nothing(here, capsys):
    before = contents(here)
    (here / "policy.toml").write_text('reveals = []\nquestions = ["train"]\n')
    before = contents(here)
    ask = ["join", "site/tickets/berlin.ticket", "--data", "berlin.csv", "--policy", "policy.toml", "--dry"]
    assert done(*ask) == 0
    out = capsys.readouterr().out
    assert "columns: berlin.csv: reads label, pulse, age, weight; leaves alone hospital" in out
    assert "will be refused" in out
    assert contents(here) == before


def test_the_seal_is_said_before_anything_is_refused(here, capsys, monkeypatch):
    monkeypatch.setattr("fedtide.site.seat.installed_versions", lambda: {"fedtide": "9.9"})
    assert done("join", "site/tickets/berlin.ticket", "--data", "berlin.csv", "--dry") == 2
    said = capsys.readouterr()
    assert f"seal: {Ticket.read(here / 'site/tickets/berlin.ticket').seal}" in said.out
    assert "version of fedtide: found '9.9'" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["site/tickets/berlin.ticket", "--data", "none.csv"], "none.csv: no such file"),
        (["site/tickets/berlin.ticket", "--data", "study.toml"], "study.toml"),
        (["site/tickets/none.ticket", "--data", "berlin.csv"], "none.ticket: no such file"),
        (["berlin.csv", "--data", "berlin.csv"], "berlin.csv: not valid TOML"),
        (["site/study.toml", "--data", "berlin.csv"], "site/study.toml: is no ticket; fedtide deploy and"),
        (["site/roster.toml", "--data", "berlin.csv"], "site/roster.toml: is no ticket; fedtide deploy and"),
        (["cut.ticket", "--data", "berlin.csv"], "if it is a ticket, ask the site's owner for it again"),
        (["cut-line.ticket", "--data", "berlin.csv"], "the ticket was damaged or changed; ask the site's owner for it"),
        (["site/tickets/berlin.ticket", "--data", "berlin.csv", "--out", "x"], "found '--out', did you mean '--home'?"),
        (
            ["site/tickets/berlin.ticket", "--data", "puls.csv"],
            "no column 'pulse'; the study reads: pulse, age, weight,",
        ),
        (["site/tickets/berlin.ticket", "--data", "berlin.csv", "--policy", "trian.toml"], "did you mean 'train'?"),
        (["site/tickets/berlin.ticket", "--data", "berlin.csv", "--data", "lyon.csv"], "--data: found '2 files'"),
        (["site/tickets/berlin.ticket", "--data", "berlin.csv", "--policy", "study.toml"], "study.toml: "),
        (["site/tickets/berlin.ticket", "--data", "berlin.csv", "--home", "berlin.csv"], "--home: found 'berlin.csv'"),
        (["site/tickets/berlin.ticket"], "data"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry"], []])
def test_what_does_not_fit_is_refused_before_anything_is_made(here, capsys, words, said, dry):
    assert said in refused(capsys, here, "join", *words, *dry)


def test_the_home_of_another_study_is_not_taken(here, tmp_path, capsys):
    study = hospitals(tmp_path, title="Another", rounds=9)
    assert (
        done("deploy", study, "--method", "SCAFFOLD", "--nodes", "berlin,lyon,oslo", "--out", tmp_path / "other") == 0
    )
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "berlin.ticket").write_bytes((here / "site" / "tickets" / "berlin.ticket").read_bytes())
    new = "allowed: --home with a new folder"
    line = refused(
        capsys, tmp_path, "join", tmp_path / "other" / "tickets" / "berlin.ticket", "--data", here / "berlin.csv",
        "--home", home,
    )  # fmt: skip
    assert line == f"{home}: belongs to another study or site, because its digest is not that of this ticket; {new}"


def test_the_home_of_another_node_is_not_taken(here, tmp_path, capsys):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    make_node_key(home / "berlin.key", home / "berlin.pub", "berlin")
    line = refused(capsys, here, "join", "site/tickets/lyon.ticket", "--data", "lyon.csv", "--home", home)
    assert line.endswith("is the folder of node 'berlin'; allowed: --home with a folder of 'lyon' alone")
    assert sorted(path.name for path in home.iterdir()) == ["berlin.key", "berlin.pub"]


@pytest.mark.parametrize("words", [["report", "site"], ["predict", "site", "berlin.csv"], ["replay", "site"]])
def test_a_site_names_its_run_folder(here, capsys, words):
    assert refused(capsys, here, *words) == "site: is a site; its run folder is site/run"


def test_a_table_is_no_file_of_an_npz_study(tmp_path, capsys):
    np.savez(tmp_path / "pilot.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 3)
    study = hospitals(tmp_path, data={"source": {"kind": "npz", "path": str(tmp_path / "pilot.npz")}})
    assert done("deploy", study, "--method", "FedAvg", "--nodes", "a,b,c", "--out", tmp_path / "site") == 0
    capsys.readouterr()
    ticket = tmp_path / "site" / "tickets" / "a.ticket"
    line = refused(capsys, tmp_path, "join", ticket, "--data", tmp_path / "berlin.csv")
    assert "berlin.csv: is no NPZ file; this study's rows are NPZ, with x and y" in line


def test_a_server_is_told_that_rows_do_not_agree_and_nothing_else(here, tmp_path, capsys):
    """A node that was never in shows a key that nobody keeps. With --dry or in a private study it sends nothing."""
    pytest.importorskip("grpc")
    ticket = Ticket.read(here / "site" / "tickets" / "berlin.ticket")
    with closing(
        GrpcCarrier("127.0.0.1", 0, run=ticket.digest, authority=here / "site" / "authority", nodes=3)
    ) as carrier:
        carrier.admit({}, frozenset({"berlin"}))
        ticket.model_copy(update={"address": f"127.0.0.1:{carrier.port}"}).write(tmp_path / "berlin.ticket")
        words = ["join", tmp_path / "berlin.ticket", "--data", "puls.csv", "--home", tmp_path / "home"]
        assert "no column 'pulse'" in refused(capsys, here, *words, "--dry")
        assert carrier.rows_apart() == (0, 0)
        command = [sys.executable, "-P", "-m", "fedtide", *map(str, words)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 2
        assert "the server was told that rows of this node do not agree with the study, and nothing" in ended.stdout
        assert ended.stderr.count("\n") == 1
        assert carrier.rows_apart() == (1, 0)
        assert carrier.knocked() == {}
    assert not (tmp_path / "home").exists()
    line = "the server does not know that this node cannot take part"
    assert done(*words) == 2
    assert line in " ".join(capsys.readouterr().out.split())
    privacy = {"epsilon": 8.0, "delta": 1e-5, "clip": {"delta": 1.0, "loss": 5.0}, "distance": 2}
    study = hospitals(tmp_path, wire={"fewest": 3, "privacy": privacy})
    assert done("deploy", study, "--method", "FedAvg", "--nodes", "a,b,c", "--out", tmp_path / "site") == 0
    assert done("join", tmp_path / "site" / "tickets" / "a.ticket", "--data", here / "puls.csv") == 2
    assert "is told nothing of that, because the study is private" in " ".join(capsys.readouterr().out.split())


def test_rows_in_another_unit_are_said_before_a_node_joins(tmp_path, capsys):
    source = {"kind": "csv", "path": str(tmp_path / "pilot.csv"), "client": "hospital", "scaled": True}
    study = hospitals(tmp_path, data={"source": source})
    header, *rows = (tmp_path / "berlin.csv").read_text().splitlines()
    other = [",".join([str(100 + float(row.split(",")[0])), *row.split(",")[1:]]) for row in rows]
    (tmp_path / "other.csv").write_text("\n".join([header, *other]) + "\n")
    assert done("deploy", study, "--method", "FedAvg", "--nodes", "berlin,b,c", "--out", tmp_path / "site") == 0
    ticket, said = tmp_path / "site" / "tickets" / "berlin.ticket", []
    for name in ("berlin", "other"):
        capsys.readouterr()
        assert done("join", ticket, "--data", tmp_path / f"{name}.csv", "--home", tmp_path / "home", "--dry") == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "is it another unit?" not in said[0]
    assert "pulse: 60 of 60 values are more than 3 deviations from the study's mean" in said[1]
    assert "the server is told that rows here are far from the study's, and not of what" in said[1]
    seats = [
        Seat.read(Ticket.read(ticket), [tmp_path / f"{name}.csv"], None, tmp_path / "home")
        for name in ("berlin", "other")
    ]
    assert [seat.line.warned for seat in seats] == [False, True]


def test_a_server_that_is_stopped_says_how_to_go_on(here, capsys, monkeypatch):
    def stopped(*unused, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedtide.site.serve.serve", stopped)
    assert done("serve", "site") == 130
    assert "stopped, and all rounds are saved; go on with: fedtide serve site" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_before_a_node_runs(here, tmp_path, capsys):
    pytest.importorskip("grpc")
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ask = ["--data", "berlin.csv", "--home", home, "--health", taken.getsockname()[1]]
        line = refused(capsys, here, "join", "site/tickets/berlin.ticket", *ask)
    assert "allowed: a free port of this machine" in line


def test_a_site_is_never_written_over(here, capsys):
    line = refused(capsys, here, "deploy", "study.toml", "--method", "SCAFFOLD", "--nodes", "a,b,c", "--out", "site")
    assert line == "site: already exists, allowed: a new or empty folder with --out"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "Nobody", "--nodes", "a,b,c"], "--method: found 'Nobody', allowed: 'FedAvg', 'SCAFFOLD'"),
        (["--method", "SCAFFOLD", "--nodes", "a,b,A"], "name: found 'A'"),
        (["--method", "SCAFFOLD", "--nodes", "a,b,c", "--address", "here"], "--address: found 'here'"),
        (["--method", "SCAFFOLD", "--nodes", "a"], "type --set method.SCAFFOLD.cohort=1"),
        (["--method", "SCAFFOLD"], "type --nodes berlin,lyon,oslo"),
        ([], "allowed: 'FedAvg', 'SCAFFOLD'; type --method FedAvg"),
        (["--nodes", "a,b,c"], "allowed: 'FedAvg', 'SCAFFOLD'; type --method FedAvg"),
        (
            ["--set", "rounds=1", "seeds=[1]"],
            "is one argument too many; repeat the option for each value: --set seeds=[1]",
        ),
    ],
)
def test_mistakes_of_deploy_are_named(here, capsys, words, said):
    assert said in refused(capsys, here, "deploy", "study.toml", *words, "--out", "new")


@pytest.mark.parametrize(
    ("name", "cohort", "option"),
    [
        ("IFCA, two models", 3, "'method.IFCA, two models.cohort=2'"),
        ("IFCA, K = 2", 3, "method.1.cohort=2"),
        ("IFCA", {"kind": "uniform", "clients_per_round": 3}, "method.IFCA.cohort.clients_per_round=2"),
    ],
)
def test_a_cohort_larger_than_the_nodes_is_set_as_the_error_says(tmp_path, capsys, name, cohort, option):
    methods = [{"algorithm": "fedavg", "cohort": 2}, {"name": name, "algorithm": "ifca", "cohort": cohort}]
    words = ["deploy", hospitals(tmp_path, method=methods), "--method", name, "--nodes", "a,b"]
    line = refused(capsys, tmp_path, *words, "--out", tmp_path / "site")
    assert "the nodes have 2 clients" in line
    assert line.endswith(f"type --set {option}")
    assert done(*words, "--set", *shlex.split(option), "--out", tmp_path / "site") == 0


@pytest.mark.parametrize(("scale", "scaled", "said"), [(1.0, False, 0), (1e4, False, 1), (1e4, True, 0)])
def test_features_that_differ_by_orders_of_magnitude_are_noted(tmp_path, capsys, scale, scaled, said):
    source = {"kind": "csv", "path": str(tmp_path / "pilot.csv"), "client": "hospital", "scaled": scaled}
    study = hospitals(tmp_path, data={"source": source})
    with open(tmp_path / "pilot.csv", newline="") as file:
        header, *lines = csv.reader(file)
    with open(tmp_path / "pilot.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *([line[0], float(line[1]) * scale, *line[2:]] for line in lines)])
    assert done("deploy", study, "--method", "FedAvg", "--nodes", "a,b,c", "--out", tmp_path / "site") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "nothing is scaled" in line]
    assert len(notes) == said
    assert all(re.search("feature age varies .* times as much as .*; set data.source.scaled = true", x) for x in notes)


@pytest.mark.parametrize(("nodes", "needed"), [("north:2,south:2", 4), ("a,b,c,d", 3)])
def test_deploy_says_how_many_clients_a_cluster_needs(tmp_path, capsys, nodes, needed):
    method = [{"algorithm": "ifca", "cohort": 4, "local": {"lr": 0.1, "batch_size": 20}}]
    study = hospitals(tmp_path, method=method, wire={"secure": True, "fewest": 3})
    assert done("deploy", study, "--nodes", nodes, "--out", tmp_path / "site") == 0
    said = (
        f"sums: that of a cluster is opened if {needed} clients or more choose it in a round; else it stays as it was"
    )
    assert said in " ".join(capsys.readouterr().out.split())


def test_the_plan_of_a_private_study_is_said(tmp_path, capsys):
    privacy = {"epsilon": 8.0, "delta": 1e-5, "clip": {"delta": 1.0, "loss": 5.0}, "distance": 2}
    study = hospitals(tmp_path, wire={"fewest": 3, "privacy": privacy})
    assert done("deploy", study, "--method", "FedAvg", "--nodes", "a,b,c", "--out", tmp_path / "site") == 0
    said = capsys.readouterr().err
    assert "each client may spend epsilon 8 at delta 1e-05, with answers in at most 2 of 4 rounds" in said
    assert "two answers of a client are at least 2 rounds apart" in said
    assert "the server adds noise to sums (multiplier " in said
    assert re.search("warning: noise on the mean of 3 clients is about [0-9]+ times as long as the mean can be", said)


def test_each_command_says_what_comes_next(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = hospitals(tmp_path, method=[{"algorithm": "fedavg", "cohort": 3}], deploy={"fewest": 2})
    assert done("deploy", study, "--nodes", "berlin,lyon,oslo") == 0, "the only method needs no --method"
    assert "when the key of a node comes: fedtide admit site NODE NODE.pub" in capsys.readouterr().out
    assert done("invite", "site", "paris:2") == 0
    out = capsys.readouterr().out
    assert "next: send each node its ticket" in out
    assert "when the key of a node comes: fedtide admit site NODE NODE.pub" in out
    make_node_key(tmp_path / "paris.key", tmp_path / "paris.pub", "paris")
    assert done("admit", "site", "paris", "paris.pub") == 0
    out = capsys.readouterr().out
    assert "paris (clients 3, 4) is admitted" in out
    assert "to let paris in: fedtide serve site" in out


@pytest.mark.parametrize(("wire", "fewest"), [({}, 2), ({"wire": {"fewest": 3}}, 3)])
def test_a_server_says_how_many_clients_a_round_waits_for(tmp_path, capsys, wire, fewest):
    study, site = hospitals(tmp_path, deploy={"fewest": 2}, **wire), tmp_path / "site"
    assert done("deploy", study, "--method", "FedAvg", "--nodes", "berlin,lyon,oslo", "--out", site) == 0
    capsys.readouterr()
    assert done("serve", site, "--dry") == 0
    assert f"if {fewest} clients or more are connected" in capsys.readouterr().out


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_admit_and_status(here, capsys, monkeypatch):
    make_node_key(here / "lyon.key", here / "lyon.pub", "lyon")
    capsys.readouterr()
    assert done("admit", "site", "lyon", "lyon.pub") == 0
    assert "lyon (client 1) is admitted: SHA256:" in capsys.readouterr().out
    assert done("status", "site") == 0
    out = capsys.readouterr().out
    assert out.count("not admitted") == 2
    assert "never served" in out
    monkeypatch.setattr("fedtide.site.live.time.sleep", interrupt)
    assert done("status", "site", "--follow") == 130
    assert "server: never served; start it with: fedtide serve site" in capsys.readouterr().out
    assert "is a private key" in refused(capsys, here, "admit", "site", "lyon", "lyon.key")
    assert "not a site" in refused(capsys, here, "admit", here, "lyon", "lyon.pub")
    assert "not a site" in refused(capsys, here, "status", here)
    assert "not a site" in refused(capsys, here, "serve", "berlin.csv")
    assert "no such folder" in refused(capsys, here, "replay", "site/run")


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_a_site_that_others_can_look_into_is_not_served(here, capsys):
    (here / "site").chmod(0o755)
    try:
        assert "site: mode: found '0755', allowed: 0700" in refused(capsys, here, "serve", "site")
    finally:
        (here / "site").chmod(0o700)


def test_what_is_missing_is_named(here, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    library.cache_clear()
    words = ["deploy", "study.toml", "--method", "SCAFFOLD", "--nodes", "a,b,c", "--out", "new"]
    assert refused(capsys, here, *words).endswith('pip install "fedtide[deploy]"')
    words = ["join", "site/tickets/berlin.ticket", "--data", "berlin.csv", "--dry"]
    assert refused(capsys, here, *words).endswith('pip install "fedtide[deploy]"')
