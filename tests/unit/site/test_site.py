"""Sites: what is made, read again, refused."""

from dataclasses import replace
from shutil import copytree
from unittest.mock import Mock

import numpy as np
import pytest

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.core.record import run_lock
from fedtide.site.certificates import make_node_key
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.deploying import make_site
from fedtide.site.machine import Log
from fedtide.site.parity import make_rehearsal, rehearse
from fedtide.site.site import Roster, Site, admit, invite, read_roster
from fedtide.site.site_commands import serve
from fedtide.site.tickets import Ticket
from helpers.hospitals import CLASSES, COLUMNS, NAMES, STUDY, hospitals
from helpers.near_sites import site_of
from helpers.shell import contents

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Site:
    return site_of(tmp_path_factory.mktemp("hospitals"), played="SCAFFOLD", address="fl.example.org:8300")


@pytest.fixture
def copy(made, tmp_path) -> Site:
    """A site to be changed."""
    return replace(made, root=copytree(made.root, tmp_path / "site"))


def test_a_site_is_read_as_it_was_made(made):
    site = Site.read(made.root)
    assert site == made
    assert (site.method.name, site.deploy.address) == ("SCAFFOLD", "fl.example.org:8300")
    assert site.experiment.data.partition.clients == 3


def test_every_node_gets_a_ticket_of_its_own(made):
    for number, name in enumerate(NAMES):
        ticket = Ticket.read(made.root / "tickets" / f"{name}.ticket")
        assert (ticket.node, ticket.clients, ticket.digest) == (name, (number,), made.digest)
        assert (ticket.rows.columns, ticket.rows.labels) == (COLUMNS, CLASSES)
        assert ticket.experiment.method[0].settings() == made.method.settings()
        assert "pilot" not in ticket.to_toml()
    server, node = (algorithm_without_rows(study, made.about.rows) for study in (made.experiment, ticket.experiment))
    assert (server.works.keys(), server.traits.reveals) == (node.works.keys(), node.traits.reveals)


def test_no_secret_is_in_a_ticket_and_none_can_be_read_by_others(made):
    keys = {path.name: path.stat().st_mode & 0o777 for path in made.authority.glob("*.key")}
    assert keys == {"ca.key": 0o600, "server.key": 0o600}
    assert not any("PRIVATE" in path.read_text() for path in made.root.rglob("*.ticket"))
    for folder in (made.root, made.root / "authority", made.root / "tickets"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("", "name: found ''"),
        ("berlin,berlin", "--nodes: found 'berlin', allowed: each name once on a roster"),
        ("berlin,,oslo", "name: found ''"),
        ("Berlin", "name: found 'Berlin'"),
        ("../x", "name: found '../x'"),
        *((f"berlin:{count}", f"found ':{count}'") for count in ("0", "x", "-1", "99999999999")),
    ],
)
def test_rosters_that_cannot_be_are_refused(names, said):
    with pytest.raises(FedtideError, match=said):
        Roster.of(names)


def simulated(**changes):
    return {"method": [{"name": "A", **changes}]}


