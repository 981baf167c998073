"""Masks: the message of a client looks like noise, and only the sum of all named clients can be opened.

There are two messages. First, client i sends its vector x_i modulo 2^64 as

    y_i = x_i + stream(b_i) + sum over j > i of stream(s_ij) - sum over j < i of stream(s_ij)

b_i is drawn. s_ij = HKDF(X25519(i, j), ...) is known to i and j only, so each y_i by itself is uniform. Then the server
names once the clients that answered. Each of these sends b_i, and s_ij for every j that was asked and did not answer.
With these secrets the server takes the masks off the sum.

No client ever sends both b_i and all s_ij, if all clients receive the same list. So b_i is sealed with secrets that
every other client sends for its own list. Nothing opens if lists differ.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), without its
shares. If a client vanishes between the messages nothing opens, and the same clients try again, with new masks and
without training. They never try without the vanished client. Its message may only be late, and the server would have
two sums that differ by one client. So a node opens a question for one list, whatever the try.

Secrets are only in the memory of their node. Primitives are those of `cryptography`: X25519 (RFC 7748), HKDF-SHA256
(RFC 5869), ChaCha20 (RFC 8439) with a key for each stream, ECDSA over P-384.
"""

import hashlib
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.atomic import append
from fedtide.core.errors import FedtideError, refused
from fedtide.wire.keys import key_stream, library, sign, spell_public, verify_signature

SEED = 32
"""Bytes of every secret."""

PIECE = 2**15
"""Numbers of a stream that are made at a time, which a cache holds."""

ZEROS = bytes(8 * PIECE)

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
"""A vector modulo 2^64."""

KEPT = 8
"""Tries whose secrets a node keeps; it forgets the oldest."""


@dataclass(frozen=True)
class Bundle:
    """The public half of a node's key for masks, and who says so.

    Args:
        public: X25519 key, 64 hexadecimal digits.
        identity: the node's registered key, "ecdsa-sha2-nistp384 BASE64"; "" for nodes of one process.
        signature: by that key, of the run, the node and `public`, in hexadecimal digits.
    """

    public: str
    identity: str = ""
    signature: str = ""


@dataclass(frozen=True)
class Context:
    """Which sum is masked.

    Args:
        run: digest of the run.
        version: (round, number of the ask in it).
        slot: of its clients, 0 if there are none.
        attempt: name of the try; every one has masks of its own.
    """

    run: str
    version: tuple[int, int]
    slot: int
    attempt: str

    def info(self, purpose: str, *more: object) -> bytes:
        """Return the purpose of a derived secret, which no other one has."""
        return _plain("fedtide", purpose, self.run, *self.version, self.slot, self.attempt, *more)


@dataclass(frozen=True)
class Question:
    """The question that a client answers.

    Args:
        asked: the round and the name of the question, from which its answer follows: it opens each for one list alone.
        key: digest of everything that it was asked with, also its model. Masks come off among clients that were asked
            the same. Otherwise a server could send all but one client a model of which it knows the answer.
    """

    asked: str = ""
    key: str = ""


@dataclass(frozen=True)
class Shown:
    """The secrets of a client that open a sum.

    Args:
        sealed: its b_i, under what all others in the list give.
        opens: by client of the list, what it gives to open that one's b_i.
        links: by client that was asked and is not in the list, s_ij.
    """

    sealed: bytes
    opens: Mapping[int, bytes]
    links: Mapping[int, bytes]


def add_stream(total: Numbers, seed: bytes, *, add: bool = True) -> None:
    """Add the stream of a seed, which is used for nothing else, to numbers modulo 2^64, in place, or take it off."""
    cipher = key_stream(seed)
    piece = np.empty(PIECE, "<u8")
    for start in range(0, len(total), PIECE):
        part = total[start : start + PIECE]
        cipher.update_into(memoryview(ZEROS)[: 8 * len(part)], piece.data.cast("B"))
        (np.add if add else np.subtract)(part, piece[: len(part)], out=part)


def derived(secret: bytes, info: bytes) -> bytes:
    """Return a secret for one purpose, HKDF with SHA-256."""
    primitives = library().hazmat.primitives
    result: bytes = primitives.kdf.hkdf.HKDF(primitives.hashes.SHA256(), SEED, None, info).derive(secret)
    return result


