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

A client of the list may vanish between the messages. Where a study has shares (`fedtide.wire.shares`), a message goes
before the first. Each client draws a key for this sum, and all s_ij are made of these keys. It deals shares of the key
and of b_i to all nodes. For a client that vanished the others give their shares of its b_i. For one that is not in the
list they give their shares of its key: so the server makes all s_ij of the two.

Two lists must not meet: with one the server could open b_i, and with the other the s_ij of the same i. Say that t of n
nodes are needed for a secret. Then a list is opened by clients of t nodes or more, and i is masked among all clients of
t nodes or more. All that a client sends, also shares, is sealed with what each other client that is left sends for the
same list. A share opens only if its holder was asked among the same clients. So a list that opens b_i has, of some
honest node, a client that i is masked with: no list gives their s_ij. Of two lists that open, 2t - n nodes were told
both. An honest node keeps all its clients to one list, so these lied, and they are `fewest - 1` or more. Without shares
as many can be in a list with one other client. t is the same for all secrets of a sum: with different ones fewer
nodes would do.

If more vanish nothing opens, and the same clients try again, with new masks and without training. They never try
without the vanished clients. Their messages may only be late, and the server would have two sums that differ by these.
Three rules keep this so:

1. A node opens a question of a round for one list, however often it is asked. It opens no earlier round after a later
   one. A client that vanished knows no list, so others may still open one with it.
2. At most a third of a list may vanish, and fewer than are left without the largest nodes. So sums of such lists,
   added and subtracted, tell of no fewer clients: each client is left in one list, and more are left than vanish.
3. A client deals shares of an answer among at most `SETS` sets of clients, and the nodes of a set open one list for it.
   Else a client could vanish from many lists, each with others. The mean of their sums would be nearly its answer, and
   a constant. Two lists of a set need 2t - n nodes that lie, as above. So that all mean the same set, shares are named
   by it, with nodes and keys. A node that is started again makes no new set, and knows the list of each set.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017). There all b_i
come by shares. Here they do where a client vanished.

Secrets are only in the memory of their node. Primitives are those of `cryptography`: X25519 (RFC 7748), HKDF-SHA256
(RFC 5869), ChaCha20 (RFC 8439) with a key for each stream, ECDSA over P-384.
"""

import hashlib
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.atomic import append
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.wire.keys import key_stream, library, sign, spell_public, verify_signature
from fedtide.wire.shares import MOST, SECRET, deal, needed

SEED = 32
"""Bytes of every secret."""

PIECE = 2**15
"""Numbers of a stream that are made at a time, which a cache holds."""

ZEROS = bytes(8 * PIECE)

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
"""A vector modulo 2^64."""

KEPT = 8
"""Tries whose secrets a node keeps; it forgets the oldest."""

USED = 50_000
"""Answers that a node masks under one key, and the secrets that it deals: it may do neither twice in a try, so it knows
of all of them. Then it draws another key."""

SETS = 3
"""Sets of clients among which shares of a client's answer to a question may be dealt: a server tries three times."""

AMONG, SET = "among ", "set "
"""Beginnings of the lines that tell these sets, and the list that one of them was opened for, in the file of a node's
lists."""


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

    def about(self, client: int) -> tuple[object, ...]:
        """Return the content of the signature of a client's key for the sum, beside this key."""
        return *self.version, self.slot, self.attempt, client


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
class Dealt:
    """Shares of a client's secrets for one sum, dealt before it is masked: others can open it without the client.

    Args:
        public: of its key for the sum, 64 hexadecimal digits.
        signature: by the registered key of its node, of `public` and the sum, in hexadecimal digits.
        needed: how many shares give a secret back.
        digest: of the secret of its b.
        seeds: shares of that secret, sealed for each node that was asked, in the order of their names.
        keys: shares of the secret of its key, likewise.
    """

    public: str
    signature: str
    needed: int
    digest: bytes
    seeds: bytes
    keys: bytes


