"""Masked sums at a node: why it does not mask an answer, how it masks one, and how it opens a sum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.remote.messages import MaskedHeader, MaskHeader, SecretsHeader, UnmaskHeader, WorkHeader
from fedtide.wire.masks import ALONE, Context, Masker, Question, hidden


def objection(masker: Masker, asked: MaskedHeader, fewest: int) -> str | None:
    """Return why a node does not mask its answers to a question, or does not open a sum; None if it does."""
    mask = asked.mask
    if mask is None:
        return "its study masks sums, and this one would not be"
    for client in asked.clients:
        peers = mask.peers.get(_slot(asked, client), {})
        if peers.get(str(client)) != masker.node or not set(peers.values()) <= mask.keys.keys():
            return "the server does not say who else is asked"
        if len(peers) < fewest:
            return f"a sum of {len(peers)} clients is not masked; allowed: {fewest} or more"
        if not hidden({int(other): mask.keys[node].bundle().public for other, node in peers.items()}, fewest):
            return ALONE
    try:
        masker.check({name: key.bundle() for name, key in mask.keys.items()})
    except FedtideError as error:
        return str(error)
    return None


def masked(masker: Masker, asked: WorkHeader, received: Tree, sent: Mapping[int, Tree]) -> dict[int, Tree]:
    """Mask the answers of clients, under the masks of a question and of its payload."""
    digests = {
        slot: hashlib.sha256(codec.to_bytes(received if asked.slot is None else received[int(slot)])).hexdigest()
        for slot in {_slot(asked, client) for client in sent}
    }
    name = json.dumps([asked.moment.round, asked.purpose])
    what = [asked.question, name, asked.moment.rounds, asked.moment.seconds, sorted(asked.reveal)]
    forms = {slot: form.model_dump() for slot, form in (asked.forms or {}).items()}
    about = {slot: Question(name, json.dumps([*what, forms.get(slot), digest])) for slot, digest in digests.items()}
    mask = asked.mask
    assert mask is not None
    return {
        client: {
            **answer,
            "total": masker.masked(
                _context(asked, mask, client),
                client,
                answer["total"],
                _publics(mask, asked, client),
                about[_slot(asked, client)],
            ),
        }
        for client, answer in sent.items()
    }


def show(masker: Masker, asked: UnmaskHeader, fewest: int) -> dict[int, Tree]:
    """Return by client what opens the sum that it is in."""
    shown = {}
    for client in asked.clients:
        alive = asked.alive.get(_slot(asked, client), [])
        one = masker.show(_context(asked, asked.mask, client), client, alive, fewest)
        shown[client] = SecretsHeader.of(one)
    return shown


def _slot(asked: MaskedHeader, client: int) -> str:
    return "0" if asked.slot is None else str(asked.slot[str(client)])


def _context(asked: MaskedHeader, mask: MaskHeader, client: int) -> Context:
    version = (asked.version[0], asked.version[1])
    return Context(asked.run, version, int(_slot(asked, client)), mask.attempt)


def _publics(mask: MaskHeader, asked: MaskedHeader, client: int) -> dict[int, bytes]:
    peers = mask.peers[_slot(asked, client)]
    return {int(other): mask.keys[node].bundle().public for other, node in peers.items()}
