"""The protocol of personalizations. Nothing of one leaves the client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.personal.expert_nets import Networks


@runtime_checkable
class Personalization(Protocol):
    """A personalization of the received models, before evaluation; by default it builds no network."""

    own_expert: ClassVar[bool] = False
    """True if the first of the reported expert weights is that of the local expert."""
    chooses: ClassVar[bool] = True
    """True if predictions report the chosen model or expert."""

    def check(self, nets: Networks, models: int) -> None:
        """Build the needed networks once."""
        return

    @abstractmethod
    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the client's memory from its labeled samples; None without any."""

    @abstractmethod
    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """Predict rows."""
