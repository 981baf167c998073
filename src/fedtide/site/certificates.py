"""Keys and certificates: a site's own authority, its server's certificate, and the key of a node.

All are of elliptic curves: P-256 for certificates, P-384 for nodes. The authority signs nothing but
the certificate of its own server, and nodes trust it for that server alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fedtide.config.settings import split_address
from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError, refused
from fedtide.site.files import PUBLIC, SECRET, check_secret, read_bytes, write_new
from fedtide.wire.masks import library

AUTHORITY, SERVER = timedelta(days=3650), timedelta(days=397)
"""How long certificates are valid: that of the authority, which tickets carry, and that of the server."""
SOON = timedelta(days=30)
"""A server's certificate is made anew when less than this is left."""
SKEW = timedelta(minutes=5)
"""By how much clocks may differ."""
KIND = "ecdsa-sha2-nistp384"
LARGEST = 20_000
"""Bytes of a key or certificate."""


def make_authority(folder: Path, address: str) -> None:
    """Make an authority and the certificate of its server: ca.key, ca.crt, server.key, server.crt.

    Args:
        folder: an empty folder of the owner's alone.
        address: HOST:PORT at which nodes reach the server.
    """
    ec = library().hazmat.primitives.asymmetric.ec
    key = ec.generate_private_key(ec.SECP256R1())
    write_new(folder / "ca.key", _private(key), SECRET)
    write_new(folder / "ca.crt", _pem(_certificate(key, None, key, AUTHORITY)), PUBLIC)
    renew(folder, address)


