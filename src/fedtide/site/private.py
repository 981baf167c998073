"""Privacy at a server of real clients: noise of the system, and what it needs to go on after a crash."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from torch import Tensor

from fedtide.core.atomic import flush
from fedtide.core.base import Algorithm
from fedtide.core.errors import refused
from fedtide.site.budget import ledger_for, so_far
from fedtide.site.site import Site
from fedtide.wire.clip import SLACK, clip_of
from fedtide.wire.ledger import LEDGER, Ledger, Safe, read
from fedtide.wire.noise import SystemNoise
from fedtide.wire.pipeline import Wire
from fedtide.wire.release import Recorded, Release, stream_of, with_noise

RELEASED, SEEDS = "released", "noise.jsonl"
"""What lies in a site's private folder; sums that were released lie in the record under the same name, later."""


def private_wire(site: Site, algorithm: Algorithm, wire: Wire | None) -> Wire | None:
    """Return the wire of a server of real clients: with noise of the system, where the study has privacy."""
    ledger = ledger_for(site.experiment, algorithm, site.record / LEDGER)
    if wire is None or ledger is None:
        return wire
    safe = safe_of(site)
    safe.check(ledger)
    for number, clients in safe.offered():
        ledger.offer(number, clients)
    noise = SystemNoise(site.private / SEEDS if ledger.plan.bands > 1 else None)
    last = max((line.round for line in ledger.lines), default=-1)
    released = {stream_of(line.question, line.ask, line.slot) for line in ledger.of(last)}
    # A ledger of which a person has put an older one back knows nothing of later sums: their noise must not come again.
    noise.forget(lambda stream, number: number > last or (number == last and stream not in released))
    return with_noise(wire, ledger, noise, safe)


def recorded_sums(site: Site, algorithm: Algorithm, wire: Wire | None) -> Recorded | None:
    """Return what a site's server released, in place of its noise, for a replay; None where sums are not private.

    Raises:
        FedtideError: the ledger has what the budget of the study does not cover.
    """
    ledger, clip = ledger_for(site.experiment, algorithm), clip_of(wire)
    if ledger is None or clip is None:
        return None
    for line in read(site.record / LEDGER):
        if line.z < ledger.z * (1 - SLACK):
            raise refused(f"{site.record / LEDGER}: round {line.round}: z", line.z, f"{ledger.z:.6g}, by the study")
        ledger.add(line)
    safe = Safe(site.private / RELEASED, site.record / RELEASED)
    return Recorded(Release(clip.bounds, ledger, _no_noise, adaptive=clip.adaptive), safe)


def _ledger_so_far(site: Site, algorithm: Algorithm) -> Ledger | None:
    """Return a site's ledger as it is now, which its server may be writing; None without privacy."""
    study = ledger_for(site.experiment, algorithm)
    return None if study is None else Ledger(study.plan, study.z, study.delta, lines=read(site.record / LEDGER))


def _no_noise(stream: str, number: int, size: int) -> Tensor:
    raise RuntimeError("a replay draws no noise")


def safe_of(site: Site) -> Safe:
    """Make the folder where a site keeps what was released, until a checkpoint counts on it."""
    site.private.mkdir(mode=0o700, exist_ok=True)
    flush(site.private.parent)
    return Safe(site.private / RELEASED, site.record / RELEASED)


def forget(site: Site) -> None:
    """Forget what a run that is over needs no more: with the seeds of its noise sums could be told without it."""
    if site.private.is_dir():
        safe_of(site).settle(site.experiment.rounds, read(site.record / LEDGER))
    shutil.rmtree(site.private, ignore_errors=True)


def spent(site: Site, algorithm: Algorithm) -> Iterator[str]:
    """Say in lines what has been spent, of each node by the client that spent most; nothing without privacy."""
    ledger = _ledger_so_far(site, algorithm)
    if ledger is None:
        return
    whole = ledger.plan.epsilon(ledger.z, ledger.delta)
    yield f"privacy: epsilon {ledger.epsilon():.3g} of {whole:.3g} spent at most by a client (delta {ledger.delta:g})"
    for node in site.roster.node:
        most = max(node.clients, key=ledger.epsilon)
        yield f"privacy: {node.name}, client {most}: {so_far(ledger, most)}"
