"""Cohorts: the selection of participants of a round, and rounds of one model, also with clients in flight.

`build_method` and `play_rounds` build what most methods with one model share, and `build_asynchronous` the rounds in
which clients go on training. They are here because a round begins with the choice of its participants.

| kind | clients selected | revealed to the server per client |
| --- | --- | --- |
| arrivals | the clients that the shift sends, the same for every method | nothing |
| uniform | reachable clients, uniformly | nothing |
| poisson | each reachable client, independently, with the same probability | nothing |
| everyone | all reachable clients | nothing |
| in-turn | reachable clients, each once before any has a second turn | nothing |
| by-size | in proportion to samples | samples |
| nearest | clients that are similar to the others | a representation, by default its label distribution |
| oort | large losses, fast, sometimes new | samples, a loss statistic |
| power-of-choice | the candidates with the largest losses | samples, the candidates' losses |
| python | those that your own code selects | what it asks for |

A cohort is a value. `init(fleet)` makes its memo and may ask questions before round 0. `pick(memo, fleet, rng, serve)`
selects clients. `learn(memo, reply, moment)` updates the memo after a round. The memo is part of the algorithm's state,
so it is saved in checkpoints.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedtide.cohorts.in_flight import InFlight, build_asynchronous
from fedtide.cohorts.participation import (
    OneModel,
    ask_to_train,
    build_method,
    collect_before,
    label_question,
    play_rounds,
    take_part,
    with_cohort,
)
from fedtide.cohorts.selection import (
    Arrivals,
    BySize,
    Everyone,
    InTurn,
    Nearest,
    Oort,
    PickedBy,
    Picking,
    Poisson,
    PowerOfChoice,
    Uniform,
)
from fedtide.fields.user_code import Python

if TYPE_CHECKING:
    Cohort = Picking  # an algorithm takes any object that selects clients; the kinds are those of a file
else:
    Cohort = Annotated[
        Arrivals | Uniform | Poisson | Everyone | InTurn | BySize | Nearest | Oort | PowerOfChoice | Python,
        Field(discriminator="kind", description="selection of the participants of a round."),
    ]

__all__ = [
    "Arrivals", "BySize", "Cohort", "Everyone", "InFlight", "InTurn", "Nearest", "OneModel", "Oort", "PickedBy",
    "Picking", "Poisson", "PowerOfChoice", "Uniform", "ask_to_train", "build_asynchronous", "build_method",
    "collect_before", "label_question", "play_rounds", "take_part", "with_cohort",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
