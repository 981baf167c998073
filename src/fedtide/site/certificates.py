"""Keys and certificates: the authority and the server's certificate of a site, and the keys of nodes.

All keys are of elliptic curves: P-256 for certificates, P-384 for nodes. The authority signs the certificate of the
site's own server and nothing else, and nodes trust the authority for that server alone.
"""

import base64
import hashlib
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fedtide.config.settings import split_address
from fedtide.core.atomic import write_bytes, write_text
from fedtide.core.errors import FedtideError, refused
from fedtide.core.files import read_bytes
from fedtide.site.machine import KIND, PUBLIC, SECRET, check_secret, read_private_key
from fedtide.wire.keys import library, spell_public

AUTHORITY, SERVER = timedelta(days=3650), timedelta(days=397)
"""Validity of the authority's certificate, which tickets carry, and of the server's."""
SOON = timedelta(days=30)
"""A server's certificate is renewed if less than this is left."""
SKEW = timedelta(minutes=5)
"""Tolerated difference of two clocks."""
LARGEST = 20_000
"""Maximum number of bytes of a key or certificate."""
NO_USAGE = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"


def make_authority(folder: Path, address: str) -> None:
    """Make an authority and the certificate of its server: ca.key, ca.crt, server.key, server.crt.

    Args:
        folder: an empty folder, which its owner alone can read.
        address: HOST:PORT at which nodes reach the server.
    """
    _write_pair(folder, "ca", None, None, AUTHORITY)
    renew(folder, address)


def renew(folder: Path, address: str) -> None:
    """Make a new key and certificate of a server, signed by the authority in the folder.

    Raises:
        FedtideError: the authority's key is missing or damaged.
    """
    path = folder / "ca.key"
    if not path.exists():
        but = "put it back while 'fedtide serve' starts or runs for a day"
        raise FedtideError(f"{path}: not there, and needed for a new certificate of the server; {but}")
    check_secret(path)
    try:
        authority = _load_key(path)
        if authority.public_key() != read_certificate(folder / "ca.crt").public_key():
            raise ValueError("it does not belong to ca.crt")
    except (ValueError, TypeError) as error:
        raise FedtideError(f"{path}: damaged or not a private key ({error})") from None
    for name in ("server.crt", "server.key"):  # first both: a key never lies beside the certificate of another
        (folder / name).unlink(missing_ok=True)
    _write_pair(folder, "server", authority, split_address(address)[0], SERVER)


def renew_if_due(folder: Path, address: str) -> str:
    """Renew the certificate of a server if it is missing, ends soon or names another host.

    Returns:
        A sentence if there is something to say, else "".

    Raises:
        FedtideError: nodes cannot be served without a new certificate, which cannot be made.
    """
    x509, left, now = library().x509, timedelta(0), datetime.now(UTC)
    check_authority(read_bytes(folder / "ca.crt", LARGEST), str(folder / "ca.crt"), now)
    if (certificate := _read_server(folder)) is not None:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [str(host) for kind in (x509.DNSName, x509.IPAddress) for host in names.get_values_for_type(kind)]
        is_valid = certificate.not_valid_before_utc <= now  # a clock may have been ahead
        if is_valid and split_address(address)[0] in hosts:
            left = certificate.not_valid_after_utc - now
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


def _read_server(folder: Path) -> Any:
    """Return the server's certificate; None if it is missing, or does not fit its key and the authority."""
    try:
        certificate, authority = (read_certificate(folder / name) for name in ("server.crt", "ca.crt"))
        certificate.verify_directly_issued_by(authority)
        fits = _load_key(folder / "server.key").public_key() == certificate.public_key()
    except (FedtideError, ValueError, TypeError, library().exceptions.InvalidSignature):
        return None
    check_secret(folder / "server.key")
    return certificate if fits else None


def _load_key(path: Path) -> Any:
    return library().hazmat.primitives.serialization.load_pem_private_key(read_bytes(path, LARGEST), None)


def read_certificate(path: Path) -> Any:
    """Return the certificate of a file."""
    return parse_certificate(read_bytes(path, LARGEST), str(path))


def parse_certificate(content: bytes, where: str) -> Any:
    """Return the one certificate of a PEM text; `where` begins the error."""
    try:
        certificates = library().x509.load_pem_x509_certificates(content)
        if len(certificates) != 1:
            raise ValueError(f"{len(certificates)} certificates")
    except ValueError as error:
        raise FedtideError(f"{where}: damaged or not one certificate ({str(error).splitlines()[0]})") from None
    return certificates[0]


def check_authority(content: bytes, where: str, now: datetime) -> None:
    """Raise unless a PEM text is the own certificate of an authority, valid now."""
    crypto = library()
    certificate = parse_certificate(content, where)
    try:
        certificate.verify_directly_issued_by(certificate)
        if not certificate.extensions.get_extension_for_class(crypto.x509.BasicConstraints).value.ca:
            raise ValueError("it is no authority")
    except (ValueError, TypeError, crypto.exceptions.InvalidSignature, crypto.x509.ExtensionNotFound) as error:
        raise FedtideError(f"{where}: not the certificate of an authority ({error or 'signed by another'})") from None
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    for wrong, limit in ((now + SKEW < first, f"from {utc(first)}"), (now > last, f"until {utc(last)}")):
        if wrong:
            raise FedtideError(f"{where}: valid {limit}, and this machine's clock says {utc(now)}")


