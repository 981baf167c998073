"""The app that `fedtide deploy --flower` writes, and what its code may import; nothing here needs Flower."""

import ast
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from fedtide.site import deploying
from fedtide.site.tickets import Ticket
from helpers.hospitals import hospitals
from helpers.shell import contents, done, refused

MODULES = sorted(Path(deploying.__file__).parent.glob("flower*.py"))
ALLOWED = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def test_flower_is_met_at_its_public_door_alone():
    met = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                met |= {alias.name for alias in node.names if alias.name.split(".")[0] == "flwr"}
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                met.add(node.module)
                assert not [alias.name for alias in node.names if alias.name.startswith("_")], path
    assert met == ALLOWED


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    hospitals(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_app_holds_study_and_tickets_and_no_secret(here, capsys):
    words = ["--method", "SCAFFOLD", "--nodes", "berlin,lyon:2,oslo:2"]
    assert done("deploy", "study.toml", "--flower", "app", *words) == 0
    out = capsys.readouterr().out
    assert "app: app (SCAFFOLD, digest " in out
    assert "then: flwr run app" in out
    package = here / "app" / "fedtide_study"
    assert sorted(path.name for path in package.iterdir()) == [
        "__init__.py", "client_app.py", "roster.toml", "server_app.py", "site.toml", "study.toml", "tickets",
    ]  # fmt: skip
    ticket = Ticket.read(package / "tickets" / "lyon.toml")
    assert (ticket.clients, ticket.registered, ticket.authority) == ((1, 2), 5, "")
    assert ticket.versions["fedtide"] == version("fedtide")
    project = tomllib.loads((here / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"] == {"site": f"site-{ticket.digest}", "rehearsal": False}
    for end in ("server", "client"):
        made = ast.parse((package / f"{end}_app.py").read_text())
        assert [node.module for node in made.body if isinstance(node, ast.ImportFrom)][-1] == "fedtide.site.flower_app"


def test_without_names_each_client_is_a_node(here):
    hospitals(here, method=[{"name": "FedAvg", "algorithm": "fedavg", "cohort": 3}])
    assert done("deploy", "study.toml", "--flower", "app") == 0
    tickets = here / "app" / "fedtide_study" / "tickets"
    assert sorted(path.stem for path in tickets.iterdir()) == [f"node-{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--method: no value given, allowed: 'FedAvg', 'SCAFFOLD'"),
        (["--method", "Nobody"], "--method: found 'Nobody', allowed: 'FedAvg', 'SCAFFOLD'"),
        (["--method", "FedAvg", "--nodes", "a"], "clients_per_round"),
        (["--method", "FedAvg", "--nodes", "a,A"], "name: found 'A'"),
        (
            ["--method", "FedAvg", "--set", "wire.secure=true"],
            "wire: found a table, allowed: none in an app for Flower",
        ),
        (["--method", "FedAvg", "--set", "fleet.device=cuda"], "fleet.device"),
    ],
)
def test_mistakes_are_named_in_one_line(here, capsys, words, said):
    (here / "old").mkdir()
    (here / "old" / "file").touch()
    before = contents(here)
    assert said in refused(capsys, here, "deploy", "study.toml", "--flower", "app", *words)
    line = refused(capsys, here, "deploy", "study.toml", "--flower", "old", "--method", "FedAvg")
    assert line == "old: already exists, allowed: a new or empty folder with --flower"
    assert contents(here) == before