@pytest.mark.parametrize(
    ("changes", "nodes", "method", "said"),
    [
        ({}, "a,b,c", "Scaffold", "unknown|found 'Scaffold'.*did you mean 'SCAFFOLD'"),
        ({"sweep": {"method.SCAFFOLD.local.lr": [0.1, 0.2]}}, "a,b,c", "SCAFFOLD", "sweep: found one"),
        (simulated(algorithm="oracle", cohort=3), "a,b,c", "A", "found 'A', but it asks for .*only a simulation knows"),
        (simulated(algorithm="centralized"), "a,b,c", "A", "only a simulation knows"),
        (simulated(algorithm="fedtem", decide_per="oracle", cohort=3), "a,b,c", "A", "decide_per: found 'oracle'"),
        ({}, "a,b", "SCAFFOLD", "clients_per_round: found 3, but the nodes have 2 clients; allowed: at most 2"),
        ({"data": {"source": "gaussians", "public_samples": 5}}, "a,b,c", "SCAFFOLD", "public_samples: found 5"),
        ({"data": {"source": "play-roles"}}, "a,b,c", "SCAFFOLD", "does not fit rows"),
        ({"data": {"source": "python:os:getcwd"}}, "a,b,c", "SCAFFOLD", "os:getcwd"),
        (
            {"data": {"source": {"kind": "npz", "scaled": True}}},
            "a,b,c",
            "SCAFFOLD",
            "scaled: found True, but each node would scale by rows of its own",
        ),
        ({"fleet": {"device": "auto"}}, "a,b,c", "SCAFFOLD", "fleet.device: found 'auto', allowed: cpu"),
        (
            {"data": {**STUDY["data"], "split": {"by": "time"}}},
            "a,b,c",
            "SCAFFOLD",
            "data.split.by: found 'time', but nodes divide rows by their content; allowed: random",
        ),
        ({"deploy": {"address": "nowhere"}}, "a,b,c", "SCAFFOLD", "deploy.address: found 'nowhere'"),
        ({"deploy": {"every": "1 hour"}}, "a,b,c", "SCAFFOLD", "deploy.every: found '1 hour', allowed: a number and s"),
        ({"deploy": {"deadline": "0s"}}, "a,b,c", "SCAFFOLD", "deploy.deadline: found '0s', allowed: 1s to 366d"),
        ({"deploy": {"fewest": 0}}, "a,b,c", "SCAFFOLD", "deploy.fewest: found 0"),
        ({"deploy": {"fewest": 4}}, "a,b,c", "SCAFFOLD", "deploy.fewest: found 4, allowed: 1 to 3"),
        ({"deploy": {"heaviest": 0.0}}, "a,b,c", "SCAFFOLD", "deploy.heaviest: found 0.0"),
        ({"deploy": {"evry": "1h"}}, "a,b,c", "SCAFFOLD", "deploy.evry: unknown key.*did you mean 'every'"),
    ],
)
def test_studies_that_cannot_be_deployed_are_refused(tmp_path, changes, nodes, method, said):
    hospitals(tmp_path)
    before = contents(tmp_path)
    study = {**STUDY, **changes}
    if (source := study["data"]["source"]) and isinstance(source, dict):
        if source["kind"] == "npz":
            np.savez(tmp_path / "pilot.npz", x=np.arange(12.0).reshape(6, 2), y=np.arange(6) % 3)
            before = contents(tmp_path)
        study["data"] = {**study["data"], "source": source | {"path": str(tmp_path / f"pilot.{source['kind']}")}}
    with pytest.raises(FedtideError, match=said) as error:
        make_site(from_dict(study, where="s.toml"), method, Roster.of(nodes), tmp_path / "site", None, "s.toml")
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


def test_settings_of_simulations_alone_are_left_out_of_a_site(tmp_path):
    fleet = {"kind": "stacked", "threads": 2}
    site = site_of(tmp_path, fleet=fleet, stop_at=0.99, forgetting={"rounds": [0]}, baseline="FedAvg")
    study = site.experiment
    assert (study.fleet.kind, study.fleet.threads, study.stop_at.accuracy) == ("local", 2, 0.99)
    assert study.forgetting is study.baseline is None
    assert Site.read(site.root) == site


def test_a_study_that_was_changed_is_refused_and_its_deploy_table_is_not(copy):
    path = copy.root / "study.toml"
    text = path.read_text()
    path.write_text(text.replace('deadline = "10m"', 'deadline = "2m"'))
    assert Site.read(copy.root).deploy.deadline == "2m"
    path.write_text(text.replace("rounds = 4", "rounds = 5"))
    with pytest.raises(FedtideError, match=r"study\.toml: was changed, and nodes have tickets of what it was"):
        Site.read(copy.root)


@pytest.mark.parametrize("name", ["site.toml", "roster.toml", "study.toml"])
@pytest.mark.parametrize("content", [b"", b"\xff", b"a = [", b"node = 5\nscheme = 1", b"[" * 100_000])
def test_damaged_sites_are_refused_in_one_line(copy, name, content):
    (copy.root / name).write_bytes(content)
    with pytest.raises(FedtideError, match=name) as error:
        Site.read(copy.root)
    assert "\n" not in str(error.value)


@pytest.fixture
def berlin(tmp_path):
    make_node_key(tmp_path / "berlin.key", tmp_path / "berlin.pub", "berlin")
    return tmp_path / "berlin.pub"