@dataclass(frozen=True)
class Shown:
    """The secrets of a client that open parts of a sum. All but `opens` are under what all others give that are left.

    Args:
        sealed: its seeds of these parts.
        opens: by client that is left of the list, what it gives to open that one's secrets.
        links: by client that was asked and is not in the list, the seeds of the parts that they share.
        seeds: by client that vanished, what unseals the share that its node has of that one's b. The first client of a
            node that is left has these, and `keys`.
        keys: by client that was asked and is not in the list, what unseals the share of its key.
    """

    sealed: bytes
    opens: Mapping[int, bytes]
    links: Mapping[int, bytes]
    seeds: Mapping[int, bytes] = field(default_factory=dict)
    keys: Mapping[int, bytes] = field(default_factory=dict)


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
    return primitives.kdf.hkdf.HKDF(primitives.hashes.SHA256(), SEED, None, info).derive(secret)


def seed_of(secret: bytes, part: int) -> bytes:
    """Return the seed of a part of a vector."""
    return derived(secret, _plain("part", part))


def seeds_of(secret: bytes, parts: Sequence[int]) -> bytes:
    """Return the seeds of parts of a vector, one after the other."""
    return b"".join(seed_of(secret, part) for part in parts)


def _plain(*parts: object) -> bytes:
    """Spell out values so that different ones have different bytes."""
    return json.dumps(parts, separators=(",", ":")).encode()


