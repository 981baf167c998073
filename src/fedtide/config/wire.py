"""The `[wire]` table: how sums pass from clients to the server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedtide.core.errors import nearest
from fedtide.fields.strict import Strict
from fedtide.fields.types import Count, Flag, Fraction, Positive
from fedtide.wire.clip import Adaptive, Clip
from fedtide.wire.pipeline import FEWEST, Wire


class Adapt(Strict):
    """How a bound adapts to the lengths of what clients send, by a count with noise of those that were within it.

    Args:
        quantile: of the lengths, which the bound approaches: 0.5 is their median.
        rate: how fast: from one round to the next the bound changes by a factor of up to about e^rate.
    """

    quantile: Fraction = 0.5
    rate: Positive = 0.2


class Privacy(Strict):
    """Differential privacy: models, and whatever is made of noised sums, say little of any one client.

    Each client's answers are cut to bounds, and sums get noise, once. Evaluation on clients' rows is not covered. See
    "Privacy" in the documentation.

    Args:
        epsilon: what the whole run may say of a client, at most; the noise follows from it.
        multiplier: noise in place of `epsilon`, in units of what one client moves a sum by; epsilon follows from it.
        delta: probability with which it may say more; far below one over the number of clients.
        clip: for each value that is summed its bound, by its name, such as `delta`: the largest length of what one
            client sends. A value of any method without a bound is an error, and so is a bound of no value.
        adapt: how bounds adapt that do, by the name of their value, such as `{ delta = { quantile = 0.5 } }`; `clip`
            has the bound of round 0 then.
        unit: what is protected: all that a client ever says.
        noise: "plain" noise is fresh in each round; "banded" noise is correlated over the rounds between two answers of
            a client, so that much of it cancels in the model.
        distance: rounds from one answer of a client to its next, at least; who is too early is not asked. None means
            the period of the shift, or 1 without one.
        times: rounds that a client answers in, at most; None means as many as the distance allows. Without `distance`
            and `times`, plain noise and a uniform cohort gain by the chance not to be drawn, where that is a gain.
    """

    epsilon: Positive | None = None
    multiplier: Positive | None = None
    delta: Annotated[float, Field(strict=True, gt=0, lt=1)] = 1e-5
    clip: dict[str, Positive] = Field(min_length=1)
    adapt: dict[str, Adapt] = Field(default_factory=dict)
    unit: Literal["client"] = "client"
    noise: Literal["plain", "banded"] = "plain"
    distance: Count | None = None
    times: Count | None = None

    @property
    def step(self) -> Clip:
        """The clients' step."""
        return Clip(self.clip, {name: Adaptive(how.quantile, how.rate) for name, how in self.adapt.items()})

    @model_validator(mode="after")
    def _what_adapts_has_a_bound(self) -> Privacy:
        for name in self.adapt:
            if name not in self.clip:
                raise ValueError(f"adapt: found '{name}', {nearest(name, list(self.clip))}")
        return self

    @model_validator(mode="after")
    def _noise_is_said_once(self) -> Privacy:
        if (self.epsilon is None) == (self.multiplier is None):
            found = "neither" if self.epsilon is None else "both"
            raise ValueError(f"found {found} of `epsilon` and `multiplier`, allowed: one of them")
        return self


class WireSettings(Strict):
    """How sums pass from clients to the server: added in fixed point, exactly, whatever the order.

    Args:
        secure: real clients mask what they send, so that the server can open sums alone; a simulation adds the same
            numbers.
        fewest: clients below which no sum is opened; those in a smaller one count as not having answered. 3 or more
            where sums are secure, as of two each knows the other from their sum.
        privacy: differential privacy; None adds no noise.
    """

    secure: Flag = True
    fewest: Annotated[Count, Field(le=100_000)] = FEWEST
    privacy: Privacy | None = None

    @model_validator(mode="after")
    def _sums_are_of_several(self) -> WireSettings:
        if self.secure and self.fewest < FEWEST:
            few = "one client is that client" if self.fewest == 1 else "two tells each of them the other"
            raise ValueError(
                f"found `fewest = {self.fewest}` and `secure = true`, but a sum of {few}; "
                f"allowed: `fewest` of {FEWEST} or more, or `secure = false`"
            )
        return self

    def build(self) -> Wire:
        """Build the wire as clients know it; the server has noise beside (`fedtide.runs.private`)."""
        steps = () if self.privacy is None else (self.privacy.step,)
        return Wire(self.secure, self.fewest, steps, hides=self.privacy is not None)
