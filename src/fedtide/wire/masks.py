"""Masks: the message of a client looks like noise, and only the sum of all named clients can be opened.

There are two messages. First, client i sends its vector x_i modulo 2^64 as

    y_i = x_i + stream(b_i) + sum over j > i of stream(s_ij) - sum over j < i of stream(s_ij)

b_i is drawn. s_ij = HKDF(X25519(i, j), ...) is known to i and j only, so each y_i by itself is uniform. Then the server
names once the clients that answered. Each of these sends b_i, and s_ij for every j that was asked and did not answer.
With these secrets the server takes the masks off the sum.

A vector may have parts, each with streams of its own: stream(b_i, part) and stream(s_ij, part). The server names the
parts to open, and clients send the seeds of these alone. Other parts stay masked for ever.

No client ever sends both b_i and all s_ij, if all clients receive the same list. So b_i is sealed with secrets that
every other client sends for its own list, and its own parts. Nothing opens if these differ.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), without its
shares. If a client vanishes between the messages nothing opens, and the same clients try again, with new masks and
without training. They never try without the vanished client. Its message may only be late, and the server would have
two sums that differ by one client. So a node opens a question of a round for one list, however often it is asked. It
opens no earlier round after a later one.

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
        round: when it was asked.
        asked: its name; each question of a round is opened for one list alone.
        key: digest of everything that it was asked with, also its model. Masks come off among clients that were asked
            the same. Otherwise a server could send all but one client a model of which it knows the answer.
    """

    round: int = 0
    asked: str = ""
    key: str = ""


