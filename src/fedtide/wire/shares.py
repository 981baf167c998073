"""Shares of a secret: as many as are needed give it back, and fewer say nothing of it.

Shares are those of Shamir, "How to Share a Secret" (1979), over GF(2^128), by `pycryptodome`. Each is sealed with
ChaCha20-Poly1305 (RFC 8439) of `cryptography`, under a key of its own. Who holds a share needs not keep it: whoever has
the sealed ones is later given their keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedtide.wire.keys import library, shamir

SECRET = 16
"""Bytes of a secret that has shares, and of each share."""

SEALED = 32
"""Bytes of a sealed share."""

HOLDERS = 4, 100
"""The fewest and the most nodes among which secrets are shared. Of three nodes two would be enough, and one of these
could help the server to tell the others different lists. Of many, the work grows with their number to the power of two
for each client that deals, and to the power of three for the server."""


def needed(nodes: int) -> int | None:
    """Return how many of the nodes give a secret back; None if they are too few or too many for shares.

    A third of them, rounded down, may vanish. A server that wants both of two secrets, of which an honest node helps
    with one alone, needs `nodes - 2 * (nodes // 3)` nodes that help with both.

    >>> [needed(nodes) for nodes in (3, 4, 5, 6, 9, 100, 101)]
    [None, 3, 4, 4, 6, 67, None]
    """
    fewest, most = HOLDERS
    return nodes - nodes // 3 if fewest <= nodes <= most else None


def deal(secret: bytes, keys: Sequence[bytes]) -> bytes:
    """Return a sealed share of a secret for each key, which is used for nothing else, one after the other."""
    shares = shamir().split(needed(len(keys)), len(keys), secret)
    return b"".join(_cipher(key).encrypt(bytes(12), share, None) for key, (_, share) in zip(keys, shares, strict=True))


def gather(sealed: bytes, keys: Mapping[int, bytes]) -> tuple[bytes | None, list[int]]:
    """Return the secret of sealed shares, and the places of those that their key does not open.

    Args:
        sealed: all shares of the secret.
        keys: of some of them, by place.

    Returns:
        The secret is None if too few shares open, and any other one if its shares are not those that were dealt.
    """
    shares, wrong, enough = list[tuple[int, bytes]](), list[int](), needed(len(sealed) // SEALED)
    for place, key in keys.items():
        try:
            piece = sealed[SEALED * place : SEALED * (place + 1)]
            shares.append((place + 1, _cipher(key).decrypt(bytes(12), piece, None)))
        except library().exceptions.InvalidTag:
            wrong.append(place)
    if enough is None or len(shares) < enough:
        return None, wrong
    return shamir().combine(shares[:enough]), wrong


def _cipher(key: bytes) -> Any:
    return library().hazmat.primitives.ciphers.aead.ChaCha20Poly1305(key)