def utc(moment: datetime) -> str:
    """Spell a time.

    >>> utc(datetime(2026, 11, 21, 12, tzinfo=UTC))
    '2026-11-21 12:00 UTC'
    """
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def make_node_key(private: Path, public: Path, name: str) -> None:
    """Make the key of a node, in the format of OpenSSH; the private half never leaves its machine.

    Raises:
        FedtideError: a key exists; it is left as it is.
    """
    _write_key(private, draw_node_key(), "OpenSSH")
    write_public_key(private, public, name)


def draw_node_key() -> Any:
    """Return a new private key of a node."""
    ec = library().hazmat.primitives.asymmetric.ec
    return ec.generate_private_key(ec.SECP384R1())


def write_public_key(private: Path, public: Path, name: str) -> None:
    """Write the public half of a node's key, with the node's name."""
    line = spell_public(read_private_key(private).public_key())
    write_text(public, f"{line} {name}\n")


def read_public_key(path: Path) -> tuple[str, str]:
    """Return the public key of a node as "KIND BASE64", and the name behind it ("" without one)."""
    try:
        text = read_bytes(path, LARGEST).decode("ascii").strip()
    except UnicodeDecodeError:
        raise FedtideError(f"{path}: damaged or not a public key of OpenSSH (it is no text)") from None
    if "PRIVATE KEY" in text:
        raise FedtideError(f"{path}: is a private key, which stays with its node; allowed: the file NODE.pub beside it")
    kind, code, name = (*text.split(" ", 2), "", "")[:3]
    return check_public_key(f"{kind} {code}", str(path)), name.strip()


def check_public_key(line: str, where: str) -> str:
    """Return a public key "KIND BASE64"; raise unless it is a point of the curve P-384 as OpenSSH writes it."""
    kind = line.partition(" ")[0]
    if kind != KIND:
        raise refused(f"{where}: kind of key", kind, f"{KIND}, as fedtide join makes them")
    try:
        key = library().hazmat.primitives.serialization.load_ssh_public_key(line.encode("ascii"))
        if spell_public(key) != line:
            raise ValueError("it is spelled in another way")
    except (ValueError, library().exceptions.UnsupportedAlgorithm) as error:
        raise FedtideError(f"{where}: damaged or not a public key of OpenSSH ({error})") from None
    return line


def fingerprint(key: str) -> str:
    """Return the fingerprint of a public key "KIND BASE64", as `ssh-keygen -lf` prints it.

    >>> fingerprint("ecdsa-sha2-nistp384 AAAA")
    'SHA256:cJ6AyISHokEeHuTfufIqhhSS0gxHZRUMDHlKvXD4FHw'
    """
    digest = hashlib.sha256(base64.b64decode(key.partition(" ")[2])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def authority_fingerprint(content: bytes) -> str:
    """Return the SHA-256 of an authority's certificate, as browsers show it."""
    return parse_certificate(content, "authority").fingerprint(library().hazmat.primitives.hashes.SHA256()).hex()


def _certificate(signer: Any, host: str | None, key: Any, valid: timedelta) -> Any:
    """Return a certificate: of a server at `host`, or of the authority itself."""
    x509, is_authority, now = library().x509, host is None, datetime.now(UTC)
    authority, server = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"fedtide {name}")]) for name in ("authority", "server")
    )
    signing = {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    usage = x509.KeyUsage(**signing, **dict.fromkeys(NO_USAGE.split(), False))
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(authority if is_authority else server)
        .issuer_name(authority)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(identifier, critical=False)
    )
    if host is not None:
        names = [_alternative(x509, name) for name in dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, library().hazmat.primitives.hashes.SHA256())


def _alternative(x509: Any, name: str) -> Any:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_pair(folder: Path, name: str, signer: Any, host: str | None, valid: timedelta) -> None:
    """Make a private key and its certificate in new files; without a signer it signs itself."""
    primitives = library().hazmat.primitives
    key = primitives.asymmetric.ec.generate_private_key(primitives.asymmetric.ec.SECP256R1())
    certificate = _certificate(signer or key, host, key, valid)
    _write_key(folder / f"{name}.key", key, "PKCS8")
    content = certificate.public_bytes(primitives.serialization.Encoding.PEM)
    write_bytes(folder / f"{name}.crt", content, PUBLIC, new=True)


def _write_key(path: Path, key: Any, form: str) -> None:
    serialization = library().hazmat.primitives.serialization
    kind = getattr(serialization.PrivateFormat, form)
    content = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    write_bytes(path, content, SECRET, new=True)