def _plain(*parts: object) -> bytes:
    """Spell out values so that different ones have different bytes."""
    return json.dumps(parts, separators=(",", ":")).encode()


def _xor(*parts: bytes) -> bytes:
    result = 0
    for part in parts:
        result ^= int.from_bytes(part)
    return result.to_bytes(SEED)


def link(total: Numbers, i: int, j: int, seed: bytes, *, off: bool = False) -> None:
    """Put the mask that i shares with j on what i sends, in place, or take it off a sum that it is in."""
    add_stream(total, seed, add=(i < j) != off)


class Masker:
    """The secrets of a node for one run. They end with its process.

    Args:
        run: digest of the run.
        node: the node's name.
        identity: its registered private key; None for nodes of one process.
        trusts: (name of a node, its registered key) -> why its word does not count; None if it does.
        lists: file of the lists that sums were opened for, so that a node that is started again knows them. It has a
            line for each, with a digest and no secret. None keeps them in memory.
    """

    def __init__(
        self,
        run: str,
        node: str,
        identity: Any = None,
        trusts: Callable[[str, str], str | None] = lambda node, key: None,
        lists: Path | None = None,
    ) -> None:
        self._key = library().hazmat.primitives.asymmetric.x25519.X25519PrivateKey.generate()
        self.run, self.node, self._trusts, self._signed = run, node, trusts, identity is not None
        self.bundle = Bundle(self._key.public_key().public_bytes_raw().hex())
        if identity is not None:
            signature = sign(identity, _signed_bytes(run, node, self.bundle.public))
            self.bundle = replace(self.bundle, identity=spell_public(identity.public_key()), signature=signature)
        self._used: set[tuple[Context, int]] = set()
        self._open: OrderedDict[tuple[Context, int], _Sum] = OrderedDict()
        self._lists = lists
        self._shown: dict[str, str] = {}
        for line in lists.read_text(encoding="ascii").splitlines() if lists is not None and lists.is_file() else ():
            question, _, digest = line.rpartition(" ")
            if len(digest) == 64:  # else a kill left half of it, before anything was shown
                self._shown.setdefault(question, digest)
        self._shared: dict[str, bytes] = {}

    def check(self, bundles: Mapping[str, Bundle]) -> None:
        """Raise unless keys are those of the nodes that are named, this one's among them.

        Raises:
            FedtideError: one of them is not.
        """
        if bundles.get(self.node) != self.bundle:
            raise FedtideError(STALE)
        for node, bundle in bundles.items():
            if node == self.node:
                continue
            if self._signed and not verified(self.run, node, bundle):  # before its key is known as that of the node
                raise FedtideError(f"node '{node}': its key for masks is not signed by its registered key")
            if (why := self._trusts(node, bundle.identity)) is not None:
                raise FedtideError(f"node '{node}': {why}")

    def masked(
        self, context: Context, client: int, vector: Tensor, peers: Mapping[int, str], about: Question = Question()
    ) -> Tensor:
        """Return a client's vector under its masks, int64.

        Args:
            context: which sum it is for.
            client: a client of this node.
            vector: in fixed point.
            peers: by client that is asked the same, the public key of its node.
            about: what it was asked.

        Raises:
            FedtideError: it was masked for this try before, with other numbers or among others.
        """
        total = vector.numpy().view(np.uint64).copy()
        among = _plain(about.asked, about.key, [[k, peers[k]] for k in sorted(peers)])
        same = hashlib.sha256(total.tobytes() + among).digest()
        entry = self._open.get((context, client))
        if (context, client) in self._used and (entry is None or entry.same != same):
            raise FedtideError("a sum is masked once in a try")
        if entry is None:
            links = {
                j: derived(self._secret(key), context.info("mask", about.key, *sorted((client, j))))
                for j, key in peers.items()
                if j != client
            }
            entry = _Sum(same, secrets.token_bytes(SEED), links, dict(peers), about)
            self._used.add((context, client))
            self._open[context, client] = entry
            while len({(context_of_sum.version, context_of_sum.attempt) for context_of_sum, _ in self._open}) > KEPT:
                self._open.popitem(last=False)
        add_stream(total, entry.seed)
        for j, seed in entry.links.items():
            link(total, client, j, seed)
        return torch.from_numpy(total.view(np.int64))

    def show(self, context: Context, client: int, alive: Sequence[int], fewest: int) -> Shown:
        """Return the secrets that open the sum of the clients in a list, of which this is one; a question has one list.

        Raises:
            FedtideError: there are fewer than `fewest`, or another list was named before, or nothing is known of it.
        """
        entry, named = self._open.get((context, client)), set(alive)
        if entry is None:
            raise FedtideError(STALE)
        if client not in named or not named <= entry.peers.keys() or len(named) != len(alive):
            raise refused("sum to open", sorted(named), f"clients that were asked, {client} among them")
        if len(named) < fewest:
            raise refused("sum to open", len(named), f"{fewest} clients or more")
        if not hidden({peer: entry.peers[peer] for peer in named}, fewest):
            raise FedtideError(ALONE)
        others, digest = sorted(named - {client}), hashlib.sha256(_plain(*sorted(alive))).hexdigest()
        self._name(_plain(self.run, entry.about.asked, client).decode(), digest)

        def pad(owner: int, helper: int, other: int) -> bytes:
            return derived(
                self._secret(entry.peers[other]), context.info("open", entry.about.key, digest, owner, helper)
            )

        return Shown(
            _xor(entry.seed, *(pad(client, other, other) for other in others)),
            {other: pad(other, client, other) for other in others},
            {j: seed for j, seed in entry.links.items() if j not in named},
        )

    def _name(self, question: str, digest: str) -> None:
        """Note the list that a question of a client is opened for; raise if it is another than before."""
        if self._shown.setdefault(question, digest) != digest:
            raise FedtideError("a question is opened for one list of clients")
        if self._lists is not None:
            append(self._lists, f"{question} {digest}")

    def _secret(self, key: str) -> bytes:
        if key not in self._shared:
            x25519 = library().hazmat.primitives.asymmetric.x25519
            try:
                self._shared[key] = self._key.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
            except ValueError:
                raise FedtideError("a key for masks is none") from None
        return self._shared[key]


