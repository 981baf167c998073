"""Masked sums at the server: who is asked, and how a sum of all who answered is opened."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtide.core.atomic import append
from fedtide.core.base import Payload
from fedtide.fleets.ask import Ask
from fedtide.remote.asks import ANSWERED, LOST, REFUSED, UNOPENED, UNSIGNED
from fedtide.remote.mailbox import Mailbox
from fedtide.remote.node import question_key
from fedtide.remote.node_answers import Post, Received, keep_wanted
from fedtide.wire.keys import shamir
from fedtide.wire.masks import (
    ONE_LIST,
    SEED,
    SETS,
    STALE,
    Bundle,
    Context,
    Dealt,
    Shown,
    enough_left,
    fewest_in_unit,
    hidden,
    whole_holders,
)
from fedtide.wire.pipeline import Opening
from fedtide.wire.scores import listed
from fedtide.wire.shares import MOST, SEALED, needed
from fedtide.wire.unmask import Vanished, recovered, unmasked, unsealed
from fedtide.wire.vector import BITS

Closed = Mapping[int, tuple[int, int]]
"""By unit that stays closed, how many clients have something in it, and how many it needs."""

CLIENTS = 2000
"""Clients of a question whose keys for its sums, with signatures, fit into a header; of more no shares are dealt."""

TRIES = SETS
"""How often a sum is masked anew if clients vanish before it is opened: nodes deal shares no more often."""


def by_slot(ask: Ask) -> dict[int, list[int]]:
    """Return the clients of each slot that has any, of 0 if there are no slots."""
    if ask.slot is None:
        return {0: ask.clients.tolist()} if len(ask.clients) else {}
    return {slot: ask.clients[ask.slot == slot].tolist() for slot in ask.slot.unique().tolist()}


@dataclass(frozen=True)
class Opened:
    """The result of masked sums.

    Attributes:
        sums: without their masks, by slot, or 0.
        clients: those in them.
        why: the word of the record for others whose sum there is not.
        unmet: what was said in place of a key, of clients that were not asked for that.
        shut: clients that keep a sum shut.
        closed: by slot, or 0, the units that some clients have something in, and too few to be opened.
        amiss: by client, why others opened its sum by shares, or why its share of another does not count.
        answers: of the clients in the sums, as they were added.
    """

    sums: dict[int, Tensor]
    clients: frozenset[int]
    why: Mapping[int, str]
    unmet: Mapping[int, str]
    shut: frozenset[int] = frozenset()
    closed: Mapping[int, Closed] = field(default_factory=dict)
    amiss: Mapping[int, str] = field(default_factory=dict)
    answers: Mapping[int, Received] = field(default_factory=dict)


@dataclass
class LeftOut:
    """Clients that keep sums shut. They are not drawn for a while, because the others in their sums lose a round.

    >>> shut, left = Opened({}, frozenset(), {}, {}, frozenset({2})), LeftOut()
    >>> for number in (0, 2, 5):
    ...     left.note(number, shut)
    >>> [sorted(left.clients_in(number)) for number in (6, 9, 10)]
    [[2], [2], []]
    >>> left.note(10, Opened({}, frozenset({2}), {}, {}))
    >>> left.note(11, shut)
    >>> [sorted(left.clients_in(number)) for number in (12, 13)]
    [[2], []]
    """

    _last: dict[int, tuple[int, int]] = field(default_factory=dict)
    _good: dict[int, int] = field(default_factory=dict)

    def note(self, number: int, opened: Opened) -> None:
        """Note what came of a sum of a round: for a round is left out who kept it shut, for twice as many each time.

        A sum of a later round that opens with the client ends that. If the client keeps another one of this round shut,
        it is as if it had kept both.
        """
        for client in opened.clients & self._last.keys():
            if self._last[client][0] < number:
                self._good.setdefault(client, number)
        for client in opened.shut:
            before, times = self._last.get(client, (number - 1, 0))
            times *= self._good.pop(client, number) == number
            self._last[client] = number, times + (before < number)

    def clients_in(self, number: int) -> set[int]:
        """Return the clients that are not drawn in a round."""
        return {
            client for client, (last, times) in self._last.items()
            if client not in self._good and number <= last + 2 ** min(times - 1, 10)
        }  # fmt: skip


@dataclass(frozen=True)
class Masking:
    """The preparation of a try, before answers are masked.

    Args:
        mask: how they are, in plain JSON.
        dealt: what clients dealt.
        holders: by slot, or 0, the names of the nodes that have shares, sorted.
    """

    mask: Mapping[str, Any]
    dealt: Mapping[int, Dealt] = field(default_factory=dict)
    holders: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass
class Try:
    """A try to open sums, and how far it got.

    Args:
        here: the question to all that were asked.
        payload: what they received.
        alive: the question to those that answered.
        answers: their answers.
        masking: how these are masked, and what clients dealt before.
        until: when all must have sent their secrets.
        sums: by slot, or 0, without masks, as far as they were opened; the rest is zero.
        lost: why, of clients that vanished since.
        wrong: what they sent, of clients whose shares do not count.
        vanished: secrets of those that vanished, as far as they were had by shares.
    """

    here: Ask
    payload: Payload
    alive: Ask
    answers: Mapping[int, Received]
    masking: Masking
    until: float
    sums: dict[int, Tensor] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    vanished: dict[int, Vanished] = field(default_factory=dict, repr=False)


@dataclass
class MaskedSums:
    """How a server asks for answers with masks, and has their sums opened.

    Args:
        mail: sends questions and receives answers.
        offer: receives the question to the clients that are asked to open its sums, before they are asked.
        signed: tells whether a key, and for what, is signed by the registered one of its node; others would refuse to
            mask with it.
        fewest: number of answers below which no sum is opened.
        file: the keys that nodes have said, with whose they are. A server that is started again has to know them: nodes
            know the keys of the others, and could say one of these first. None keeps them in memory.
    """

    mail: Mailbox
    offer: Callable[[Ask], None]
    signed: Callable[..., bool]
    fewest: int = 1
    file: Path | None = None
    _keys: dict[str, Bundle] = field(default_factory=dict, init=False, repr=False)
    _first: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _unmet: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _stale: set[int] = field(default_factory=set, init=False, repr=False)
    _tries: int = field(default=0, init=False)
    _lists: dict[tuple[int, str, int], list[int]] = field(default_factory=dict, init=False, repr=False)
    _began: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        text = self.file.read_text(encoding="utf-8") if self.file is not None and self.file.is_file() else ""
        for line in text.split("\n")[:-1]:  # behind the last end a kill may have left half of one, of no use yet
            key, _, node = line.partition(" ")
            self._first.setdefault(key, node)

    def open(self, ask: Ask, payload: Payload, seconds: float, first: int) -> Opened:
        """Put a question until all who answered it open their sums, too; return these without their masks.

        If some of them vanish in between, the others give their shares. If too many vanish, the same ones try again,
        and train no more. They do not try without these. Their answers may come yet, and the server would have two sums
        that differ by few clients. Keys and shares have the seconds of a question, answers as many, and all later
        messages as many, for all tries together.
        """
        self._unmet, self._stale, number = {}, set(), ask.version[0]
        self._began = number if self._began is None else self._began
        ask = self._in_lists(ask)
        asked, named_before, why, bare, missing = ask, frozenset[int](), dict[int, str](), set[int](), set[int]()
        now, end = self.mail.clock.monotonic, math.inf
        for _ in range(TRIES):
            if now() >= end:
                break
            until = min(now() + seconds, end)
            here = self._in_enough(self._met(asked, until))
            here, masking = self._deal(here, until, bare)
            if masking is None:
                continue
            self._ask_until(min(now() + seconds, end), here, payload, "ask", first, mask=masking.mask)
            end = min(now() + seconds, end)
            answers = self.mail.received("ask", set(here.clients.tolist()))
            stale = {client for client, answer in answers.items() if answer.word == REFUSED + STALE}
            self._unmet |= dict.fromkeys(stale & self._stale, REFUSED + STALE)  # the others go on without these
            new, self._stale = stale - self._stale, self._stale | stale
            if self._forget_keys(new):
                why |= dict.fromkeys(new, REFUSED + STALE)
                continue
            answered = [client for client, answer in answers.items() if answer.word == ANSWERED][:first]
            if len(answered) < self.fewest:  # before any node shows or counts anything
                break
            if shared := frozenset(answered) & masking.dealt.keys():  # others may open these, so their nodes count them
                self.offer(_only(here, set(shared)))
            alive = self._in_enough(self._hidden_as_wanted(here, set(answered), answers))
            clients = frozenset(alive.clients.tolist())
            if named_before and clients != named_before:
                continue
            if not clients:
                break
            left = {slot: ids for slot, ids in by_slot(alive).items() if slot in masking.holders}
            node_of = self.mail.node_of
            if few := {s for s, ids in left.items() if len({node_of[k] for k in ids}) < self._enough(masking, ids)}:
                bare |= few  # no list of so few may be opened that has shares: they mask anew without
                continue
            if not self._names_the_same(alive):
                missing = self._missing(alive) & set(ask.clients.tolist())
                break
            asked, named_before = alive, clients
            self.offer(alive)
            this = Try(here, payload, alive, answers, masking, end)
            why, closed = self._open_parts(this)
            self._forget_keys(this.lost)
            if not self._forget_keys(why):
                amiss = {client: word.removeprefix(LOST) for client, word in (this.wrong | this.lost).items()}
                result = self._checked(ask, alive, this.sums)
                added = {client: answers[client] for client in sorted(result.clients)}
                return replace(result, closed=closed, amiss=amiss, answers=added)
        # An earlier server may have named another list in the first round of this one, and in no later one.
        unknown = number == self._began
        silent = {k for k, word in why.items() if word != UNOPENED and not (unknown and ONE_LIST in word)}
        return Opened({}, frozenset(), why, self._unmet, frozenset(silent | missing) | self._barred)

    def _in_lists(self, ask: Ask) -> Ask:
        """Return the question to the list that one of its name was opened for in its round: nodes keep to it."""
        members, lists = set[int](), self._lists_of(ask)
        for clients in by_slot(ask).values():
            before = {tuple(lists[client]) for client in clients if client in lists}
            members |= set(clients if len(before) != 1 else before.pop())
        return _only(ask, members)

    def _missing(self, ask: Ask) -> set[int]:
        """Return the clients that lists were named with before, and that did not answer: without them nothing opens."""
        before = {client for members in self._lists_of(ask).values() for client in members}
        return before - set(ask.clients.tolist())

    def _lists_of(self, ask: Ask) -> dict[int, list[int]]:
        """Return by client the list that was named before in a question of this name and round, if there was one."""
        keys = {client: (ask.version[0], listed(ask.question), client) for client in ask.clients.tolist()}
        return {client: self._lists[key] for client, key in keys.items() if key in self._lists}

    def _names_the_same(self, ask: Ask) -> bool:
        """Tell whether clients were asked to open a question of its round for no other list: they would not."""
        number, name = ask.version[0], listed(ask.question)
        lists = {(number, name, client): members for members in by_slot(ask).values() for client in members}
        before = {key: members for key, members in self._lists.items() if key[0] == number}
        self._lists = lists | before
        return all(self._lists[key] == members for key, members in lists.items())

    def _deal(self, ask: Ask, until: float, bare: Collection[int]) -> tuple[Ask, Masking | None]:
        """Have clients deal shares before a try, in slots of which nodes may then vanish.

        It is no work, and has a quarter of the time.

        Args:
            until: when answers must be there.
            bare: slots in which none are dealt, and too few answered for shares.

        Returns:
            The question to those that did, or have to deal none. The shares; None if a node was started again, so that
            others have to know its new key. One that says so twice is not asked again.
        """
        self._tries += 1
        node_of, mask, now = self.mail.node_of, self._mask(ask), self.mail.clock.monotonic()
        fewest = self.mail.vectors.wire.fewest
        asked = {slot: {client: node_of[client] for client in ids} for slot, ids in by_slot(ask).items()}
        nodes = {slot: sorted(set(of.values())) for slot, of in asked.items() if self.mail.vectors.wire.shares}
        holders = {slot: names for slot, names in nodes.items()
                   if slot not in bare and needed(len(names), fewest) < len(names) <= MOST}  # fmt: skip
        slot_of = {client: slot for slot, ids in by_slot(ask).items() if slot in holders for client in ids}
        if not 0 < len(slot_of) <= CLIENTS:
            return ask, Masking(mask)
        shamir()
        self._ask_until(now + (until - now) / 4, _only(ask, set(slot_of)), {}, "deal", mask=mask)
        answers, dealt, stale = self.mail.received("deal", set(slot_of)), dict[int, Dealt](), list[int]()
        for client, slot in slot_of.items():
            self.mail.forget("deal", client)
            if (answer := answers.get(client)) is None:
                continue
            self._unmet[client], dealt_shares, name = answer.word, answer.content, node_of[client]
            if answer.word == REFUSED + STALE and client not in self._stale:
                stale.append(client)
                self._unmet[client] = UNOPENED
            elif answer.word == ANSWERED and not _fits(dealt_shares, len(holders[slot]), fewest):
                self._unmet[client] = f"{REFUSED}its shares are not for the nodes that are asked"
            elif answer.word == ANSWERED:
                key = Bundle(dealt_shares.public, self._keys[name].identity, dealt_shares.signature)
                if self.signed(name, key, *self._context(ask, slot, mask).about(client)):
                    dealt[client] = dealt_shares
                    del self._unmet[client]
                else:
                    self._unmet[client] = UNSIGNED
        self._stale |= set(stale)
        if self._forget_keys(stale):
            return ask, None
        whole, ask = ask, self._in_enough(_only(ask, set(ask.clients.tolist()) - slot_of.keys() | dealt.keys()))
        drawn = {
            str(client): {"public": dealt[client].public, "signature": dealt[client].signature}
            for client in ask.clients.tolist() if client in dealt
        }  # fmt: skip
        masking = Masking(self._mask(ask) | {"drawn": drawn}, dealt, holders)
        left = {slot: list[int]() for slot in holders} | by_slot(ask)
        least = {slot: max(self._enough(masking, left[slot]), 1) for slot in holders}
        if few := {slot for slot in holders if whole_holders(asked[slot], left[slot]) < least[slot]}:
            return self._deal(whole, until, {*bare, *few})
        return ask, masking

    def _enough(self, masking: Masking, clients: Iterable[int]) -> int:
        """Return at how many nodes a sum of clients must be, of all of which shares were dealt; 0 of none."""
        return max((masking.dealt[client].needed for client in clients), default=0)

    def _mask(self, ask: Ask) -> dict[str, Any]:
        """Return how answers to a question are masked in a try, in plain JSON."""
        node_of = self.mail.node_of
        names = sorted({node_of[client] for client in ask.clients.tolist()})
        peers = {str(slot): {str(client): node_of[client] for client in ids} for slot, ids in by_slot(ask).items()}
        keys = {name: asdict(self._keys[name]) for name in names}
        return {"attempt": f"{self.mail.life}.{self._tries}", "keys": keys, "peers": peers}

    def _context(self, ask: Ask, slot: int, mask: Mapping[str, Any]) -> Context:
        return Context(self.mail.run, ask.version, slot, mask["attempt"])

    def _open_parts(self, this: Try) -> tuple[dict[int, str], dict[int, Closed]]:
        """Open the first part of each sum, and then the units that enough clients have something in.

        Returns:
            Reasons of clients that opened none. The units that stay closed, by slot.
        """
        why = self._open_more(this, {slot: [0] for slot in by_slot(this.alive)}, {})
        parts, counts, closed = ({}, {}, {}) if why else self._find_units(this)
        return self._open_more(this, parts, counts) if parts else why, closed

    def _open_more(self, this: Try, parts: Mapping[int, list[int]], counts: Mapping[int, list[int]]) -> dict[int, str]:
        """Open parts of the sums of a try, and write them into these; return why clients opened none."""
        alive = this.alive
        assert alive.forms is not None
        members = {slot: clients for slot, clients in by_slot(alive).items() if slot in parts}
        clients = {client for ids in members.values() for client in ids}
        while True:
            lost = {slot: [client for client in ids if client in this.lost] for slot, ids in members.items()}
            if not all(self._enough_left(this, slot, ids, lost[slot]) for slot, ids in members.items() if lost[slot]):
                return dict(this.lost)
            now, stay = self.mail.clock.monotonic(), clients - this.lost.keys()
            how: dict[str, Any] = {
                name: {str(slot): value for slot, value in table.items() if value or name != "lost"}
                for name, table in (("alive", members), ("parts", parts), ("counts", counts), ("lost", lost))
            }
            seconds = (this.until - now) / (2 if this.masking.dealt else 1)  # time for shares of who vanishes
            mask = {key: value for key, value in this.masking.mask.items() if key != "drawn"}
            self._ask_until(now + seconds, _only(alive, stay), {}, "unmask", mask=mask, **how)
            answers = self.mail.received("unmask", stay)
            for client in stay:
                self.mail.forget("unmask", client)
            opened_by = self._opened_by(this, members, lost, answers, parts)
            this.lost.update({client: _shut(answers.get(client)) for client in sorted(stay - opened_by)})
            if stay == opened_by:
                break
        shown = {client: answer.content for client, answer in answers.items()}
        for slot, ids in members.items():
            if lost[slot] and (why := self._recover(this, slot, ids, lost[slot], shown)):
                return why
        for slot, ids in members.items():
            form = alive.forms[slot]
            places = [form.parts[part] for part in parts[slot]]
            masked = {client: this.answers[client].content["total"] for client in ids}
            vanished = {client: this.vanished[client] for client in lost[slot]}
            left = {client: shown[client] for client in ids if client not in vanished}
            opened = unmasked(masked, left, places, vanished, parts[slot])
            total = this.sums.setdefault(slot, torch.zeros(form.size, dtype=torch.int64))
            for place, numbers in zip(places, opened, strict=True):
                total[place] = numbers
        return {}

    def _enough_left(self, this: Try, slot: int, ids: Sequence[int], lost: Sequence[int]) -> bool:
        """Tell whether the others of a sum open it without those that vanished."""
        stay, node_of, fewest = set(ids) - set(lost), self.mail.node_of, self.mail.vectors.wire.fewest
        wanted = max(fewest, *(this.answers[client].fewest for client in ids))
        enough = self._enough(this.masking, by_slot(this.here)[slot] if slot in this.masking.holders else ())
        return (
            enough > 0
            and enough_left(node_of, set(ids), stay, enough, wanted)
            and len(stay) >= wanted
            and hidden({client: node_of[client] for client in stay}, wanted)
        )

    def _opened_by(
        self,
        this: Try,
        members: Mapping[int, list[int]],
        lost: Mapping[int, Sequence[int]],
        answers: Mapping[int, Received],
        parts: Mapping[int, Sequence[int]],
    ) -> set[int]:
        """Find the clients of sums that sent all secrets: of all others that are left, and of who is not in the sum."""
        asked, opened = by_slot(this.here), set()
        for slot, ids in members.items():
            left = set(ids) - set(lost[slot])
            gone, helpers = set(asked[slot]) - set(ids), self._helpers(left).values()
            for client in left:
                answer = answers.get(client)
                if answer is None or answer.word != ANSWERED:
                    continue
                content, helps = answer.content, client in helpers and lost[slot]
                if (
                    len(content.sealed) == SEED * len(parts[slot])
                    and content.opens.keys() == left - {client}
                    and content.links.keys() == gone
                    and content.seeds.keys() == set(lost[slot] if helps else ())
                    and content.keys.keys() == (gone if helps else set())
                ):
                    opened.add(client)
        return opened

    def _helpers(self, left: Iterable[int]) -> dict[str, int]:
        """Return by node its first client of those that are left of a sum, which gives its shares."""
        return {self.mail.node_of[client]: client for client in sorted(left, reverse=True)}

    def _recover(
        self, this: Try, slot: int, ids: Sequence[int], lost: Sequence[int], shown: Mapping[int, Shown]
    ) -> dict[int, str]:
        """Have by shares the secrets of clients that vanished; return by client why they cannot be had."""
        left, holders = [client for client in ids if client not in lost], list(this.masking.holders[slot])
        helpers = {holders.index(name): client for name, client in self._helpers(left).items()}
        new = [client for client in lost if client not in this.vanished]
        if not new:
            return {}
        here, gone = this.here, set(by_slot(this.here)[slot]) - set(ids)
        received, form = this.payload if here.slot is None else this.payload[slot], (here.forms or {}).get(slot)
        key = question_key(here.question, here.purpose, here.moment, here.reveal, form, received)
        context = self._context(here, slot, this.masking.mask)
        secrets = unsealed({client: shown[client] for client in left})
        gave = {place: secrets[client] for place, client in helpers.items()}
        vanished, wrong = recovered(context, key, this.masking.dealt, new, gone, gave)
        this.vanished.update(vanished)
        dealers, others = dict[int, str](), dict[int, str]()
        for fault in wrong:
            if fault.place is None:
                dealers[fault.client] = f"{LOST}its shares are not of the secret that it dealt"
            else:
                who = f"client {fault.client} dealt a wrong one, or one of the nodes that are left sent a wrong secret"
                others[helpers[fault.place]] = f"{LOST}its share of client {fault.client} does not open: {who}"
        this.wrong.update(others | dealers)
        # One wrong secret spoils the shares of all others, so these say nothing of who sent it.
        return {} if vanished else this.lost | dict.fromkeys(others, UNOPENED) | dealers

    def _find_units(self, this: Try) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, Closed]]:
        """Return by slot the parts behind the first that may be opened, the clients in each, and the closed units.

        Nothing exact is said of a private sum. The weights of its slots are those that it was chosen by.
        """
        alive, members = this.alive, by_slot(this.alive)
        assert alive.forms is not None
        wire, mail = self.mail.vectors.wire, self.mail
        parts, counts, closed = dict[int, list[int]](), dict[int, list[int]](), dict[int, Closed]()
        for slot, total in this.sums.items():
            form, named = alive.forms[slot], None if alive.slot is None else slot
            if not form.units or wire.fault(total, form, len(members[slot]), mail.heaviest):
                continue
            opening = Opening(alive.question, alive.version, named, tuple(members[slot]), form)
            wanted = max(wire.fewest, *(this.answers[client].fewest for client in members[slot]))
            fewest = fewest_in_unit({client: mail.node_of[client] for client in members[slot]}, wanted)
            units = wire.find_units(total, opening, fewest)
            if units:
                parts[slot] = [unit + 1 for unit in units]
            if wire.clip is None:
                counts[slot] = [int(total[form.end + unit]) >> BITS for unit in units]
                numbered = enumerate(total[form.end :].tolist())
                closed[slot] = {k: (count >> BITS, fewest) for k, count in numbered if count and k not in units}
                continue
            for place, unit in enumerate(form.units, start=form.end):
                total[unit.stop - 1] = total[place]
        return parts, counts, closed

    def _checked(self, ask: Ask, alive: Ask, opened: Mapping[int, Tensor]) -> Opened:
        """Return the sums that can be; the clients of another one lose it, because one of their nodes lied."""
        assert ask.forms is not None
        sums, why = dict[int, Tensor](), dict[int, str]()
        for slot, members in by_slot(alive).items():
            total = opened[slot]
            fault = self.mail.vectors.wire.fault(total, ask.forms[slot], len(members), self.mail.heaviest)
            if fault is None:
                sums[slot] = total
            else:
                why |= dict.fromkeys(members, f"{LOST}its sum cannot be, by what one of its nodes sent: {fault}")
        return Opened(sums, frozenset(alive.clients.tolist()) - why.keys(), why, self._unmet, self._barred)

    @property
    def _barred(self) -> frozenset[int]:
        """The clients with whose keys no other node would mask anything, or whose nodes have another one each time."""
        return frozenset(client for client, word in self._unmet.items() if word in (UNSIGNED, REFUSED + STALE))

    def _forget_keys(self, clients: Iterable[int]) -> bool:
        """Forget the keys for masks of some clients' nodes, which may have been started again; tell whether any."""
        nodes = {self.mail.node_of[client] for client in clients}
        for node in nodes:
            self._keys.pop(node, None)
        return bool(nodes)

    def _met(self, ask: Ask, until: float) -> Ask:
        """Return the question to those whose nodes have said their keys for masks; the others are asked for them."""
        keys, nodes = self._keys, [self.mail.node_of[client] for client in ask.clients.tolist()]
        strangers = ask.of(torch.tensor([node not in keys for node in nodes], dtype=torch.bool))
        if len(strangers.clients):
            self._ask_until(until, strangers, {}, "keys")
            for client, answer in self.mail.received("keys", set(strangers.clients.tolist())).items():
                if answer.word != ANSWERED:
                    self._unmet[client] = answer.word
                elif self._is_of(self.mail.node_of[client], answer.content):
                    keys[self.mail.node_of[client]] = answer.content
                else:
                    self._unmet[client] = UNSIGNED
            for client in strangers.clients.tolist():
                self.mail.forget("keys", client)
        return ask.of(torch.tensor([node in keys for node in nodes], dtype=torch.bool))

    def _is_of(self, node: str, key: Bundle) -> bool:
        """Tell whether a key for masks is signed, and no other node said it before: that one alone can use it."""
        if not self.signed(node, key):
            return False
        if key.public not in self._first and self.file is not None:
            append(self.file, f"{key.public} {node}")  # before others know it
        return self._first.setdefault(key.public, node) == node

    def _in_enough(self, ask: Ask) -> Ask:
        """Return the question to those in whose sums there may be enough clients, not too many of them at one node."""
        enough = ask.of(self.mail.vectors.keep_enough(ask, torch.ones(len(ask.clients), dtype=torch.bool)))
        holders = ({client: self.mail.node_of[client] for client in clients} for clients in by_slot(enough).values())
        return _only(
            enough, {client for holder in holders if hidden(holder, self.mail.vectors.wire.fewest) for client in holder}
        )

    def _hidden_as_wanted(self, ask: Ask, answered: set[int], answers: Mapping[int, Received]) -> Ask:
        """Return the question to those whose owners would open their sum, once others are left out for that."""
        left, node_of = answered, self.mail.node_of
        while True:
            alive, left = _only(ask, keep_wanted(left, ask, answers)), set[int]()
            for ids in by_slot(alive).values():
                wanted = {answers[client].fewest for client in ids}
                enough = {fewest for fewest in wanted if hidden({client: node_of[client] for client in ids}, fewest)}
                left |= {client for client in ids if answers[client].fewest in enough}
            if len(left) == len(alive.clients):
                return alive

    def _ask_until(
        self, until: float, ask: Ask, payload: Payload, post: Post, first: int | None = None, **how: Any
    ) -> None:
        """Put a question and wait for its first answers, or all of them."""
        seconds = max(until - self.mail.clock.monotonic(), 0.0)
        self.mail.send(ask, payload, seconds, post, **how)
        until = self.mail.clock.monotonic() + seconds  # from when it went out: before, answers' schemas may be tried
        self.mail.listen(post, ask.clients.tolist(), len(ask.clients) if first is None else first, until)


def _shut(answer: Received | None) -> str:
    """Return the word of the record for a client whose node did not open a sum, whatever it said instead."""
    reason = "" if answer is None or answer.word == ANSWERED else f": {answer.word.removeprefix(LOST)}"
    return f"{LOST}its node did not open the sum{reason}"


def _only(ask: Ask, clients: set[int]) -> Ask:
    """Return the question to those of its clients that are in a set."""
    return ask.of(torch.tensor([client in clients for client in ask.clients.tolist()], dtype=torch.bool))


def _fits(dealt: Dealt, nodes: int, fewest: int) -> bool:
    """Tell whether shares are for so many nodes, and as many of them give a secret back as the study says."""
    return len(dealt.seeds) == SEALED * nodes and dealt.needed == needed(nodes, fewest)