def xor(*parts: bytes) -> bytes:
    """Add secrets bit by bit."""
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
        lists: file of the lists that sums were opened for, and of the sets that shares were dealt among. So a node that
            is started again knows them. It has a line for each, with a digest and no secret. None keeps them in memory.

    Raises:
        FedtideError: the file is damaged.
    """

    def __init__(
        self,
        run: str,
        node: str,
        identity: Any = None,
        trusts: Callable[[str, str], str | None] = lambda node, key: None,
        lists: Path | None = None,
    ) -> None:
        self.run, self.node, self._trusts, self._identity = run, node, trusts, identity
        self._lists = lists
        self._draw_key()
        self._lists_of_sets: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._sets: dict[str, set[str]] = {}
        self._latest: dict[int, int] = {}
        if lists is not None and lists.is_file():
            try:
                self._read_lists(lists.read_text(encoding="ascii"))
            except UNREADABLE as error:
                raise FedtideError(f"{lists}: damaged ({error}); allowed: what this node wrote there") from None

    def _read_lists(self, text: str) -> None:
        """Remember the lists that sums were opened for, and the sets that shares were dealt among."""
        *whole, _ = text.split("\n")  # a kill may have left half a line, before anything was shown
        for number, line in enumerate(whole, start=1):
            question, _, digest = line.rpartition(" ")
            if len(digest) != 64:
                raise ValueError(f"line {number}")
            if question.startswith(AMONG):
                self._sets.setdefault(question.removeprefix(AMONG), set()).add(digest)
            elif question.startswith(SET):
                self._lists_of_sets[question.removeprefix(SET)] = digest
            else:
                self._remember(question, digest)

    def _draw_key(self) -> None:
        """Draw a key, and know nothing of sums that were masked under another one: none of these can be opened."""
        self._key = library().hazmat.primitives.asymmetric.x25519.X25519PrivateKey.generate()
        self.bundle = Bundle(spell_key(self._key))
        if self._identity is not None:
            signature = sign(self._identity, _signed_bytes(self.run, self.node, self.bundle.public))
            self.bundle = replace(self.bundle, identity=spell_public(self._identity.public_key()), signature=signature)
        self._used: set[tuple[Context, int]] = set()
        self._dealt: OrderedDict[tuple[Context, int], _Deal] = OrderedDict()
        self._ever_dealt: set[tuple[Context, int]] = set()
        self._open: OrderedDict[tuple[Context, int], _Sum] = OrderedDict()
        self._lists_of: dict[Context, str] = {}
        self._shared: dict[str, bytes] = {}

    def _use(self, used: set[tuple[Context, int]], context: Context, client: int) -> None:
        """Note that a client has masked or dealt in a try; raise with another key drawn if there were too many."""
        if len(used) >= USED:
            self._draw_key()
            raise FedtideError(STALE)
        used.add((context, client))

    def check(self, bundles: Mapping[str, Bundle]) -> None:
        """Raise unless keys are those of the nodes that are named, this one's among them.

        Raises:
            FedtideError: one of them is not.
        """
        if bundles.get(self.node) != self.bundle:
            raise FedtideError(STALE)
        if len({bundle.public for bundle in bundles.values()}) < len(bundles):
            raise FedtideError("two nodes have the same key for masks")
        if any(has_idle_bit(bundle.public) for bundle in bundles.values()):
            raise FedtideError("a key for masks is none")
        for node, bundle in bundles.items():
            if node == self.node:
                continue
            # Before its key is known as that of the node.
            if self._identity is not None and not verified(self.run, node, bundle):
                raise FedtideError(f"node '{node}': its key for masks is not signed by its registered key")
            if (why := self._trusts(node, bundle.identity)) is not None:
                raise FedtideError(f"node '{node}': {why}")

    def check_drawn(
        self, context: Context, drawn: Mapping[int, tuple[str, str]], nodes: Mapping[int, tuple[str, Bundle]]
    ) -> None:
        """Raise unless keys for a sum are those of the clients of nodes whose keys were checked.

        Args:
            context: which sum.
            drawn: by client the key and its signature.
            nodes: by client the name of its node and that one's key.

        Raises:
            FedtideError: a client has none, or one that its node did not sign.
        """
        for client, (node, bundle) in nodes.items():
            public, signature = drawn.get(client, ("", ""))
            key = replace(bundle, public=public, signature=signature)
            is_known = self._identity is None or verified(self.run, node, key, *context.about(client))
            if not public or not is_known:
                raise FedtideError(f"node '{node}': its key for a sum is not signed by its registered key")

    def deal(
        self, context: Context, client: int, asked: Mapping[int, tuple[str, str]], fewest: int, wanted: int = 0
    ) -> Dealt:
        """Draw a client's secrets for a sum, and share them.

        Args:
            context: which sum.
            client: a client of this node.
            asked: by client that is asked the same, the name of its node and that one's public key.
            fewest: clients below which the study opens no sum.
            wanted: the same of the node's owner, if that is more.

        Raises:
            FedtideError: they were dealt to others, there are too many, or the client has masked the sum before. Or the
                owner wants more nodes to be needed than the study, and so than all others.
        """
        holders = tuple(public for _, public in sorted(set(asked.values())))
        enough = needed(len(holders), fewest)
        if (most := needed(len(holders), max(fewest, wanted))) > enough:
            but = f"with shares of {enough} of {len(holders)} nodes, and its owner's `fewest` of {wanted} wants {most}"
            raise FedtideError(f"its study opens a sum {but}")
        peers = {k: public for k, (_, public) in asked.items()}
        entry = self._dealt.get((context, client))
        # Also if it was forgotten: shares of other secrets under the same keys would tell both.
        is_used = (context, client) in self._used or (context, client) in self._ever_dealt
        if is_used and (entry is None or entry.peers != peers):
            raise FedtideError("secrets of a sum are dealt once in a try")
        if len(holders) > MOST:
            raise refused("nodes to deal shares to", len(holders), f"at most {MOST}")
        if entry is None:
            seed, key = secrets.token_bytes(SECRET), secrets.token_bytes(SECRET)
            private = key_of_sum(key, context, client)
            public = spell_key(private)
            about = _signed_bytes(self.run, self.node, public, *context.about(client))
            self._use(self._ever_dealt, context, client)
            among, names = _digest_of(asked), _digest_of({k: name for k, (name, _) in asked.items()})
            dealing = Dealt(
                public,
                "" if self._identity is None else sign(self._identity, about),
                enough,
                derived(seed, context.info("digest", client)),
                *(deal(secret, [self._share(context, (kind, client, public, among), holder, holder)
                                for holder in holders], enough)
                  for kind, secret in (("seed", seed), ("key", key))),
            )  # fmt: skip
            entry = self._dealt[context, client] = _Deal(
                dealing, private, seed_of_sum(seed, context, client), peers, among, names
            )
            _forget_oldest(self._dealt)
        return entry.dealing

    def masked(
        self,
        context: Context,
        client: int,
        vector: Tensor,
        peers: Mapping[int, str],
        about: Question = Question(),
        parts: Sequence[slice | Tensor] = (slice(None),),
        drawn: Mapping[int, str] | None = None,
    ) -> Tensor:
        """Return a client's vector under its masks, int64.

        Args:
            context: which sum it is for.
            client: a client of this node.
            vector: in fixed point.
            peers: by client that is asked the same, the public key of its node.
            about: what it was asked.
            parts: of the vector, as of `Form.parts`.
            drawn: by the same clients, their public keys for this sum, if shares of them were dealt.

        Raises:
            FedtideError: it was masked for this try before, with other numbers or among others. Or its key for this sum
                is another one. Or some of these nodes have no shares of it, or they are fewer than give it back. Or
                shares of an answer to the question were dealt among `SETS` other sets of clients.
        """
        total = vector.numpy().view(np.uint64).copy()
        keys = peers if drawn is None else drawn
        among = _plain(about.round, about.asked, about.key, [[k, peers[k], keys.get(k)] for k in sorted(peers)])
        same = hashlib.sha256(total.tobytes() + among).digest()
        entry = self._open.get((context, client))
        if (context, client) in self._used and (entry is None or entry.same != same):
            raise FedtideError("a sum is masked once in a try")
        if entry is None:
            agreed, seed, enough, dealt, names = self._secret, secrets.token_bytes(SEED), 0, "", ""
            if drawn is not None:
                mine = self._dealt.get((context, client))
                if mine is None or drawn.get(client) != mine.dealing.public:
                    raise FedtideError(STALE)
                if drawn.keys() != peers.keys() or not peers.items() <= mine.peers.items():
                    raise FedtideError("its key for this sum was dealt without some of those who are asked")
                agreed, seed, enough = partial(agree, mine.private), mine.seed, mine.dealing.needed
                dealt, names = mine.among, mine.names
                if whole_holders(mine.peers, peers.keys()) < enough:
                    raise FedtideError(f"a sum with shares is of all clients at {enough} nodes or more")
                self._note_set(self._question(about, client), names)
            links = {j: link_seed(agreed(key), context, about.key, client, j) for j, key in keys.items() if j != client}
            entry = _Sum(same, seed, links, dict(peers), about, len(parts), enough, dict(keys), dealt, names)
            self._use(self._used, context, client)
            self._open[context, client] = entry
            _forget_oldest(self._open)
        for number, part in enumerate(parts):
            piece = total[part]  # a copy, or a view that is written back as it is
            add_stream(piece, seed_of(entry.seed, number))
            for j, secret in entry.links.items():
                link(piece, client, j, seed_of(secret, number))
            total[part] = piece
        return torch.from_numpy(total.view(np.int64))

    def show(
        self,
        context: Context,
        client: int,
        alive: Sequence[int],
        fewest: int,
        parts: Sequence[int] = (0,),
        lost: Sequence[int] = (),
    ) -> Shown:
        """Return the secrets that open parts of the sum of the clients in a list, of which this is one.

        Args:
            context: which sum.
            client: a client of this node.
            alive: the list.
            fewest: clients below which no sum is opened.
            parts: their numbers.
            lost: clients of the list that vanished: others give their shares in place of them.

        Raises:
            FedtideError: fewer than `fewest` are left, or too many vanished, or another list was named before, or
                nothing is known of it.
        """
        entry, named = self._open.get((context, client)), set(alive)
        if entry is None:
            raise FedtideError(STALE)
        if client not in named or not named <= entry.peers.keys() or len(named) != len(alive):
            raise refused("sum to open", sorted(named), f"clients that were asked, {client} among them")
        if not parts or sorted(set(parts)) != list(parts) or parts[-1] >= entry.parts:
            raise refused("parts to open", list(parts)[:20], f"each once, in their order, 0 to {entry.parts - 1}")
        stay, gone = named - set(lost), set[int]()
        if lost:
            if not entry.enough:
                raise FedtideError("no shares were dealt of this sum, so all of its clients have to open it")
            if client not in stay or not set(lost) <= named or len(set(lost)) != len(lost):
                raise refused("clients that vanished", sorted(lost), f"others than {client} in the list, each once")
            gone = entry.peers.keys() - named
        if len(stay) < fewest:
            raise refused("sum to open", len(stay), f"{fewest} clients or more")
        if not hidden({peer: entry.peers[peer] for peer in stay}, fewest):
            raise FedtideError(ALONE)
        if entry.enough and not enough_left(entry.peers, named, stay, entry.enough, fewest):
            but = f"with clients of {entry.enough} nodes left, and without at most a third of its own"
            raise refused("sum to open", sorted(stay), but)
        others, digest = sorted(stay - {client}), hashlib.sha256(_plain(*sorted(alive))).hexdigest()
        told_digest = hashlib.sha256(_plain(sorted(alive), sorted(lost))).hexdigest()
        if self._lists_of.setdefault(context, digest) != digest:
            raise FedtideError(ONE_LIST)
        if entry.enough:
            self._note_list(_plain(self.run, entry.about.round, entry.about.asked, entry.names).decode(), digest)
        for mine in sorted(named):  # a client of this node cannot have vanished: it keeps to the list, too
            if entry.peers[mine] == self.bundle.public:
                self._name(entry.about, mine, digest)

        def pad(owner: int, helper: int, other: int) -> bytes:
            return derived(
                self._secret(entry.peers[other]),
                context.info("open", entry.about.key, told_digest, *parts, owner, helper),
            )

        def shares(kind: str, dealers: Collection[int]) -> dict[int, bytes]:
            first = min(k for k in stay if entry.peers[k] == self.bundle.public)
            return {
                k: self._share(context, (kind, k, entry.keys[k], entry.dealt), self.bundle.public, entry.peers[k])
                for k in sorted(dealers) if first == client
            }  # fmt: skip

        links = {j: seeds_of(secret, parts) for j, secret in entry.links.items() if j not in named}
        secret = Shown(seeds_of(entry.seed, parts), {}, links, shares("seed", lost), shares("key", gone))
        opens = {other: pad(other, client, other) for other in others}
        return replace(put_under(secret, [pad(client, other, other) for other in others]), opens=opens)

    def _name(self, about: Question, client: int, digest: str) -> None:
        """Note the list that a question of a client is opened for; raise if it is another than before."""
        question = self._question(about, client)
        if question not in self._shown and about.round < self._latest.get(client, about.round):
            raise FedtideError(
                f"a sum of round {self._latest[client]} was opened before, so none of an earlier round is"
            )
        if self._shown.get(question, digest) != digest:
            raise FedtideError(ONE_LIST)
        if self._lists is not None and question not in self._shown:
            append(self._lists, f"{question} {digest}")
        self._remember(question, digest)

    def _note_set(self, question: str, names: str) -> None:
        """Note the set of clients among which shares of an answer were dealt; raise if there were enough others."""
        sets = self._sets.setdefault(question, set())
        if names in sets:
            return
        if len(sets) >= SETS:
            raise FedtideError(f"shares of an answer are dealt among at most {SETS} sets of clients")
        if self._lists is not None:
            append(self._lists, f"{AMONG}{question} {names}")
        sets.add(names)

    def _note_list(self, key: str, digest: str) -> None:
        """Note the list that a question is opened for in a set of clients; raise if it is another than before."""
        if self._lists_of_sets.get(key, digest) != digest:
            raise FedtideError(ONE_LIST)
        if self._lists is not None and key not in self._lists_of_sets:
            append(self._lists, f"{SET}{key} {digest}")
        self._lists_of_sets[key] = digest

    def _question(self, about: Question, client: int) -> str:
        return _plain(self.run, client, about.round, about.asked).decode()

    def _remember(self, question: str, digest: str) -> None:
        _, client, number, _ = json.loads(question)
        self._shown.setdefault(question, digest)
        self._latest[client] = max(number, self._latest.get(client, number))

    def _secret(self, key: str) -> bytes:
        if key not in self._shared:
            self._shared[key] = agree(self._key, key)
        return self._shared[key]

    def _share(self, context: Context, secret: tuple[str, int, str, str], holder: str, peer: str) -> bytes:
        """Return the key that seals a holder's share of a secret; `peer` is the public key of the other node.

        The secret is named by its kind, its client, that one's key for the sum and the digest of those who are asked.
        """
        return derived(self._secret(peer), context.info("share", *secret, holder))


def agree(private: Any, public: str) -> bytes:
    """Return the secret of a private key and a public one.

    Raises:
        FedtideError: the public key is none.
    """
    x25519 = library().hazmat.primitives.asymmetric.x25519
    try:
        secret: bytes = private.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError:
        raise FedtideError("a key for masks is none") from None
    return secret


def has_idle_bit(public: str) -> bool:
    """Tell whether a public key has the bit that X25519 ignores, so that it could be spelled in two ways."""
    return int(public[-2:], 16) > 127


def spell_key(private: Any) -> str:
    """Return the public half of a key in hexadecimal digits."""
    return private.public_key().public_bytes_raw().hex()


def key_of_sum(secret: bytes, context: Context, client: int) -> Any:
    """Return a client's key for one sum, from the secret of which it deals shares."""
    x25519 = library().hazmat.primitives.asymmetric.x25519
    return x25519.X25519PrivateKey.from_private_bytes(derived(secret, context.info("key", client)))