def hidden(holders: Mapping[int, Hashable], fewest: int) -> bool:
    """Tell whether a sum hides clients from any of their holders, too, that the server shows it to.

    A holder knows the answers of its own clients: it takes `fewest - 1` others, as with one client for each holder.

    Args:
        holders: of each client in the sum.
        fewest: clients below which no sum is opened.

    >>> [hidden(dict(enumerate(holders)), 3) for holders in ("abc", "aab", "aabb", "aaaaab", "aaa")]
    [True, False, True, False, True]
    """
    counts = Counter(holders.values())
    return len(counts) == 1 or all(len(holders) - count >= fewest - 1 for count in counts.values())


ALONE = "too few clients of its sum are at other nodes than one, which could tell the server of these"
"""Reason of a node that does not mask an answer, or open a sum, of which another node knows too much."""


STALE = "its key for masks is another than the server knows"
"""Reason of a node that was started again, and has no secrets of earlier sums."""


@dataclass(repr=False)  # its secrets stand in no traceback
class _Sum:
    """A sum that is masked: a digest of what went in, and its secrets."""

    same: bytes
    seed: bytes
    links: dict[int, bytes]
    peers: dict[int, str]
    about: Question


def unmasked(masked: Mapping[int, Tensor], shown: Mapping[int, Shown]) -> Tensor:
    """Return the sum of masked vectors without their masks, int64.

    Args:
        masked: what each client in the list sent.
        shown: what each of them gave to open it.
    """
    total = np.zeros(len(next(iter(masked.values()))), np.uint64)
    for i, vector in masked.items():
        total += vector.numpy().view(np.uint64)
        secret = _xor(shown[i].sealed, *(shown[other].opens[i] for other in masked if other != i))
        add_stream(total, secret, add=False)
        for j, seed in shown[i].links.items():
            link(total, i, j, seed, off=True)
    return torch.from_numpy(total.view(np.int64))


def _signed_bytes(run: str, node: str, public: str) -> bytes:
    return _plain("fedtide", "key for masks", run, node, public)


def verified(run: str, node: str, bundle: Bundle) -> bool:
    """Tell whether a node's registered key signed its key for masks."""
    return verify_signature(bundle.identity, bundle.signature, _signed_bytes(run, node, bundle.public))
