"""A signature shows a node's key for one study, one authority, one name and one stream, and for nothing else."""

from __future__ import annotations

import base64

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as some

from fedtide.remote.grpc.protocol import claim_bytes, make_nonce, public_line, sign, verify_signature
from fedtide.site import certificates
from helpers.examples import examples

SAID = {"run": "r", "authority": b"-----BEGIN\nAAAA\n", "name": "oslo", "asked": "a" * 64, "own": "b" * 64}


@pytest.fixture(scope="module")
def key():
    return ec.generate_private_key(ec.SECP384R1())


def line_of(private):
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def test_a_signature_holds_for_what_was_signed(key):
    said = claim_bytes(**SAID)
    assert verify_signature(public_line(key), sign(key, said), said)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("run", "s"), ("run", ""), ("authority", b"-----BEGIN\nAAAB\n"), ("name", "osl"), ("name", "oslo "),
        ("asked", "a" * 63 + "b"), ("asked", "b" * 64), ("own", "a" * 64), ("own", "b" * 63),
    ],
)  # fmt: skip
def test_a_signature_holds_for_nothing_else(key, what, other):
    signature = sign(key, claim_bytes(**SAID))
    assert not verify_signature(public_line(key), signature, claim_bytes(**SAID | {what: other}))


def test_two_values_are_not_taken_for_two_others(key):
    """What ends one does not begin the next."""
    one, two = (claim_bytes(**SAID | {"run": run, "name": name}) for run, name in (("ab", "c"), ("a", "bc")))
    assert one != two
    quoted = claim_bytes(**SAID | {"run": 'r", "x', "name": "y"})
    assert quoted != claim_bytes(**SAID | {"run": "r", "name": 'x", "y'})


def test_a_certificate_that_was_wrapped_otherwise_is_the_same(key):
    one, two = (claim_bytes(**SAID | {"authority": text}) for text in (b"-----A\nBC\n", b"-----A\r\nB\nC"))
    assert one == two


def test_a_signature_of_another_key_does_not_hold(key):
    said = claim_bytes(**SAID)
    other = ec.generate_private_key(ec.SECP384R1())
    assert not verify_signature(public_line(key), sign(other, said), said)


def test_nonces_are_long_and_never_the_same():
    found = {make_nonce() for _ in range(1000)}
    assert len(found) == 1000
    assert {len(each) for each in found} == {64}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ed25519.Ed25519PrivateKey.generate(),
        lambda: rsa.generate_private_key(65537, 2048),
        lambda: dsa.generate_private_key(1024),
    ],
    ids=["ed25519", "rsa", "dsa"],
)
@pytest.mark.filterwarnings("ignore")  # some of them are told to be old
def test_keys_of_other_kinds_hold_for_nothing(key, make):
    said = claim_bytes(**SAID)
    try:
        line = line_of(make())
    except ValueError:  # this version makes none any more
        pytest.skip("no such keys")
    assert not verify_signature(line, sign(key, said), said)


def test_a_line_with_more_than_the_key_is_not_the_line_that_is_admitted(key):
    """A signature may hold for it; what is looked up is the line itself."""
    line = public_line(key)
    assert certificates.check_public_key(line, "x") == line
    assert line.count(" ") == 1
    assert line == line.strip()


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


@pytest.mark.parametrize("signature", ["", "0", "zz", "é", "\ud800", "00" * 104, "30" * 100, "f" * 4000, " 30 00"])
def test_a_signature_that_is_none_does_not_hold(key, signature):
    assert not verify_signature(public_line(key), signature, claim_bytes(**SAID))


@given(some.text(max_size=200), some.integers(0, 200), some.integers(0, 255))
@examples(100)
def test_a_key_with_another_byte_or_text_holds_for_nothing(key, text, at, byte):
    said = claim_bytes(**SAID)
    signature, (kind, code) = sign(key, said), public_line(key).split(" ")
    blob = bytearray(base64.b64decode(code))
    at %= len(blob)
    if blob[at] != byte:
        blob[at] = byte
        assert not verify_signature(f"{kind} {base64.b64encode(blob).decode()}", signature, said)
    assert not verify_signature(text, signature, said)
    assert not verify_signature(f"{kind} {text}", signature, said)


@pytest.mark.parametrize("spelled", ["{} é", "{} comment", "{} ", " {}", "{}\n", "{0}\t{0}"])
def test_a_key_that_is_spelled_in_another_way_holds_for_nothing(key, spelled):
    """Its fingerprint, which people compare, could be that of another key."""
    said = claim_bytes(**SAID)
    line = spelled.format(public_line(key))
    assert not verify_signature(line, sign(key, said), said)
    assert not verify_signature(line.replace(" ", "\t", 1), sign(key, said), said)


def test_a_point_that_is_not_on_the_curve_holds_for_nothing(key):
    kind, code = public_line(key).split(" ")
    blob = base64.b64decode(code)
    wrong = blob[:-97] + b"\x04" + bytes(96)
    said = claim_bytes(**SAID)
    assert not verify_signature(f"{kind} {base64.b64encode(wrong).decode()}", sign(key, said), said)
