"""The layers of a frozen base below its first adapter, whose features of a row are the same each time that it comes.

They are computed in groups of one shape, whatever rows are asked for together. So a row has the same bits whether its
features were kept or are computed anew.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.models.adapters import NUMBERED

Run = Callable[[Tensor], Any]
"""Pass of a base over rows of tokens (rows, steps)."""
STEPS, STEPS_OF_GPU = 128, 4096
"""Number of steps in a group of rows; larger groups are hardly faster."""
PROBES = 2
"""Groups of rows by which it is found whether a row has the same bits at each place of a group."""


class FeatureCache:
    """Features of rows by their content, up to a number of bytes; copies of a base share one."""

    def __init__(self) -> None:
        self.features: dict[Any, Tensor] = {}
        self.groups: dict[Any, int] = {}  # rows of a group, by what decides bits
        self.splits: dict[Any, bool] = {}  # whether a base can be run in two parts, by the layer between them
        self._keys: list[Any] = []
        self._bytes = 0
        self._draw, self._lock = random.Random(0), Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FeatureCache":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache, ()

    def keep(self, key: Any, features: Tensor, most: int) -> None:
        """Keep the features of a row; others leave by lot, because rows come again in turn."""
        if features.nbytes > most:
            return
        with self._lock:
            if key in self.features:
                return
            self.features[key] = features
            self._keys.append(key)
            self._bytes += features.nbytes
            while self._bytes > most:
                place = self._draw.randrange(len(self._keys))
                self._keys[place], self._keys[-1] = self._keys[-1], self._keys[place]
                self._bytes -= self.features.pop(self._keys.pop()).nbytes


class _Reached(Exception):
    """The first layer with adapters was reached."""


@dataclass(frozen=True)
class Lower:
    """The lower layers of a base.

    Args:
        layers: name of the list of all layers.
        count: number of layers before the first with adapters.
        tokens: number of ids of the vocabulary.
        cache: features of rows.
        most: bytes that are kept.
    """

    layers: str
    count: int
    tokens: int
    cache: FeatureCache
    most: int

    def run(self, base: nn.Module, tokens: Tensor, run: Run) -> Any:
        """Return the outputs of a base for rows (rows, steps), whose lower layers are run in groups."""
        features = _Features.apply(tokens, lambda rows: self._features(base, rows, run))

        def give(*_: Any, **__: Any) -> Tensor:
            return features

        with _instead(self._all(base)[: self.count], give):
            return run(tokens)

    def _all(self, base: nn.Module) -> list[nn.Module]:
        return list(base.get_submodule(self.layers))  # type: ignore[call-overload]

    @torch.inference_mode(False)  # what is kept may be trained on
    @torch.no_grad()
    def _features(self, base: nn.Module, tokens: Tensor, run: Run) -> Tensor:
        """Return the features (rows, steps, width) of rows, each computed unless it is kept."""
        device, dtype = tokens.device, next(base.parameters()).dtype
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        where = self.layers, self.count, device, dtype, half, tokens.shape[1], torch.get_num_threads()
        if not len(tokens):
            return self._below(base, tokens, run)
        if where not in self.cache.groups:
            self.cache.groups[where] = self._group(base, tokens, run)
        size = self.cache.groups[where]
        keys = [(where, row.tobytes()) for row in tokens.long().cpu().numpy()]
        places = {key: place for place, key in enumerate(keys)}
        features = {key: row for key in places if (row := self.cache.features.get(key)) is not None}
        lost = [place for key, place in places.items() if key not in features]
        for start in range(0, len(lost), size):
            group = lost[start : start + size]
            rows = tokens[[*group, *group[-1:] * (size - len(group))]]
            for place, row in zip(group, self._below(base, rows, run), strict=False):
                features[keys[place]] = row.clone()
                self.cache.keep(keys[place], features[keys[place]], self.most)
        return torch.stack([features[key] for key in keys])

    def _below(self, base: nn.Module, tokens: Tensor, run: Run) -> Tensor:
        """Return the features (rows, steps, width) that the first layer with adapters is given."""
        reached = []

        def stop(hidden: Tensor, *_: Any, **__: Any) -> None:
            reached.append(hidden)
            raise _Reached

        with _instead(self._all(base)[self.count : self.count + 1], stop), suppress(_Reached):
            run(tokens)
        return reached[0]

    def _group(self, base: nn.Module, tokens: Tensor, run: Run) -> int:
        """Return the number of rows of a group: one, unless a row has the same bits at each place of a larger one."""
        steps = tokens.shape[1]
        size = max((STEPS if tokens.device.type == "cpu" else STEPS_OF_GPU) // steps, 1)
        # Some processors round some numbers otherwise at the end of a tensor, so many are compared at all places.
        draw = torch.Generator().manual_seed(0)
        for _ in range(PROBES):
            rows = torch.randint(self.tokens, (size, steps), generator=draw).to(tokens)
            features = self._below(base, rows, run)
            for place in range(1, size):
                moved = self._below(base, rows.roll(place, 0), run)
                if not torch.equal(moved, features.roll(place, 0)):
                    return 1
        return size


class _Features(torch.autograd.Function):
    """Features of rows, which stacked models look up with the rows of all of them."""

    @staticmethod
    def forward(tokens: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the features (rows, steps, width) of rows (rows, steps)."""
        return look_up(tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Note nothing, because nothing below the features is trained."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return no gradient."""
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, tokens: Tensor, look_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Return the features (models, rows, steps, width) of the rows of several models."""
        tokens = tokens.movedim(in_dims[0], 0)
        return _Features.apply(tokens.flatten(0, 1), look_up).unflatten(0, tokens.shape[:2]), 0


@contextmanager
def _instead(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Let layers do something else for a while."""
    before = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, its in zip(layers, before, strict=True):
            layer.forward = its


def split(base: nn.Module) -> tuple[str, int] | None:
    """Return the name of the list of a base's layers and the number of the first that is trained; None if all are run.

    >>> base = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1).requires_grad_(k > 1) for k in range(4)])})
    >>> split(base)
    ('layers', 2)
    """
    matches = [NUMBERED.match(name) for name, param in base.named_parameters() if param.requires_grad]
    lists = {match and match.string[: match.start(2) - 1] for match in matches}
    layers = lists.pop() if len(lists) == 1 else None
    if layers is None or not isinstance(base.get_submodule(layers), nn.ModuleList):
        return None
    first = min(int(match[2]) for match in matches if match)
    return (layers, first) if first else None
