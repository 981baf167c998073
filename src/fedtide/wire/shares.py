"""Shares of a secret: as many as are needed give it back, and fewer say nothing of it.

Shares are those of Shamir, "How to Share a Secret" (1979), over GF(2^128), by `pycryptodome`. Each is sealed with
ChaCha20-Poly1305 (RFC 8439) of `cryptography`, under a key of its own. Holders keep nothing: they derive the key again,
and give it to the server, which has the sealed shares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedtide.wire.keys import library, shamir

SECRET = 16
"""Bytes of a secret that has shares, and of each share."""

SEALED = 32
"""Bytes of a sealed share."""

MOST = 100
"""Nodes among which secrets are shared. The work of a client grows with the square of their number, and that of the
server with its cube."""


def needed(nodes: int, fewest: int) -> int:
    """Return how many of the nodes give a secret back.

    A third of them, rounded down, may vanish, and fewer if `fewest` is large. Each client has two secrets, and an
    honest node gives its share of one alone. With t of n shares needed, a server has both secrets only if 2t - n nodes
    lie for it. 2t - n is at least `fewest - 1`.

    Args:
        nodes: all that have shares.
        fewest: clients below which no sum is opened.

    >>> [needed(nodes, 3) for nodes in (3, 4, 5, 6, 9, 100)]
    [3, 3, 4, 4, 6, 67]
    >>> [needed(9, fewest) for fewest in (4, 5, 6, 9, 12)]
    [6, 7, 7, 9, 9]
    """
    return min(max(nodes - nodes // 3, (nodes + fewest) // 2), nodes)


def deal(secret: bytes, keys: Sequence[bytes], enough: int) -> bytes:
    """Return a sealed share of a secret for each key, which is used for nothing else, one after the other.

    Args:
        secret: so many bytes as a secret has.
        keys: one for each share.
        enough: how many shares give it back.
    """
    shares = shamir().split(enough, len(keys), secret)
    return b"".join(_cipher(key).encrypt(bytes(12), share, None) for key, (_, share) in zip(keys, shares, strict=True))


def gather(sealed: bytes, keys: Mapping[int, bytes], enough: int) -> tuple[bytes | None, list[int]]:
    """Return the secret of sealed shares, and the places of those that their key does not open.

    Args:
        sealed: all shares of the secret.
        keys: of some of them, by place.
        enough: how many give it back.

    Returns:
        The secret is None if too few shares open, and any other one if its shares are not those that were dealt.
    """
    shares, wrong = list[tuple[int, bytes]](), list[int]()
    for place, key in keys.items():
        try:
            piece = sealed[SEALED * place : SEALED * (place + 1)]
            shares.append((place + 1, _cipher(key).decrypt(bytes(12), piece, None)))
        except library().exceptions.InvalidTag:
            wrong.append(place)
    if len(shares) < enough:
        return None, wrong
    return shamir().combine(shares[:enough]), wrong


def _cipher(key: bytes) -> Any:
    return library().hazmat.primitives.ciphers.aead.ChaCha20Poly1305(key)
