"""What a node checks before it joins, and what it makes."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fedtide.core.atomic import lock
from fedtide.core.errors import FedtideError
from fedtide.site.certificates import read_private_key, read_public_key
from fedtide.site.node_process import keep_settings, write_settings
from fedtide.site.seat import Seat, check_size, check_versions, rules_of
from fedtide.site.site import Site
from fedtide.site.tickets import Ticket
from helpers.near_sites import site_of

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    return site_of(tmp_path_factory.mktemp("hospitals"), "a,berlin,c", "SCAFFOLD")


def seat(site: Site, home: Path, rules: Path | None = None) -> Seat:
    return Seat.read(
        Ticket.read(site.root / "tickets" / "berlin.ticket"), [site.root.parent / "berlin.csv"], rules, home
    )


def changed(site: Site, **changes) -> Ticket:
    return Ticket.read(site.root / "tickets" / "berlin.ticket").model_copy(update=changes)


def test_a_key_is_made_once_and_is_for_its_owner_alone(site, tmp_path):
    made = seat(site, tmp_path / "home")
    assert made.settle()
    assert (made.home.stat().st_mode & 0o777, made.key.stat().st_mode & 0o777) == (0o700, 0o600)
    before, (line, name) = made.key.read_bytes(), read_public_key(made.public)
    assert name == "berlin"
    made.public.unlink()
    again = seat(site, tmp_path / "home")
    assert not again.settle()
    assert again.key.read_bytes() == before
    assert read_public_key(again.public)[0] == line
    assert read_private_key(again.key).curve.key_size == 384
    assert "PRIVATE" not in made.copy.read_text()


def played(seat: Seat) -> None:
    """Settle, and keep the settings, as the node's process does once it has the lock of the folder."""
    seat.settle()
    keep_settings(write_settings(seat.home, seat.settings, seat.line))


def test_a_second_join_changes_nothing_of_a_node_that_runs(site, tmp_path):
    """Its next worker would take the rules and the rows of the second one."""
    home, rules = tmp_path / "home", tmp_path / "policy.toml"
    rules.write_text("fewest = 3\n")
    played(seat(site, home, rules))
    with open(home / "run" / "alive", "w") as alive:
        lock(alive.fileno())
        with pytest.raises(FedtideError, match="home: another process runs this node already; end it first"):
            seat(site, home).settle()
    assert rules_of(home, None) == rules


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are of POSIX")
def test_a_folder_that_others_could_read_or_replace_is_refused(site, tmp_path, monkeypatch):
    """Its owner could read the key in it, or put another folder in its place."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    with pytest.raises(FedtideError, match="home: mode: found '0755', allowed: 0700; mend it with: chmod 700"):
        seat(site, home)
    home.chmod(0o700)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(FedtideError, match="link: is a link, allowed: a folder"):
        seat(site, tmp_path / "link")
    assert seat(site, home)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(FedtideError, match=r"home: owner: found 'user \d+', allowed: user 12345, who runs this"):
        seat(site, home)


def test_rules_are_not_forgotten(site, tmp_path):
    """A node that is started again without --policy has the rules that it had."""
    home, rules = tmp_path / "home", tmp_path / "policy.toml"
    rules.write_text("fewest = 4\n")
    assert rules_of(home, None) is None
    first = seat(site, home, rules_of(home, rules))
    lines = list(first.describe())
    assert f"rules: {rules}" in lines
    assert "warning: your policy wants 4 clients in a sum, and the site has 3" in lines
    played(first)
    again = seat(site, home, rules_of(home, None))
    assert (again.rules, again.policy.fewest) == (rules, 4)
    rules.rename(tmp_path / "other.toml")
    with pytest.raises(FedtideError, match=r"the rules that this node had before are gone; .* --policy none"):
        rules_of(home, None)
    none = seat(site, home, rules_of(home, Path("none")))
    assert "rules: none" in list(none.describe())
    played(none)
    assert rules_of(home, None) is None
    spaced = tmp_path / " of ours \n"
    spaced.write_text("fewest = 4\n")
    played(seat(site, home, rules_of(home, spaced)))
    assert rules_of(home, None) == spaced


def test_a_network_that_no_machine_holds_is_refused_before_it_is_made(site):
    study = {**site.ticket(site.roster.node[0]).study, "model": {"kind": "mlp", "hidden": [1_000_000, 1_000_000]}}
    with pytest.raises(
        FedtideError, match=r"numbers of its model: found '1,000,00\d,.*', allowed: at most 1,000,000,000"
    ):
        check_size(changed(site, study=study).experiment, site.about.rows)
    study = {**site.ticket(site.roster.node[0]).study, "fleet": {"threads": 1000}}
    with pytest.raises(FedtideError, match=r"study: fleet.threads: found 1000, allowed: at most \d+ on this machine"):
        check_size(changed(site, study=study).experiment, site.about.rows)


def test_another_version_is_refused_and_another_package_is_told(site, tmp_path):
    ticket = changed(site, versions={"fedtide": "0.0.1", "torch": "1.0"})
    with pytest.raises(FedtideError, match=r"version of fedtide: found .*, allowed: 0\.0\.1, as at the server"):
        check_versions(ticket)
    other = replace(seat(site, tmp_path / "home"), ticket=ticket)
    assert [line.partition(" is ")[0] for line in other.describe()][-1] == "warning: torch"
