"""Keys and certificates: what is made, what is refused."""

from __future__ import annotations

import os
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from shutil import which

import pytest

from fedtide.core.errors import FedtideError
from fedtide.site import certificates as made

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    folder = tmp_path_factory.mktemp("authority")
    made.make_authority(folder, "fl.example.org:8300")
    return folder


def test_keys_are_for_their_owner_alone(authority):
    modes = {path.name: path.stat().st_mode & 0o777 for path in authority.iterdir()}
    assert modes["ca.key"] == modes["server.key"] == 0o600
    assert sorted(modes) == ["ca.crt", "ca.key", "server.crt", "server.key"]


def handshake(authority, host: str) -> bool:
    """Return whether a client that trusts the authority alone and the server shake hands."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(authority / "server.crt", authority / "server.key")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(authority / "ca.crt")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there, server_hostname=host), server.wrap_bio(there, back, server_side=True)]
    done = [False, False]
    for _ in range(10):
        for number, end in enumerate(ends):
            try:
                if not done[number]:
                    end.do_handshake()
                    done[number] = True
            except ssl.SSLWantReadError:
                pass
    return all(done)


@pytest.mark.parametrize("host", ["fl.example.org", "localhost", "127.0.0.1", "::1"])
def test_the_server_is_known_by_its_address_and_on_its_own_machine(authority, host):
    assert handshake(authority, host)


def test_the_server_is_not_taken_for_another(authority):
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        handshake(authority, "other.example.org")


def test_an_authority_knows_no_server_of_another(authority, tmp_path):
    made.make_authority(tmp_path, "fl.example.org:8300")
    (tmp_path / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, "fl.example.org")


def test_a_certificate_is_made_anew_when_it_ends_soon_or_the_host_moves(tmp_path, monkeypatch):
    made.make_authority(tmp_path, "10.0.0.5:8300")
    before = (tmp_path / "server.crt").read_bytes()
    assert not made.renew_if_due(tmp_path, "10.0.0.5:8400")
    assert (tmp_path / "server.crt").read_bytes() == before
    assert made.renew_if_due(tmp_path, "10.0.0.6:8300")
    assert handshake(tmp_path, "10.0.0.6")
    monkeypatch.setattr(made, "SOON", timedelta(days=500))
    assert made.renew_if_due(tmp_path, "10.0.0.6:8300")
    (tmp_path / "server.crt").unlink()  # killed while it was made anew
    monkeypatch.undo()
    assert made.renew_if_due(tmp_path, "10.0.0.6:8300")
    assert handshake(tmp_path, "10.0.0.6")


def test_an_authority_that_ends_soon_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(made, "AUTHORITY", timedelta(days=20))
    made.make_authority(tmp_path, "10.0.0.5:8300")
    assert "authority ends on" in made.renew_if_due(tmp_path, "10.0.0.5:8300")


def test_an_authority_without_its_key_says_what_is_needed_when_a_certificate_ends(tmp_path, monkeypatch):
    made.make_authority(tmp_path, "10.0.0.5:8300")
    (tmp_path / "ca.key").unlink()
    assert made.renew_if_due(tmp_path, "10.0.0.5:8300") == ""
    monkeypatch.setattr(made, "SOON", timedelta(days=500))
    before = (tmp_path / "server.crt").read_bytes()
    said = made.renew_if_due(tmp_path, "10.0.0.5:8300")
    assert said.startswith(f"the server's certificate ends in 396 days: {tmp_path / 'ca.key'}: not there, and needed")
    assert (tmp_path / "server.crt").read_bytes() == before
    with pytest.raises(FedtideError, match="not there, and needed for a new certificate"):
        made.renew_if_due(tmp_path, "10.0.0.6:8300")


@pytest.mark.parametrize(("days", "word"), [(-2, "valid from"), (4000, "valid until")])
def test_a_wrong_clock_is_named(authority, days, word):
    now = datetime.now(UTC) + timedelta(days=days)
    with pytest.raises(FedtideError, match=f"berlin.ticket: {word} .* this machine's clock says {now:%Y-%m-%d}"):
        made.check_authority((authority / "ca.crt").read_bytes(), "berlin.ticket", now)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_refused(content):
    with pytest.raises(FedtideError, match="t: damaged or not one certificate"):
        made.check_authority(content, "t", datetime.now(UTC))


def test_a_servers_certificate_is_no_authority(authority):
    with pytest.raises(FedtideError, match="not the certificate of an authority"):
        made.check_authority((authority / "server.crt").read_bytes(), "t", datetime.now(UTC))
    two = (authority / "ca.crt").read_bytes() * 2
    with pytest.raises(FedtideError, match="2 certificates"):
        made.check_authority(two, "t", datetime.now(UTC))


@pytest.fixture
def node(tmp_path):
    made.make_node_key(tmp_path / "berlin.key", tmp_path / "berlin.pub", "berlin")
    return tmp_path


def test_a_nodes_key_is_what_openssh_takes(node):
    line, name = made.read_public_key(node / "berlin.pub")
    assert name == "berlin"
    assert (node / "berlin.key").stat().st_mode & 0o777 == 0o600
    assert made.read_private_key(node / "berlin.key").curve.name == "secp384r1"
    if which("ssh-keygen"):
        said = subprocess.run(["ssh-keygen", "-lf", node / "berlin.pub"], capture_output=True, text=True, check=True)
        assert made.fingerprint(line) in said.stdout


def test_a_key_that_is_there_is_left_as_it_is(node):
    before = (node / "berlin.key").read_bytes()
    with pytest.raises(FedtideError, match=r"berlin\.key: is there already, and is left as it is"):
        made.make_node_key(node / "berlin.key", node / "berlin.pub", "berlin")
    assert (node / "berlin.key").read_bytes() == before
    assert sorted(path.name for path in node.iterdir()) == ["berlin.key", "berlin.pub"]


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_a_key_that_others_can_read_is_refused(node):
    (node / "berlin.key").chmod(0o644)
    with pytest.raises(FedtideError, match=r"found '0644', allowed: 0600; mend it with: chmod 600"):
        made.read_private_key(node / "berlin.key")


def test_a_private_key_is_not_admitted(node):
    with pytest.raises(FedtideError, match="is a private key, which stays with its node"):
        made.read_public_key(node / "berlin.key")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line.replace(b"nistp384 ", b"nistp256 "), "kind of key"),
        (lambda line: b"ssh-rsa AAAA berlin", "kind of key: found 'ssh-rsa'"),
        (lambda line: b"", "kind of key: found ''"),
        (lambda line: line[:80], "damaged or not a public key"),
        (lambda line: line.replace(line[100:104], b"!!!!"), "damaged or not a public key"),
        (lambda line: line[:120] + b"AAAAAAAA" + line[128:], "damaged or not a public key"),
        (lambda line: b"\xff\xfe" + line, "it is no text"),
        (lambda line: line * 1000, "more than 20,000"),
    ],
)
def test_damaged_public_keys_are_refused(node, change, said):
    path = node / "berlin.pub"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FedtideError, match=said):
        made.read_public_key(path)


def test_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FedtideError, match="is a folder, a pipe or a device"):
        made.read_public_key(tmp_path / "pipe")
    with pytest.raises(FedtideError, match="is a folder, a pipe or a device"):
        made.read_public_key(tmp_path)
    with pytest.raises(FedtideError, match="no such file"):
        made.read_public_key(tmp_path / "none")


@pytest.mark.parametrize("damage", ["garbage", "another"])
def test_a_key_that_is_not_that_of_the_certificate_is_made_anew_with_it(tmp_path, damage):
    made.make_authority(tmp_path, "10.0.0.5:8300")
    before = (tmp_path / "server.key").read_bytes()
    if damage == "another":
        made.renew(tmp_path, "10.0.0.5:8300")
    (tmp_path / "server.key").write_bytes(before if damage == "another" else b"garbage")
    assert made.renew_if_due(tmp_path, "10.0.0.5:8300") == "the server's certificate was made anew"
    assert handshake(tmp_path, "10.0.0.5")


def test_a_damaged_authority_is_one_line(tmp_path):
    made.make_authority(tmp_path, "10.0.0.5:8300")
    (tmp_path / "ca.crt").write_text("garbage")
    with pytest.raises(FedtideError, match=r"ca\.crt: damaged or not one certificate"):
        made.renew_if_due(tmp_path, "10.0.0.5:8300")
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(FedtideError, match=r"ca\.crt: no such file"):
        made.renew_if_due(tmp_path, "10.0.0.5:8300")
