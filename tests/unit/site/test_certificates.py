"""Keys and certificates: what is made, what is refused."""

import os
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from shutil import which

import pytest

from fedtide.core.errors import FedtideError
from fedtide.site import certificates

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    folder = tmp_path_factory.mktemp("authority")
    certificates.make_authority(folder, "fl.example.org:8300")
    return folder


@pytest.fixture
def own(tmp_path):
    """An authority to be changed."""
    certificates.make_authority(tmp_path, "10.0.0.5:8300")
    return tmp_path


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


def test_the_server_is_not_taken_for_another_and_no_other_for_it(authority, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        handshake(authority, "other.example.org")
    certificates.make_authority(tmp_path, "fl.example.org:8300")
    (tmp_path / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, "fl.example.org")


def test_a_certificate_is_renewed_when_it_ends_soon_or_the_host_moves(own, monkeypatch):
    before = (own / "server.crt").read_bytes()
    assert not certificates.renew_if_due(own, "10.0.0.5:8400")
    assert (own / "server.crt").read_bytes() == before
    assert certificates.renew_if_due(own, "10.0.0.6:8300")
    assert handshake(own, "10.0.0.6")
    monkeypatch.setattr(certificates, "SOON", timedelta(days=500))
    assert certificates.renew_if_due(own, "10.0.0.6:8300")
    assert handshake(own, "10.0.0.6")


def test_a_certificate_of_a_clock_that_was_ahead_is_renewed_once_the_clock_is_right(own, monkeypatch):
    class Ahead(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=370)

    with monkeypatch.context() as changed:
        changed.setattr(certificates, "datetime", Ahead)
        assert certificates.renew_if_due(own, "10.0.0.5:8300")
    assert certificates.renew_if_due(own, "10.0.0.5:8300")
    assert handshake(own, "10.0.0.5")
    assert not certificates.renew_if_due(own, "10.0.0.5:8300")


@pytest.mark.parametrize("damage", ["garbage", "another"])
def test_a_key_that_does_not_fit_the_certificate_is_renewed_with_it(own, damage):
    before = (own / "server.key").read_bytes()
    if damage == "another":
        certificates.renew(own, "10.0.0.5:8300")
    (own / "server.key").write_bytes(before if damage == "another" else b"garbage")
    assert certificates.renew_if_due(own, "10.0.0.5:8300") == "the server's certificate was made anew"
    assert handshake(own, "10.0.0.5")


def test_an_authority_that_ends_soon_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "AUTHORITY", timedelta(days=20))
    certificates.make_authority(tmp_path, "10.0.0.5:8300")
    assert "authority ends on" in certificates.renew_if_due(tmp_path, "10.0.0.5:8300")


def test_an_authority_without_its_key_is_said_when_a_certificate_ends(own, monkeypatch):
    (own / "ca.key").unlink()
    assert certificates.renew_if_due(own, "10.0.0.5:8300") == ""
    monkeypatch.setattr(certificates, "SOON", timedelta(days=500))
    before = (own / "server.crt").read_bytes()
    line = certificates.renew_if_due(own, "10.0.0.5:8300")
    assert line.startswith(f"the server's certificate ends in 396 days: {own / 'ca.key'}: not there, and needed")
    assert (own / "server.crt").read_bytes() == before
    with pytest.raises(FedtideError, match="not there, and needed for a new certificate"):
        certificates.renew_if_due(own, "10.0.0.6:8300")


def test_a_damaged_authority_is_one_line(own):
    (own / "ca.crt").write_text("garbage")
    with pytest.raises(FedtideError, match=r"ca\.crt: damaged or not one certificate"):
        certificates.renew_if_due(own, "10.0.0.5:8300")
    (own / "ca.crt").unlink()
    with pytest.raises(FedtideError, match=r"ca\.crt: no such file"):
        certificates.renew_if_due(own, "10.0.0.5:8300")


@pytest.mark.parametrize(("days", "word"), [(-2, "valid from"), (4000, "valid until")])
def test_a_wrong_clock_is_named(authority, days, word):
    now = datetime.now(UTC) + timedelta(days=days)
    with pytest.raises(FedtideError, match=f"berlin.ticket: {word} .* this machine's clock says {now:%Y-%m-%d}"):
        certificates.check_authority((authority / "ca.crt").read_bytes(), "berlin.ticket", now)


def test_certificates_that_are_not_those_of_one_authority(authority):
    ca, server = ((authority / name).read_bytes() for name in ("ca.crt", "server.crt"))
    empty = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    damaged = "t: damaged or not one certificate"
    for content, line in (
        (b"", damaged), (b"nonsense", damaged), (empty, damaged), (ca * 2, "2 certificates"),
        (server, "not the certificate of an authority"),
    ):  # fmt: skip
        with pytest.raises(FedtideError, match=line):
            certificates.check_authority(content, "t", datetime.now(UTC))


@pytest.fixture
def node(tmp_path):
    certificates.make_node_key(tmp_path / "berlin.key", tmp_path / "berlin.pub", "berlin")
    return tmp_path


def test_a_nodes_key_is_what_openssh_takes(node):
    line, name = certificates.read_public_key(node / "berlin.pub")
    assert name == "berlin"
    assert (node / "berlin.key").stat().st_mode & 0o777 == 0o600
    assert certificates.read_private_key(node / "berlin.key").curve.name == "secp384r1"
    if which("ssh-keygen"):
        said = subprocess.run(["ssh-keygen", "-lf", node / "berlin.pub"], capture_output=True, text=True, check=True)
        assert certificates.fingerprint(line) in said.stdout


def test_a_private_key_is_for_its_owner_alone(node):
    with pytest.raises(FedtideError, match="is a private key, which stays with its node"):
        certificates.read_public_key(node / "berlin.key")
    (node / "berlin.key").chmod(0o644)
    with pytest.raises(FedtideError, match=r"found '0644', allowed: 0600; mend it with: chmod 600"):
        certificates.read_private_key(node / "berlin.key")
    (node / "berlin.key").chmod(0o600)
    (node / "berlin.key").write_bytes(b"no key")
    with pytest.raises(FedtideError, match="damaged or not a private key of OpenSSH"):
        certificates.read_private_key(node / "berlin.key")


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
        certificates.read_public_key(path)


def test_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FedtideError, match="is a pipe or a device"):
        certificates.read_public_key(tmp_path / "pipe")
    with pytest.raises(FedtideError, match="is a folder"):
        certificates.read_public_key(tmp_path)
    with pytest.raises(FedtideError, match="no such file"):
        certificates.read_public_key(tmp_path / "none")