def seed_of_sum(secret: bytes, context: Context, client: int) -> bytes:
    """Return a client's b for one sum, from the secret of which it deals shares."""
    return derived(secret, context.info("seed", client))


def link_seed(secret: bytes, context: Context, key: str, i: int, j: int) -> bytes:
    """Return the seed of two clients' mask, from the secret of their keys and what they were asked."""
    return derived(secret, context.info("mask", key, *sorted((i, j))))


def _forget_oldest(sums: OrderedDict[tuple[Context, int], Any]) -> None:
    """Forget all but the last tries."""
    while len({(context.version, context.attempt) for context, _ in sums}) > KEPT:
        sums.popitem(last=False)


def put_under(secret: Shown, pads: Sequence[bytes]) -> Shown:
    """Return the secrets of a client under pads of the others, or those that are under them without."""
    stream = key_stream(xor(*pads))

    def through(table: Mapping[int, bytes]) -> dict[int, bytes]:
        return {k: stream.update(table[k]) for k in sorted(table)}

    sealed = stream.update(secret.sealed)
    return Shown(sealed, secret.opens, through(secret.links), through(secret.seeds), through(secret.keys))


def hidden(holders: Mapping[int, Hashable], fewest: int) -> bool:
    """Tell whether a sum hides clients from some of their holders, too, that the server shows it to.

    A holder knows the answers of its own clients, and may say that it has many. So without all clients of any `c`
    others `fewest - c` are left, as with one client for each holder.

    Args:
        holders: of each client in the sum.
        fewest: clients below which no sum is opened.

    >>> [hidden(dict(enumerate(holders)), 3) for holders in ("abc", "aab", "aabb", "aaaaab", "aaa")]
    [True, False, True, False, True]
    >>> [hidden(dict(enumerate(holders)), 4) for holders in ("aaabbbc", "aaabbbcd", "aaabbb")]
    [False, True, True]
    """
    return exposed(holders, fewest) == 0


