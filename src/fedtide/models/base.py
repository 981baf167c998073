"""The base of a model with adapters: parameters that are frozen, no weights, and held once in a process."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

HEAD = "head"
"""Module of a base that is trained as a whole, if there is one."""


class BaseParameter(nn.Parameter):
    """A frozen parameter that is no weight: it is neither sent nor saved, and copies share its numbers.

    >>> from copy import deepcopy
    >>> one = BaseParameter(torch.ones(2))
    >>> deepcopy(one).data_ptr() == one.data_ptr(), one.requires_grad
    (True, False)
    """

    places: dict[tuple[torch.device, torch.dtype], Tensor]

    def __new__(cls, data: Tensor, places: Any = None) -> Self:
        """Return a parameter; `places` has its numbers by device and type, for all copies."""
        param = super().__new__(cls, data.detach(), False)
        param.places = {(data.device, data.dtype): data.detach()} if places is None else places
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.data, self.places)

    def move(self, device: str, dtype: torch.dtype) -> None:
        """Use numbers on a device and of a type, which all copies there share."""
        where = torch.device(device), dtype if self.is_floating_point() else self.dtype
        if where not in self.places:
            self.places[where] = self.data.to(*where)
        self.data = self.places[where]


def hold(module: nn.Module) -> nn.Module:
    """Make every parameter of a module one of its base; parameters that are tied stay tied.

    >>> [type(p).__name__ for p in hold(nn.Linear(1, 1)).parameters()]
    ['BaseParameter', 'BaseParameter']
    """
    return _replaced(module, BaseParameter)


def release(module: nn.Module) -> nn.Module:
    """Make the parameters of a module's base weights again, with numbers of their own."""
    return _replaced(module, lambda param: nn.Parameter(param.detach().clone()))


def _replaced(module: nn.Module, change: Callable[[Tensor], nn.Parameter]) -> nn.Module:
    changed: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in changed:
                changed[param] = change(param)
            setattr(part, name, changed[param])
    return module


def has_base(module: nn.Module) -> bool:
    """Tell whether a module, or a module in it, has a parameter of a base."""
    return any(isinstance(param, BaseParameter) for param in module.parameters())


def begins_equal(module: nn.Module) -> bool:
    """Tell whether all weights of a module are adapters, which change nothing at first."""
    return has_base(module) and all(".lora_" in name for name, p in module.named_parameters() if p.requires_grad)


def fixed_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that are constants of a base: all but statistics of normalization.

    >>> fixed_buffers(hold(nn.BatchNorm1d(2))), fixed_buffers(nn.BatchNorm1d(2))
    (set(), set())
    """
    if not has_base(module):
        return set()
    norms = {name for name, part in module.named_modules() if hasattr(part, "track_running_stats")}
    return {name for name, _ in module.named_buffers() if name.rpartition(".")[0] not in norms}


def redraw(module: nn.Module) -> None:
    """Draw the weights of a module anew from torch's global generator; its base stays, and adapters begin at zero."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset) and not has_base(part):
            reset()
    for part in module.modules():  # after the layers that an adapter consists of
        adapter: Any = part
        if callable(reset := getattr(part, "reset_lora_parameters", None)):
            for name in adapter.active_adapters:
                reset(name, True)


def train_head(module: nn.Module) -> nn.Module:
    """Make the parameters of a module's head weights, and draw them anew from torch's global generator."""
    head = getattr(module, HEAD, None)
    if isinstance(head, nn.Module):
        redraw(release(head))
    return module