def renew(folder: Path, address: str) -> None:
    """Make the certificate and the key of a server anew, signed by the authority in the folder.

    Raises:
        FedtideError: the authority's key was taken away, or is damaged.
    """
    if not (folder / "ca.key").exists():
        raise FedtideError(
            f"{folder / 'ca.key'}: not there, and needed for a new certificate of the server; put it back while "
            "'fedtide serve' starts or runs for a day"
        )
    ec = library().hazmat.primitives.asymmetric.ec
    serialization = library().hazmat.primitives.serialization
    check_secret(folder / "ca.key")
    try:
        authority = serialization.load_pem_private_key(read_bytes(folder / "ca.key", LARGEST), None)
        if not isinstance(authority, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
        if authority.public_key() != read_certificate(folder / "ca.crt").public_key():
            raise ValueError("it does not belong to ca.crt")
    except (ValueError, TypeError) as error:
        raise FedtideError(f"{folder / 'ca.key'}: damaged or not a private key ({error})") from None
    key = ec.generate_private_key(ec.SECP256R1())
    made = _certificate(authority, split_address(address)[0], key, SERVER)
    for name in ("server.crt", "server.key"):  # first both: a key is never beside the certificate of another
        (folder / name).unlink(missing_ok=True)
    write_new(folder / "server.key", _private(key), SECRET)
    write_new(folder / "server.crt", _pem(made), PUBLIC)


def renew_if_due(folder: Path, address: str) -> str:
    """Make the certificate of a server anew if it is missing, ends soon or is of another host; tell what was done.

    Returns:
        A sentence if there is something to say, else "".

    Raises:
        FedtideError: nodes cannot be served without a new one, and it cannot be made.
    """
    x509, left, now = library().x509, timedelta(0), datetime.now(UTC)
    check_authority(read_bytes(folder / "ca.crt", LARGEST), str(folder / "ca.crt"), now)
    if (found := _fitting(folder)) is not None:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        covered = [str(each) for kind in (x509.DNSName, x509.IPAddress) for each in names.get_values_for_type(kind)]
        if split_address(address)[0] in covered:
            left = found.not_valid_after_utc - now
    if left >= SOON:
        ends, but = read_certificate(folder / "ca.crt").not_valid_after_utc, "make another site, with new tickets"
        return f"the site's authority ends on {ends:%Y-%m-%d}: {but}" if ends - now < SOON else ""
    try:
        renew(folder, address)
    except FedtideError as error:
        if left <= timedelta(0):
            raise
        return f"the server's certificate ends in {left.days} days: {error}"
    return "the server's certificate was made anew"


def _fitting(folder: Path) -> Any:
    """Return the server's certificate; None if there is none, or it is not that of its key and of the authority."""
    try:
        found, authority = (read_certificate(folder / name) for name in ("server.crt", "ca.crt"))
        found.verify_directly_issued_by(authority)
        serialization = library().hazmat.primitives.serialization
        key = serialization.load_pem_private_key(read_bytes(folder / "server.key", LARGEST), None)
        fits = key.public_key() == found.public_key()
    except (FedtideError, ValueError, TypeError, library().exceptions.InvalidSignature):
        return None
    check_secret(folder / "server.key")
    return found if fits else None


def read_certificate(path: Path) -> Any:
    """Return the certificate of a file."""
    return parsed_certificate(read_bytes(path, LARGEST), str(path))


def parsed_certificate(content: bytes, where: str) -> Any:
    """Return the one certificate of a PEM text; `where` begins the error."""
    try:
        found = library().x509.load_pem_x509_certificates(content)
        if len(found) != 1:
            raise ValueError(f"{len(found)} certificates")
    except ValueError as error:
        raise FedtideError(f"{where}: damaged or not one certificate ({str(error).splitlines()[0]})") from None
    return found[0]


def check_authority(content: bytes, where: str, now: datetime) -> None:
    """Raise unless a PEM text is an authority's own certificate, valid now."""
    crypto = library()
    found = parsed_certificate(content, where)
    try:
        found.verify_directly_issued_by(found)
        basic = found.extensions.get_extension_for_class(crypto.x509.BasicConstraints).value
        if not basic.ca:
            raise ValueError("it is no authority")
    except (ValueError, TypeError, crypto.exceptions.InvalidSignature, crypto.x509.ExtensionNotFound) as error:
        raise FedtideError(f"{where}: not the certificate of an authority ({error or 'signed by another'})") from None
    for late, limit, word in (
        (now + SKEW < found.not_valid_before_utc, found.not_valid_before_utc, "from"),
        (now > found.not_valid_after_utc, found.not_valid_after_utc, "until"),
    ):
        if late:
            raise FedtideError(
                f"{where}: valid {word} {limit:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
                f"{now:%Y-%m-%d %H:%M} UTC"
            )


def make_node_key(private: Path, public: Path, name: str) -> None:
    """Make the key of a node, in the format of OpenSSH; the private one never leaves its machine.

    Raises:
        FedtideError: there is one already; it is left as it is.
    """
    ec = library().hazmat.primitives.asymmetric.ec
    serialization = library().hazmat.primitives.serialization
    key = ec.generate_private_key(ec.SECP384R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    write_new(private, key.private_bytes(*form), SECRET)
    write_public_key(private, public, name)


def write_public_key(private: Path, public: Path, name: str) -> None:
    """Write the public half of a node's key, with the node's name."""
    serialization = library().hazmat.primitives.serialization
    line = read_private_key(private).public_key()
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with replacing(public) as temporary:
        temporary.write_bytes(line.public_bytes(*form) + f" {name}\n".encode())


def read_private_key(path: Path) -> Any:
    """Return the private key of a node.

    Raises:
        FedtideError: it is damaged, of another kind, or readable for others.
    """
    ec = library().hazmat.primitives.asymmetric.ec
    check_secret(path)
    try:
        key = library().hazmat.primitives.serialization.load_ssh_private_key(read_bytes(path, LARGEST), None)
    except (ValueError, TypeError, library().exceptions.UnsupportedAlgorithm) as error:
        raise FedtideError(f"{path}: damaged or not a private key of OpenSSH ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise FedtideError(f"{path}: is a key of another kind, allowed: {KIND}")
    return key


def read_public_key(path: Path) -> tuple[str, str]:
    """Return the public key of a node as "KIND BASE64", and the name behind it ("" without one)."""
    try:
        text = read_bytes(path, LARGEST).decode("ascii").strip()
    except UnicodeDecodeError:
        raise FedtideError(f"{path}: damaged or not a public key of OpenSSH (it is no text)") from None
    if "PRIVATE KEY" in text:
        raise FedtideError(f"{path}: is a private key, which stays with its node; allowed: the file NODE.pub beside it")
    kind, _, rest = text.partition(" ")
    code, _, name = rest.partition(" ")
    return check_public_key(f"{kind} {code}", str(path)), name.strip()


def check_public_key(line: str, where: str) -> str:
    """Return a public key "KIND BASE64"; raise unless it is a point of the curve P-384 as OpenSSH writes it."""
    kind, _, code = line.partition(" ")
    if kind != KIND:
        raise refused(f"{where}: kind of key", kind, f"{KIND}, as fedtide join makes them")
    try:
        blob = base64.b64decode(code, validate=True)
        if blob[:-97] != _head() or len(blob) != len(_head()) + 97 or base64.b64encode(blob).decode() != code:
            raise ValueError("it has another length or head")
        ec = library().hazmat.primitives.asymmetric.ec
        ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), blob[-97:])
    except (binascii.Error, ValueError) as error:
        raise FedtideError(f"{where}: damaged or not a public key of OpenSSH ({error})") from None
    return line


def _head() -> bytes:
    """Return what stands before the point in the key: kind, curve and the point's length."""
    parts = (KIND.encode(), b"nistp384")
    return b"".join(len(part).to_bytes(4) + part for part in parts) + (97).to_bytes(4)


def fingerprint(key: str) -> str:
    """Return the fingerprint of a public key "KIND BASE64", as `ssh-keygen -lf` prints it.

    >>> fingerprint("ecdsa-sha2-nistp384 AAAA")
    'SHA256:cJ6AyISHokEeHuTfufIqhhSS0gxHZRUMDHlKvXD4FHw'
    """
    found = hashlib.sha256(base64.b64decode(key.partition(" ")[2])).digest()
    return f"SHA256:{base64.b64encode(found).decode().rstrip('=')}"


def authority_fingerprint(content: bytes) -> str:
    """Return the SHA-256 of an authority's certificate, as browsers show it."""
    body = re.sub(rb"-----[^-]+-----|\s", b"", content)
    return hashlib.sha256(base64.b64decode(body)).hexdigest()


def _certificate(signer: Any, host: str | None, key: Any, valid: timedelta) -> Any:
    """Return a certificate: of a server at `host`, or of the authority itself."""
    crypto = library()
    x509, ec = crypto.x509, crypto.hazmat.primitives.asymmetric.ec
    hashes = crypto.hazmat.primitives.hashes
    called = {
        whose: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, whose)])
        for whose in ("fedtide authority", "fedtide server")
    }
    own, now = host is None, datetime.now(UTC)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(called["fedtide authority" if own else "fedtide server"])
        .issuer_name(called["fedtide authority"])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=own, path_length=0 if own else None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not own, key_cert_sign=own, crl_sign=own, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if host is not None:
        names = [_alternative(x509, name) for name in dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return made.sign(signer, hashes.SHA256())


def _alternative(x509: Any, name: str) -> Any:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: Any) -> bytes:
    serialization = library().hazmat.primitives.serialization
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    made: bytes = key.private_bytes(*form)
    return made


def _pem(certificate: Any) -> bytes:
    made: bytes = certificate.public_bytes(library().hazmat.primitives.serialization.Encoding.PEM)
    return made
