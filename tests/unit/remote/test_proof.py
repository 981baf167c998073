"""A signature shows a node's key for one study, one authority, one name and one stream, and for nothing else."""

import base64

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedtide.remote.grpc.stream_protocol import claim_bytes
from fedtide.wire.keys import sign, spell_public, verify_signature

SAID = {"run": "r", "authority": b"-----BEGIN\nAAAA\n", "name": "oslo", "asked": "a" * 64, "nonce": "b" * 64}


@pytest.fixture(scope="module")
def key():
    return ec.generate_private_key(ec.SECP384R1())


def line_of(private):
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def test_a_signature_holds_for_what_was_signed(key):
    said = claim_bytes(**SAID)
    assert verify_signature(spell_public(key.public_key()), sign(key, said), said)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("run", "s"), ("run", ""), ("authority", b"-----BEGIN\nAAAB\n"), ("name", "osl"), ("name", "oslo "),
        ("asked", "a" * 63 + "b"), ("asked", "b" * 64), ("nonce", "a" * 64), ("nonce", "b" * 63),
    ],
)  # fmt: skip
def test_a_signature_holds_for_nothing_else(key, what, other):
    signature = sign(key, claim_bytes(**SAID))
    assert not verify_signature(spell_public(key.public_key()), signature, claim_bytes(**SAID | {what: other}))


def test_a_certificate_that_was_wrapped_otherwise_is_the_same(key):
    one, two = (claim_bytes(**SAID | {"authority": text}) for text in (b"-----A\nBC\n", b"-----A\r\nB\nC"))
    assert one == two


@pytest.mark.parametrize(
    "make",
    [
        lambda: ed25519.Ed25519PrivateKey.generate(),
        lambda: rsa.generate_private_key(65537, 2048),
        lambda: dsa.generate_private_key(1024),
        lambda: ec.generate_private_key(ec.SECP256R1()),
    ],
    ids=["ed25519", "rsa", "dsa", "another curve"],
)
@pytest.mark.filterwarnings("ignore")  # some of them are told to be old
def test_keys_of_other_kinds_hold_for_nothing(key, make):
    said = claim_bytes(**SAID)
    try:
        other = make()
    except ValueError:  # this version makes none any more
        pytest.skip("no such keys")
    signing = other if isinstance(other, ec.EllipticCurvePrivateKey) else key
    assert not verify_signature(line_of(other), sign(signing, said), said)


@pytest.mark.parametrize("change", ["{} me@here", "{}\n", " {}", "{} "])
def test_a_line_with_more_than_the_key_is_not_the_line_that_is_admitted(key, change):
    said, line = claim_bytes(**SAID), spell_public(key.public_key())
    assert not verify_signature(change.format(line), sign(key, said), said)


@pytest.mark.parametrize(
    "line",
    [
        "", " ", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384 ", "ecdsa-sha2-nistp384 AAAA", "\ud800", "\0" * 50, "é",
        "ssh-rsa AAAA", "ecdsa-sha2-nistp384-cert-v01@openssh.com AAAA", "sk-ecdsa-sha2-nistp256@openssh.com AAAA",
        "ecdsa-sha2-nistp384 " + base64.b64encode(b"\xff" * 130).decode(), "x" * 4000,
    ],
    ids=range(13),
)  # fmt: skip
def test_a_line_that_is_no_key_holds_for_nothing(key, line):
    said = claim_bytes(**SAID)
    assert not verify_signature(line, sign(key, said), said)


def test_a_point_that_is_not_on_the_curve_holds_for_nothing(key):
    kind, code = spell_public(key.public_key()).split(" ")
    blob = base64.b64decode(code)
    wrong = blob[:-97] + b"\x04" + bytes(96)
    said = claim_bytes(**SAID)
    assert not verify_signature(f"{kind} {base64.b64encode(wrong).decode()}", sign(key, said), said)
