"""Laws of several in one play, for methods and variants that are much like others, whose laws are played one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fedtide.core import checkpoint
from fedtide.core.loop import Start, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.fleets.engines import Host
from fedtide.laws.case import Case, alike, hold, judged, played
from fedtide.laws.every import (
    TRAIN,
    ByWire,
    InAnyOrder,
    all_declared,
    guarded,
    shuffled,
    untouched,
    updates_compared,
    with_permuted_rows,
)


def carried_on(case: Case) -> None:
    """A run sent as bytes, saved half way, whose next round is begun twice, and that is then carried on from its
    checkpoint alone, is the run that never stopped; and no work changes what it is given."""
    half = case.experiment.rounds // 2
    with TemporaryDirectory() as root:
        folder, kept = Path(root, "checkpoints"), Path(root, "memory")
        memory, host = MemoryStore(kept, small=0), guarded(case.host())
        begun = played(case.experiment, host=host, engine=ByWire, memory=memory, rounds=half)
        *_, last = first = begun.steps
        ahead = Start(last.state, half, last.seconds, last.moment.seconds)
        checkpoint.save(folder, ahead, memory, config="", marks={})
        for _ in range(2):  # with what its clients keep as of the checkpoint
            step = next(play(host.algorithm, begun.fleet, ahead, seed=0, rounds=case.experiment.rounds))
            alike(step.state, case.reference.steps[half].state, "a round that is begun again ends differently")
        again = MemoryStore(kept, small=0)
        resumed = checkpoint.load(folder, again, config="")
        assert resumed is not None
        second = played(case.experiment, host=host, engine=ByWire, memory=again, start=resumed[0])
        ours, theirs = [*first, *second.steps], case.reference.steps
        for name in ("state", "facts", "moment"):
            one, other = ([getattr(step, name) for step in steps] for steps in (ours, theirs))
            alike(one, other, f"carried on from its checkpoint, with everything sent as bytes, the {name} is another")
        alike(judged(second)[-1], judged(case.reference)[-1], "carried on from its checkpoint it is judged otherwise")


def another_order(case: Case, *, updates: bool = True) -> None:
    """With clients, blocks and rows in another order, and other global randomness, a run is the same; it sees what is
    declared; another seed begins otherwise. And updates that answers name are what local training did."""
    host = with_permuted_rows(case.host())
    with untouched(1), _compared(host, updates) as watched:
        run, fleet = case.watched(host=watched, engine=InAnyOrder, change=shuffled)
    alike(case.reference.state, run.state, "with clients, blocks or rows in another order the state is another")
    all_declared(run, fleet)
    other = played(case.experiment, seed=1, rounds=1).state
    hold(not same(case.reference.steps[0].state, other), "two runs with different seeds begin alike")


@contextmanager
def _compared(host: Host, updates: bool) -> Iterator[Host]:
    if not updates or TRAIN not in host.algorithm.works:
        yield host
        return
    with updates_compared(host) as (watched, _):
        yield watched