def exposed(holders: Mapping[int, Hashable], fewest: int) -> int:
    """Return how many of the largest holders in a sum know too much of it with the server; 0 if none do."""
    counts = sorted(Counter(holders.values()).values(), reverse=True)
    several = range(1, min(fewest - 1, len(counts)))
    return next((c for c in several if len(holders) - sum(counts[:c]) < fewest - c), 0)


def whole_holders(asked: Mapping[int, Hashable], clients: Collection[int]) -> int:
    """Count the holders of clients that were asked, of whom all clients are among some.

    >>> whole_holders(dict(enumerate("aabbc")), {0, 1, 2, 4})
    2
    """
    return len(set(asked.values()) - {holder for client, holder in asked.items() if client not in clients})


def _digest_of(asked: Mapping[int, object]) -> str:
    return hashlib.sha256(_plain(sorted(asked.items()))).hexdigest()


def enough_left(holders: Mapping[int, Hashable], named: set[int], stay: set[int], enough: int, fewest: int) -> bool:
    """Tell whether the clients that are left can open the sum with their shares.

    Args:
        holders: of each client that was asked.
        named: clients of the list.
        stay: those of them that are left.
        enough: how many shares give a secret back.
        fewest: clients below which no sum is opened. So many nodes less two may help the server, with all clients that
            they have or make up. Of the others more have to be left than vanished. Else sums of several lists, in which
            others vanish, could cancel but for one client.

    >>> asked = dict(enumerate("aabcdef"))
    >>> [enough_left(asked, {0, 2, 3, 4, 5, 6}, stay, 4, 3) for stay in ({0, 2, 3, 4}, {0, 2, 3})]
    [True, False]
    >>> enough_left(asked, {0, 1, 2, 3, 4}, {0, 1, 2, 3}, 4, 3)
    False
    >>> [enough_left(asked, set(range(7)), {0, 2, 3, 4, 5}, 4, fewest) for fewest in (4, 5)]
    [True, False]
    >>> made_up = dict(enumerate("aabbhhhhhh"))  # one node says that it has six clients
    >>> enough_left(made_up, set(made_up), set(made_up) - {2, 3}, 2, 3)
    False
    """
    lost, counts = len(named - stay), sorted(Counter(holders[k] for k in stay).values(), reverse=True)
    without = (len(stay) - sum(counts[:helping]) - (fewest - 1 - helping) for helping in range(fewest - 1))
    return len(counts) >= enough and 3 * lost <= len(named) and all(lost <= left for left in without)


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


