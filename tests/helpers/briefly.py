"""Laws of several in one, for the many variants of an algorithm whose own laws are played one by one."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from fedtide.core import checkpoint
from fedtide.core.loop import Start
from fedtide.core.memory import MemoryStore
from fedtide.laws.case import ByWire, Case, alike, judged
from fedtide.laws.toy import played


def carried_on(case: Case) -> None:
    """A run sent as bytes, saved half way and carried on from its checkpoint alone, is the run that never stopped."""
    half = case.experiment.rounds // 2
    with TemporaryDirectory() as root:
        folder, kept = Path(root, "checkpoints"), Path(root, "memory")
        memory = MemoryStore(kept, small=0)
        *_, last = first = played(case.experiment, engine=ByWire, memory=memory, rounds=half).steps
        ahead = Start(last.state, half, last.seconds, last.moment.seconds)
        checkpoint.save(folder, ahead, memory, config="", marks={})
        again = MemoryStore(kept, small=0)
        resumed = checkpoint.load(folder, again, config="")
        assert resumed is not None
        second = played(case.experiment, engine=ByWire, memory=again, start=resumed.start)
        ours, theirs = [*first, *second.steps], case.reference.steps
        for name in ("state", "facts", "moment"):
            one, other = ([getattr(step, name) for step in steps] for steps in (ours, theirs))
            alike(one, other, f"carried on from its checkpoint, with everything sent as bytes, the {name} is another")
        alike(judged(second)[-1], judged(case.reference)[-1], "carried on from its checkpoint it is judged otherwise")