@dataclass(frozen=True)
class Shown:
    """The secrets of a client that open parts of a sum.

    Args:
        sealed: its seeds of these parts, under what all others in the list give.
        opens: by client of the list, what it gives to open that one's seeds.
        links: by client that was asked and is not in the list, the seeds of the parts that they share.
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


def seed_of(secret: bytes, part: int) -> bytes:
    """Return the seed of a part of a vector."""
    return derived(secret, _plain("part", part))


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
        self._latest: dict[int, int] = {}
        for line in lists.read_text(encoding="ascii").splitlines() if lists is not None and lists.is_file() else ():
            question, _, digest = line.rpartition(" ")
            if len(digest) == 64:  # else a kill left half of it, before anything was shown
                self._remember(question, digest)
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
        self,
        context: Context,
        client: int,
        vector: Tensor,
        peers: Mapping[int, str],
        about: Question = Question(),
        parts: Sequence[slice | Tensor] = (slice(None),),
    ) -> Tensor:
        """Return a client's vector under its masks, int64.

        Args:
            context: which sum it is for.
            client: a client of this node.
            vector: in fixed point.
            peers: by client that is asked the same, the public key of its node.
            about: what it was asked.
            parts: of the vector, as of `Form.parts`.

        Raises:
            FedtideError: it was masked for this try before, with other numbers or among others.
        """
        total = vector.numpy().view(np.uint64).copy()
        among = _plain(about.round, about.asked, about.key, [[k, peers[k]] for k in sorted(peers)])
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
            entry = _Sum(same, secrets.token_bytes(SEED), links, dict(peers), about, len(parts))
            self._used.add((context, client))
            self._open[context, client] = entry
            while len({(context_of_sum.version, context_of_sum.attempt) for context_of_sum, _ in self._open}) > KEPT:
                self._open.popitem(last=False)
        for number, part in enumerate(parts):
            piece = total[part]  # a copy, or a view that is written back as it is
            add_stream(piece, seed_of(entry.seed, number))
            for j, secret in entry.links.items():
                link(piece, client, j, seed_of(secret, number))
            total[part] = piece
        return torch.from_numpy(total.view(np.int64))

    def show(
        self, context: Context, client: int, alive: Sequence[int], fewest: int, parts: Sequence[int] = (0,)
    ) -> Shown:
        """Return the secrets that open parts of the sum of the clients in a list, of which this is one.

        Raises:
            FedtideError: there are fewer than `fewest`, or another list was named before, or nothing is known of it.
        """
        entry, named = self._open.get((context, client)), set(alive)
        if entry is None:
            raise FedtideError(STALE)
        if client not in named or not named <= entry.peers.keys() or len(named) != len(alive):
            raise refused("sum to open", sorted(named), f"clients that were asked, {client} among them")
        if not parts or sorted(set(parts)) != list(parts) or parts[-1] >= entry.parts:
            raise refused("parts to open", list(parts)[:20], f"each once, in their order, 0 to {entry.parts - 1}")
        if len(named) < fewest:
            raise refused("sum to open", len(named), f"{fewest} clients or more")
        if not hidden({peer: entry.peers[peer] for peer in named}, fewest):
            raise FedtideError(ALONE)
        others, digest = sorted(named - {client}), hashlib.sha256(_plain(*sorted(alive))).hexdigest()
        self._name(entry.about, client, digest)

        def pad(owner: int, helper: int, other: int) -> bytes:
            return derived(
                self._secret(entry.peers[other]), context.info("open", entry.about.key, digest, *parts, owner, helper)
            )

        def seeds(secret: bytes) -> bytes:
            return b"".join(seed_of(secret, part) for part in parts)

        return Shown(
            key_stream(_xor(*(pad(client, other, other) for other in others))).update(seeds(entry.seed)),
            {other: pad(other, client, other) for other in others},
            {j: seeds(secret) for j, secret in entry.links.items() if j not in named},
        )

    def _name(self, about: Question, client: int, digest: str) -> None:
        """Note the list that a question of a client is opened for; raise if it is another than before."""
        question = _plain(self.run, client, about.round, about.asked).decode()
        if question not in self._shown and about.round < self._latest.get(client, about.round):
            raise FedtideError(
                f"a sum of round {self._latest[client]} was opened before, so none of an earlier round is"
            )
        if self._shown.get(question, digest) != digest:
            raise FedtideError(ONE_LIST)
        if self._lists is not None and question not in self._shown:
            append(self._lists, f"{question} {digest}")
        self._remember(question, digest)

    def _remember(self, question: str, digest: str) -> None:
        _, client, number, _ = json.loads(question)
        self._shown.setdefault(question, digest)
        self._latest[client] = max(number, self._latest.get(client, number))

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


def fewest_in_unit(holders: Mapping[int, Hashable], fewest: int) -> int:
    """Return how many clients a unit of a sum must have for it to hide each of them, also from its holder.

    The units of a client are secret. So all clients of one holder may be in the same unit.

    Args:
        holders: of each client in the sum.
        fewest: clients below which no sum is opened.

    >>> [fewest_in_unit(dict(enumerate(holders)), 3) for holders in ("abcd", "aabb", "aaab", "aaa")]
    [3, 4, 5, 3]
    """
    counts = Counter(holders.values())
    return fewest if len(counts) == 1 else fewest - 1 + max(counts.values())


ALONE = "too few clients of its sum are at other nodes than one, which could tell the server of these"
"""Reason of a node that does not mask an answer, or open a sum, of which another node knows too much."""


ONE_LIST = "a question is opened for one list of clients"
"""Reason of a node that has opened the question of a round for another list."""


STALE = "its key for masks is another than the server knows"
"""Reason of a node that was started again, and has no secrets of earlier sums."""


@dataclass(repr=False)  # its secrets stand in no traceback
class _Sum:
    """A sum that is masked: a digest of the numbers and clients in it, and its secrets."""

    same: bytes
    seed: bytes
    links: dict[int, bytes]
    peers: dict[int, str]
    about: Question
    parts: int


def unmasked(
    masked: Mapping[int, Tensor], shown: Mapping[int, Shown], parts: Sequence[slice | Tensor] = (slice(None),)
) -> list[Tensor]:
    """Return parts of the sum of masked vectors without their masks, each int64.

    Args:
        masked: the vector that each client in the list sent.
        shown: what each of them gave to open these parts.
        parts: their places in a vector.
    """
    seeds = {i: key_stream(_xor(*(shown[other].opens[i] for other in masked if other != i))).update(shown[i].sealed)
             for i in masked}  # fmt: skip
    sums = []
    for number, part in enumerate(parts):
        seed = slice(SEED * number, SEED * (number + 1))
        total = np.zeros_like(next(iter(masked.values())).numpy().view(np.uint64)[part])
        for vector in masked.values():
            total += vector.numpy().view(np.uint64)[part]
        for i in masked:
            add_stream(total, seeds[i][seed], add=False)
            for j, secrets_of_parts in shown[i].links.items():
                link(total, i, j, secrets_of_parts[seed], off=True)
        sums.append(torch.from_numpy(total.view(np.int64)))
    return sums


def _signed_bytes(run: str, node: str, public: str) -> bytes:
    return _plain("fedtide", "key for masks", run, node, public)


def verified(run: str, node: str, bundle: Bundle) -> bool:
    """Tell whether a node's registered key signed its key for masks."""
    return verify_signature(bundle.identity, bundle.signature, _signed_bytes(run, node, bundle.public))