ALONE = "too few clients of its sum are at other nodes than the largest, which could tell the server of theirs"
"""Reason of a node that does not mask an answer, or open a sum, of which some other nodes know too much."""


ONE_LIST = "a question is opened for one list of clients"
"""Reason of a node that has opened the question of a round for another list."""


STALE = "its key for masks is another than the server knows"
"""Reason of a node that was started again, and has no secrets of earlier sums."""


@dataclass(repr=False)  # its secrets stand in no traceback
class _Sum:
    """A sum that is masked: a digest of numbers and clients, its secrets, and how many nodes give these back, or 0."""

    same: bytes
    seed: bytes
    links: dict[int, bytes]
    peers: dict[int, str]
    about: Question
    parts: int
    enough: int
    keys: dict[int, str]
    dealt: str
    names: str


@dataclass(repr=False)
class _Deal:
    """The secrets of a client for a sum, its shares of them, and by client that was asked its node's public key.

    Beside that a digest of who was asked, with nodes and keys, and one of the same without keys.
    """

    dealing: Dealt
    private: Any
    seed: bytes
    peers: dict[int, str]
    among: str
    names: str


def _signed_bytes(run: str, node: str, public: str, *about: object) -> bytes:
    return _plain("fedtide", "key for masks", run, node, public, *about)


def verified(run: str, node: str, bundle: Bundle, *about: object) -> bool:
    """Tell whether a node's registered key signed its key for masks, or with `Context.about` that for one sum.

    No node could mask with some keys, so a node that signs such a one is left out. Nor would others with a bit that
    X25519 ignores.
    """
    try:
        agree(key_of_sum(bytes(SECRET), Context("", (0, 0), 0, ""), 0), bundle.public)
    except FedtideError:
        return False
    if has_idle_bit(bundle.public):
        return False
    return verify_signature(bundle.identity, bundle.signature, _signed_bytes(run, node, bundle.public, *about))
