"""Keys of nodes: ECDSA over P-384, spelled as OpenSSH does. No torch, and libraries are imported late."""

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

from fedtide.core.errors import uninstalled

PRIMITIVES = ("ciphers", "ciphers.aead", "hashes", "kdf.hkdf", "serialization", "asymmetric.ec", "asymmetric.x25519")
MODULES = ("exceptions", "x509", *(f"hazmat.primitives.{name}" for name in PRIMITIVES))
"""Modules of `cryptography` that are in use."""


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the package `cryptography`; raise with the name of the extra if it is missing."""
    return _imported("cryptography", MODULES)


@lru_cache(maxsize=1)
def shamir() -> Any:
    """Return the class `Shamir` of pycryptodome; raise with the name of the extra if it is missing."""
    return _imported("pycryptodome", ("Protocol.SecretSharing",), "Crypto").Protocol.SecretSharing.Shamir


def _imported(name: str, modules: Iterable[str], package: str = "") -> Any:
    package = package or name
    try:
        for module in modules:
            import_module(f"{package}.{module}")
    except ImportError:
        raise uninstalled(f"real clients and masked sums need {name}", "deploy") from None
    return import_module(package)


def key_stream(seed: bytes) -> Any:
    """Return the cipher whose stream, ChaCha20 from block 0 with a nonce of 0, follows from a seed of 32 bytes."""
    ciphers = library().hazmat.primitives.ciphers
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()


def spell_public(key: Any) -> str:
    """Return a public key, "KIND BASE64" as OpenSSH writes it."""
    serialization = library().hazmat.primitives.serialization
    line: bytes = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line.decode()


def is_node_key(key: Any) -> bool:
    """Tell whether a key, public or private, is of the kind that nodes have."""
    ec = library().hazmat.primitives.asymmetric.ec
    kinds = (ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey)
    return isinstance(key, kinds) and isinstance(key.curve, ec.SECP384R1)


def sign(key: Any, content: bytes) -> str:
    """Return the signature of a node's private key, as hexadecimal digits."""
    primitives = library().hazmat.primitives
    signature: bytes = key.sign(content, primitives.asymmetric.ec.ECDSA(primitives.hashes.SHA384()))
    return signature.hex()


def verify_signature(line: str, signature: str, content: bytes) -> bool:
    """Tell whether a signature is of a public key "KIND BASE64"; both may be anything."""
    crypto = library()
    primitives = crypto.hazmat.primitives
    try:
        key = primitives.serialization.load_ssh_public_key(line.encode())
        if not is_node_key(key) or spell_public(key) != line:  # a comment, or another spelling
            return False
        key.verify(bytes.fromhex(signature), content, primitives.asymmetric.ec.ECDSA(primitives.hashes.SHA384()))
    except (ValueError, TypeError, crypto.exceptions.InvalidSignature, crypto.exceptions.UnsupportedAlgorithm):
        return False
    return True
