"""Whose keys a node shares masks with: those that its owner names, or the first that came with a name."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cryptography")

from fedtide.core.errors import FedtideError
from fedtide.site import certificates
from fedtide.site.policy import Peers, Policy


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("lyon", "oslo", "paris"):
        certificates.make_node_key(folder / name, folder / f"{name}.pub", name)
    return {name: certificates.read_public_key(folder / f"{name}.pub")[0] for name in ("lyon", "oslo", "paris")}


def test_the_first_key_of_a_name_is_taken_and_said_and_no_other_one_after_it(tmp_path, keys):
    said: list[str] = []
    for _ in range(2):  # as after a start
        peers = Peers(tmp_path / "peers.json", Policy, said.append)
        assert peers.trusts("lyon", keys["lyon"]) is None
    print_ = certificates.fingerprint(keys["lyon"])
    assert said == [f"masks are shared with lyon from now on, key {print_}: compare it with its owner"]
    assert peers.trusts("lyon", keys["oslo"]) == (
        f"its key is {certificates.fingerprint(keys['oslo'])}, and it was another before; ask its owner"
    )
    assert peers.trusts("oslo", keys["lyon"]) == f"its key {print_} is that of another node, too"
    assert json.loads((tmp_path / "peers.json").read_text()) == {"lyon": keys["lyon"]}


def test_only_peers_that_the_owner_names(tmp_path, keys):
    policy = Policy(peers=(certificates.fingerprint(keys["lyon"]),))
    peers = Peers(tmp_path / "peers.json", lambda: policy, print)
    assert peers.trusts("lyon", keys["lyon"]) is None
    assert peers.trusts("oslo", keys["oslo"]) == (
        f"its key {certificates.fingerprint(keys['oslo'])} is not among the peers that the owner named"
    )


def test_what_is_no_key_and_rules_that_cannot_be_read(tmp_path, keys):
    def broken() -> Policy:
        raise FedtideError("policy.toml: damaged")

    for peers, key in (
        (Peers(tmp_path / "a", Policy, print), "ssh-rsa AAAA"),
        (Peers(tmp_path / "a", broken, print), keys["lyon"]),
    ):
        assert peers.trusts("lyon", key) == "its registered key is none, or the owner's rules cannot be read now"
