"""How a node shows who it is: it signs what the server has just made up, with the key that never leaves it.

TLS has shown before that the server is that of the node's ticket. What is signed names the site and its authority, so
that no server can use it at another one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from fedtide.core.errors import FedtideError
from fedtide.remote.grpc.pieces import SCHEME


def nonce() -> str:
    """Return 32 bytes from the system's generator, as hexadecimal digits."""
    return secrets.token_hex(32)


def claim(run: str, authority: bytes, name: str, asked: str, own: str) -> bytes:
    """Return what is signed.

    Args:
        run: digest of the site's study.
        authority: the certificate of its authority, as PEM.
        name: of the node.
        asked: what the server made up.
        own: what the node made up.
    """
    site = hashlib.sha256(b"".join(authority.split())).hexdigest()
    return json.dumps(["fedtide node", SCHEME, run, site, name, asked, own]).encode()


def public_line(key: Any) -> str:
    """Return the public half of a node's private key, "KIND BASE64" as OpenSSH writes it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    line: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return line.decode()


def signed(key: Any, said: bytes) -> str:
    """Return the signature of a node's private key, as hexadecimal digits."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA384

    made: bytes = key.sign(said, ECDSA(SHA384()))
    return made.hex()


def holds(line: str, signature: str, said: bytes) -> bool:
    """Tell whether a signature is of a public key "KIND BASE64"; both may be anything."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(line.encode())
        if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
            return False
        if key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() != line:  # a comment, or another spelling
            return False
        key.verify(bytes.fromhex(signature), said, ECDSA(SHA384()))
    except (ValueError, InvalidSignature, UnsupportedAlgorithm, FedtideError):
        return False
    return True
