"""Cohorts: which clients take part in a round.

| kind | who is picked | what the server has to see of each client |
| --- | --- | --- |
| arrivals | the clients that the shift sends, the same for every method | nothing |
| uniform | any client that is reachable, each as likely as the others | nothing |
| everyone | all that are reachable | nothing |
| by-size | in proportion to rows | rows |
| nearest | clients that are like the others | a representation, by default the shares of its labels |
| oort | large losses, fast, sometimes new | rows, a loss statistic |
| power-of-choice | of some candidates those with the largest losses | rows, the candidates' losses |

A cohort is a value: `init(fleet)` makes its memo and may ask questions before round 0, `pick(memo, fleet, rng, served)`
chooses, `learn(memo, reply, moment)` takes in what a round showed. The memo is part of the algorithm's state, so
checkpoints keep it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedtide.cohorts.arrivals import Arrivals
from fedtide.cohorts.by_size import BySize
from fedtide.cohorts.everyone import Everyone
from fedtide.cohorts.nearest import Nearest
from fedtide.cohorts.oort import Oort
from fedtide.cohorts.power_of_choice import PowerOfChoice
from fedtide.cohorts.protocol import Picking, asked
from fedtide.cohorts.uniform import Uniform

Cohort = Annotated[Arrivals | Uniform | Everyone | BySize | Nearest | Oort | PowerOfChoice, Field(discriminator="kind")]
"""Which clients take part in a round."""

__all__ = [
    "Arrivals",
    "BySize",
    "Cohort",
    "Everyone",
    "Nearest",
    "Oort",
    "Picking",
    "PowerOfChoice",
    "Uniform",
    "asked",
]


def __dir__() -> list[str]:
    return __all__