def test_a_key_is_admitted_once(copy, berlin):
    node, done = admit(copy.root, "berlin", berlin)
    assert (node.name, done) == ("berlin", "is admitted")
    keys = {node.name: node.key for node in read_roster(copy.root).node}
    assert keys == {"berlin": node.key, "lyon": None, "oslo": None}
    assert admit(copy.root, "berlin", berlin) == (node, "was admitted before")


def test_a_key_of_another_is_refused(copy, berlin, tmp_path):
    with pytest.raises(FedtideError, match=r"node: found 'berlin', allowed: oslo"):
        admit(copy.root, "oslo", berlin)
    admit(copy.root, "berlin", berlin)
    before = (copy.root / "roster.toml").read_bytes()
    stolen = tmp_path / "lyon.pub"
    stolen.write_text(berlin.read_text().replace(" berlin", " lyon"))
    make_node_key(tmp_path / "new.key", tmp_path / "new.pub", "berlin")
    make_node_key(tmp_path / "paris.key", tmp_path / "paris.pub", "paris")
    for name, file, line in (
        ("lyon", "lyon.pub", "is the key of 'berlin'"),
        ("berlin", "new.pub", "'berlin' was admitted with another key"),
        ("paris", "paris.pub", "node: found 'paris', allowed: berlin, lyon, oslo"),
    ):
        with pytest.raises(FedtideError, match=line):
            admit(copy.root, name, tmp_path / file)
    assert (copy.root / "roster.toml").read_bytes() == before


def test_a_roster_that_was_written_wrongly_is_refused(copy, berlin):
    admit(copy.root, "berlin", berlin)
    path = copy.root / "roster.toml"
    text = path.read_text()
    for old, new, said in (
        ("clients = [\n    1,\n]", "clients = [7]", "ids of clients"),
        ("lyon", "berlin", "each name once"),
        ("ecdsa-sha2-nistp384 AAAA", "ecdsa-sha2-nistp384 BBBB", "damaged or not a public key"),
        ("name = ", "nam = ", "unknown key"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(FedtideError, match=said):
            read_roster(copy.root)


def test_more_nodes_are_invited_with_the_next_clients(copy):
    (paris, porto) = invite(copy.root, "paris,porto:2")
    assert (paris.clients, porto.clients, porto.registered) == ((3,), (4, 5), 6)
    assert Ticket.read(copy.root / "tickets" / "porto.ticket") == porto
    found = Site.read(copy.root)
    assert [node.name for node in found.roster.node] == [*NAMES, "paris", "porto"]
    assert found.digest == copy.digest
    before = contents(copy.root)
    assert invite(copy.root, "paris,porto:2") == [paris, porto]  # as after a kill, or an output that was lost
    assert contents(copy.root) == before


def test_tickets_of_a_roster_that_could_not_be_written_are_gone(copy, monkeypatch):
    before = contents(copy.root)
    monkeypatch.setattr("fedtide.site.site.write_roster", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        invite(copy.root, "paris")
    assert contents(copy.root) == before


def test_another_version_serves_no_site_and_invites_nobody(copy):
    path, before = copy.root / "site.toml", f'fedtide = "{copy.about.versions["fedtide"]}"'
    path.write_text(path.read_text().replace(before, 'fedtide = "0.0.1"'))
    for use in (lambda: invite(copy.root, "paris"), lambda: serve(copy.root, dry=True)):
        with pytest.raises(FedtideError, match=r"version of fedtide: found .*, allowed: 0\.0\.1"):
            use()


def test_a_node_is_invited_once(copy):
    before = contents(copy.root)
    with pytest.raises(FedtideError, match="found 'oslo', allowed: each name once on a roster"):
        invite(copy.root, "paris,oslo")
    with pytest.raises(FedtideError, match=r"^NODES.*: found ''"):
        invite(copy.root, "")
    assert contents(copy.root) == before


def test_a_rehearsal_is_one_at_a_time_and_follows_no_link(tmp_path):
    site = site_of(tmp_path)
    with (
        run_lock(site.root, "site.toml"),
        pytest.raises(FedtideError, match=r"site\.toml: another process is playing this run; wait for it, or stop it"),
    ):
        rehearse(site, log=Log())
    (tmp_path / "elsewhere").mkdir()
    (site.root / "rehearsal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedtideError, match="rehearsal: is no folder; remove it"):
        make_rehearsal(site, 1)
    assert not list((tmp_path / "elsewhere").iterdir())
