"""A site whose nodes mask their sums, made as `fedtide join` makes them, in this process."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedtide.core.errors import FedtideError
from fedtide.site.seat import RECORD
from fedtide.site.site import Site
from fedtide.site.status import describe_status
from helpers.near_sites import nodes_of, played, site_of, words


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> tuple[Path, Site, Any]:
    folder = tmp_path_factory.mktemp("masked")
    site = site_of(folder, wire={"secure": True})
    return folder, site, played(site, nodes_of(folder, site, lambda name: "secure = true\n"))


def test_sums_are_opened_and_what_a_node_opened_stands_in_its_record(masked):
    folder, _, fleet = masked
    assert words(fleet) == {"answered"}
    told = [json.loads(line) for line in (folder / "berlin" / RECORD).read_text().splitlines() if line]
    assert [line["kind"] for line in told] == ["keys", "ask", "unmask", "ask", "unmask"]
    assert [line["opened"] for line in told if "opened" in line] == [{"0": [0, 1, 2]}] * 2
    assert set(json.loads((folder / "berlin" / "peers.json").read_text())) == {"lyon", "oslo"}
    assert len(list(filter(None, (folder / "berlin" / "opened").read_text().splitlines()))) == 2


def test_status_says_that_sums_are_masked(masked):
    _, site, _ = masked
    assert "sums: masked, opened for 3 clients or more" in list(describe_status(site, datetime.now(UTC)))


def test_an_owner_who_demands_masks_of_a_study_without(tmp_path):
    site = site_of(tmp_path)
    fleet = played(site, nodes_of(tmp_path, site, lambda name: "secure = true\n" if name == "oslo" else ""), rounds=1)
    reason = "refused: its owner allows masked sums alone, and its study does not mask them"
    assert words(fleet) == {"answered", reason}


def test_an_owner_who_knows_none_of_the_peers(tmp_path):
    site = site_of(tmp_path, wire={"secure": True})
    fleet = played(site, nodes_of(tmp_path, site, lambda name: "peers = []\n" if name == "oslo" else ""), rounds=1)
    found = words(fleet)
    assert any("is not among the peers that the owner named" in word for word in found)
    assert "answered" not in found, "of two no sum is opened"


def test_an_owner_who_wants_more_clients_than_there_are(tmp_path):
    site = site_of(tmp_path, wire={"secure": True})
    fleet = played(site, nodes_of(tmp_path, site, lambda name: "fewest = 4\n" if name == "oslo" else ""), rounds=1)
    refused = "refused: its owner does not answer for a sum of 3; allowed: 4 clients or more"
    assert words(fleet) == {"lost: it was not asked", refused}


def test_a_node_that_would_know_all_but_one_of_every_sum(tmp_path):
    words = r"--nodes: found '2 of 3 clients at lyon', but .* learn the others'; allowed: 2 clients or more"
    with pytest.raises(FedtideError, match=words):
        site_of(tmp_path, "berlin,lyon:2", wire={"secure": True})
