"""Checks of a module before the first round: mistakes that would show late, or never."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from fedtide.core.errors import FedtideError, refused

Embeddings = nn.Embedding | nn.EmbeddingBag

OWN = frozenset(vars(nn.Module()))
"""Attributes in which torch itself keeps what is registered."""


def check_module(module: Any) -> None:
    """Raise for a module that cannot be trained: lazy layers, complex numbers, parameters that are not finite.

    >>> check_module(nn.LazyLinear(2))
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: model: found 'LazyLinear', allowed: layers of known size, as nn.Linear(8, 3)
    """
    if not isinstance(module, nn.Module):
        raise refused("model", type(module).__name__, "a torch.nn.Module")
    for layer in module.modules():
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise refused("model", type(layer).__name__, "layers of known size, as nn.Linear(8, 3)")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if tensor.is_complex():
            raise FedtideError(f"model: {kind} '{name}' is complex: not supported; use two real parameters")
        if tensor.requires_grad and not tensor.is_meta and not tensor.isfinite().all():
            raise refused(f"model: {kind} '{name}'", "a number that is NaN or infinite", "finite numbers")


def check_fresh(module: nn.Module, other: nn.Module) -> None:
    """Raise if two modules that one function made share what training changes.

    >>> shared = nn.Linear(3, 2)
    >>> check_fresh(shared, shared)
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: model: found the same module in two calls, allowed: a fresh one, as lambda: Net()
    """
    if module is other:
        raise FedtideError("model: found the same module in two calls, allowed: a fresh one, as lambda: Net()")
    places = {tensor.data_ptr() for _, tensor in _list_changing(module)}
    for name, tensor in _list_changing(other):
        if tensor.data_ptr() in places:
            raise FedtideError(f"model: found the same '{name}' in two calls, allowed: fresh layers in every call")


def _list_changing(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what training changes, with its name: trained parameters, and statistics of normalization."""
    yield from ((name, value) for name, value in module.named_parameters() if value.requires_grad and value.numel())
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if hasattr(layer, "track_running_stats"):
            yield from layer.named_buffers(prefix)


def check_outputs(outputs: Any) -> None:
    """Raise for outputs that are no tensor.

    >>> check_outputs({"logits": torch.zeros(1, 2)})
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: model: it returns a dict, allowed: one tensor, the logits
    """
    if not isinstance(outputs, Tensor):
        raise FedtideError(f"model: it returns a {type(outputs).__name__}, allowed: one tensor, the logits")


def check_ids(module: nn.Module, x: Tensor, error: Exception) -> None:
    """Raise if a pass failed because rows are no ids of the model's embedding.

    Args:
        module: the model.
        x: (rows, ...) as it saw them.
        error: what torch raised.

    >>> check_ids(nn.Embedding(10, 2), torch.tensor([[3, 10]]), IndexError("index out of range in self"))
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: model: rows have the id 10, allowed: 0 to 9, because nn.Embedding has 10 entries
    """
    embeddings = [layer for layer in module.modules() if isinstance(layer, Embeddings)]
    if not embeddings or not any(word in str(error).lower() for word in ("index", "indices")):
        return
    name, sizes = f"nn.{type(embeddings[0]).__name__}", sorted({layer.num_embeddings for layer in embeddings})
    if x.is_floating_point() and not isinstance(error, IndexError):  # a model may read ids from them by itself
        dtype = str(x.dtype).removeprefix("torch.")
        cure = "integers, such as an array of int64, which stay integers"
        raise refused("model: type of rows", dtype, cure, f"{name} takes whole numbers")
    if (wrong := x[(x < 0) | (x >= sizes[0])]).numel():
        allowed = f"0 to {sizes[0] - 1}, because {name} has {' or '.join(map(str, sizes))} entries"
        raise FedtideError(f"model: rows have the id {int(wrong[0])}, allowed: {allowed}")


def check_first_label(y: Tensor, outputs: int, classes: int) -> None:
    """Raise if labels seem to begin at 1: the model lacks one output, and no label is 0.

    >>> check_first_label(torch.tensor([1, 3]), outputs=3, classes=4)
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: labels begin at 1: class 0 has no rows, and the model has 3 classes; subtract 1
    """
    if outputs == classes - 1 and len(y) and int(y.min()) == 1:
        raise FedtideError(f"labels begin at 1: class 0 has no rows, and the model has {outputs} classes; subtract 1")


def find_notes(module: nn.Module, outputs: Tensor, types: Mapping[str, torch.dtype], classes: int) -> list[str]:
    """Return a line for each thing of a module that trains otherwise than its author may think.

    Args:
        module: after a pass.
        outputs: (rows, ..., width) of the pass.
        types: number types of its parameters when it was made, by name.
        classes: number of classes that the outputs are logits of; 0 for another target.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1))
    >>> find_notes(net, net(torch.zeros(4, 3)), {}, classes=2)
    ['model: outputs of a row sum to one; return logits, because the loss has a softmax of its own']
    """
    notes = []
    now = {name: value.dtype for name, value in module.named_parameters()}
    if changed := {f"{kind} to {now[name]}" for name, kind in types.items() if now[name] != kind}:
        line = f"model: parameters are converted from {' and '.join(sorted(changed))}".replace("torch.", "")
        notes.append(f"{line}; precision of the study or dtype of ft.Task decides")
    if classes and outputs.shape[-1] > classes:
        more = outputs.shape[-1] - classes
        notes.append(f"model: it has {classes + more} outputs for {classes} classes; no row is of the last {more}")
    sums = outputs.detach().sum(-1)
    if classes and outputs.shape[-1] > 1 and bool((outputs >= 0).all()) and sums.allclose(torch.ones_like(sums)):
        notes.append("model: outputs of a row sum to one; return logits, because the loss has a softmax of its own")
    registered = {id(value) for value in module.parameters()}
    for prefix, layer in module.named_modules():
        params = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
        for attribute, value in vars(layer).items():
            name = f"{prefix}.{attribute}".removeprefix(".")
            if attribute in OWN or any(other.startswith(f"{attribute}_") for other in params):
                continue  # torch's own, or computed of parameters, as weight_norm does
            if isinstance(value, Tensor):
                notes.append(f"model: tensor '{name}' is no parameter or buffer, so clients do not send it")
            elif any(id(param) not in registered for param in _parameters_in(value)):
                notes.append(f"model: parameters in '{name}' are not trained; use nn.ModuleList or nn.ParameterList")
    return notes


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters in a list, tuple or dict of layers or parameters."""
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    for part in parts:
        yield from (
            part.parameters() if isinstance(part, nn.Module) else [part] if isinstance(part, nn.Parameter) else []
        )
