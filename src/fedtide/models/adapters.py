"""Adapters: small layers beside those of a frozen base, which are all that is trained, sent and saved.

The layers are those of PEFT. `fedtide.models.base` says how the base is held.
"""

import importlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from fedtide.core.atomic import check_new, making
from fedtide.core.base import Weights
from fedtide.core.checkpoint import fitted
from fedtide.core.errors import FedtideError, nearest, refused, uninstalled, within
from fedtide.core.files import LARGEST, read_bytes
from fedtide.fields.types import Count, Different, OpenFraction, Positive, Unbracketed, ingredient
from fedtide.models.base import HEAD, fixed_buffers
from fedtide.models.branched import in_layer

Names = Annotated[tuple[str, ...], Different, Unbracketed]
"""Names of layers, a single one without brackets."""


NUMBERED = re.compile(r"(?:^|.*?\.)([^.]+)\.(\d+)\.")
"""Beginning of the name of a module in a numbered list, as PEFT reads it: the name of the list and the number."""


def library(name: str, key: str) -> Any:
    """Import a library of the extra "language".

    Raises:
        FedtideError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise uninstalled(f"{key}: needs {name} ({error})", "language") from None


@ingredient
class LoRA:
    """Low-rank adapters: beside each layer of `targets` the product of two small matrices is trained, and nothing else.

    Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: *LoRA: Low-Rank Adaptation of Large Language Models*, ICLR 2022.
    The layer's outputs become `W x + (alpha / rank) B A x`. `B` begins at 0, so the model begins as its base. A module
    named "head" is trained as a whole.

    The base is frozen and held once in a process. It is neither sent nor saved.

    Args:
        rank: width of the two matrices.
        alpha: scale of the product, before it is divided by the rank.
        targets: layers that get adapters, by the last part of their names or by whole names; `[]` is what PEFT proposes
            for the architecture. They are linear, convolutions or embeddings.
        dropout: probability for inputs of adapters.
        last_layers: number of the base's last layers, as a transformer counts them, that get adapters; None for all.
            The other layers are only run. `targets` are then last parts of names.
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: Names = ()
    dropout: OpenFraction = 0.0
    last_layers: Count | None = None
    kind: Literal["lora"] = "lora"

    def add(self, base: nn.Module, key: str = "model.adapters") -> None:
        """Put adapters into a base, in place; torch's global generator draws them.

        Raises:
            FedtideError: PEFT is not installed, a target is no layer that it knows, or the base has fewer layers.
        """
        peft = library("peft", key)
        names = _layers(base)
        for target in self.targets:
            if not any(_is_named(name, target) for name in names):
                ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
                raise FedtideError(f"{key}.targets: '{target}' is no layer of the base; {nearest(target, ends)}")
        more = {"exclude_modules": rf"{HEAD}(\..*)?"} if hasattr(base, HEAD) else {}
        if self.last_layers is not None:
            more |= _last(self.last_layers, names, f"{key}.last_layers")
            if whole := [target for target in self.targets if target in names]:
                raise refused(f"{key}.targets", whole[0], "the last part of names of layers, with last_layers")
        try:
            peft.inject_adapter_in_model(self.settings(**more), base)
        except ValueError as error:
            allowed = f"names of layers, such as {', '.join(dict.fromkeys(n.rpartition('.')[2] for n in names))}"
            why = str(error).partition(".")[0] if self.targets else "PEFT proposes none for this architecture"
            raise refused(f"{key}.targets", list(self.targets), allowed, why) from None

    def settings(self, **more: Any) -> Any:
        """Return the settings of PEFT."""
        return library("peft", "model.adapters").LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=list(self.targets) or None, lora_dropout=self.dropout,
            **more,
        )  # fmt: skip


def _last(count: int, names: list[str], key: str) -> dict[str, Any]:
    """Return PEFT's settings for the last layers of a base, which are its longest list of numbered modules."""
    lists = defaultdict[str, set[int]](set)
    for name in names:
        if numbered := NUMBERED.match(name):
            lists[numbered[1]].add(int(numbered[2]))
    layers, numbers = max(lists.items(), key=lambda item: len(item[1]), default=("", set[int]()))
    if count > len(numbers):
        none = "none, because the base has no list of layers"
        raise refused(key, count, f"1 to {len(numbers)}, the layers of the base" if numbers else none)
    return {"layers_to_transform": sorted(numbers)[-count:], "layers_pattern": [layers]}


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _layers(base: nn.Module) -> list[str]:
    """Return the names of the layers that may get adapters: those with a matrix, which they themselves apply."""
    parts = dict(base.named_modules())
    others = [HEAD, *(name for name, layer in parts.items() if isinstance(layer, nn.MultiheadAttention))]
    matrices = {name: dict(layer.named_parameters(recurse=False)).get("weight") for name, layer in parts.items()}
    return [
        name
        for name, matrix in matrices.items()
        if matrix is not None and matrix.dim() > 1 and not any(in_layer(f"{name}.", other) for other in others)
    ]


SETTINGS, ADAPTERS, ADAPTED_HEAD = "adapter_config.json", "adapter_model.safetensors", "head.safetensors"
"""Files of a folder with adapters; the last one is ours, and need not be there."""
DECISIVE = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "lora_bias", "layer_replication",
    "modules_to_save", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip
"""Settings of PEFT that say what adapters do or what is trained beside them; others are named use_... or ..._config."""
PEFT = "base_model.model."
"""Beginning of the names of tensors in PEFT's files."""
WRITTEN_AS = {"r": "rank", "lora_alpha": "alpha"}
"""Our names for settings of PEFT."""


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of a folder with adapters that decide numbers; none if it is no such folder."""
    if not (folder / SETTINGS).is_file():
        return []
    return [file for name in (SETTINGS, ADAPTERS, ADAPTED_HEAD) if (file := folder / name).exists()]


def load_adapters(folder: Path, module: nn.Module, like: Weights, key: str) -> Weights:
    """Return the weights in a folder with adapters, as `save_adapters` or PEFT itself writes it.

    Args:
        folder: with `adapter_config.json` and a file of safetensors.
        module: of a model with adapters.
        like: its weights; the head is from there if the folder has none.
        key: configuration key that names the folder, for error messages.

    Raises:
        FedtideError: the model has no adapters, or other ones than the folder, or a file is damaged.
    """
    base = _with_adapters(module, f"{key}: {folder}")
    with within(key):
        _check_settings(folder / SETTINGS, base.peft_config["default"].to_dict())
        most = sum(8 * value.numel() for value in like.params.values()) + LARGEST
        tensors = _read_tensors(folder / ADAPTERS, most)
        if (folder / ADAPTED_HEAD).exists():
            head = _read_tensors(folder / ADAPTED_HEAD, most)
        else:
            head = {name: value for name, value in like.params.items() if in_layer(name, HEAD)}
    above = "" if base is module else "base."
    ours = {name.removeprefix(above).replace(".default", ""): name for name in like.params if not in_layer(name, HEAD)}
    plain = {name.removeprefix(PEFT): value for name, value in tensors.items()}
    named = {ours.get(name, name): value for name, value in plain.items()}
    return fitted(named | head, like, f"{key}: {folder}")


def _check_settings(file: Path, ours: Mapping[str, Any]) -> None:
    """Raise if the adapters of a file are of another kind than ours."""
    try:
        theirs = json.loads(read_bytes(file))
        if not isinstance(theirs, dict):
            raise ValueError("no table")
    except (ValueError, RecursionError) as error:
        raise FedtideError(f"{file}: not the settings of adapters ({error})") from None
    drawn = theirs.get("init_lora_weights")
    if isinstance(drawn, str) and drawn not in ("gaussian", "orthogonal"):
        raise refused(f"{file}: init_lora_weights", drawn, "adapters that leave the base as it is", "they change it")
    for name in (*DECISIVE, *(name for name in theirs if re.fullmatch("use_.*|.*_config", name))):
        one, other = ours.get(name), theirs.get(name)
        if (one or other) and one != other:
            allowed = f"{getattr(one, 'value', one)}, as model.adapters has"
            raise refused(f"{file}: {WRITTEN_AS.get(name, name)}", other, allowed)


def _read_tensors(file: Path, most: int) -> dict[str, Tensor]:
    try:
        tensors = load(read_bytes(file, most, "a file of safetensors"))
    except (SafetensorError, KeyError) as error:
        raise FedtideError(f"{file}: not a file of safetensors ({error})") from None
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise refused(f"{file}: '{name}'", "a number that is NaN or infinite", "finite numbers")
    return tensors


def _with_adapters(module: nn.Module, key: str) -> Any:
    """Return the part of a module that has adapters: the base of a transformer, or the module itself."""
    base = module if hasattr(module, "peft_config") else getattr(module, "base", module)
    if not getattr(base, "peft_config", None):
        raise refused(key, "no adapters", "a model with adapters")
    return base


def save_adapters(module: nn.Module, folder: Path | str, about: Mapping[str, str] = MappingProxyType({})) -> int:
    """Write the adapters of a module into a new folder, as PEFT reads it elsewhere, and count their numbers.

    `PeftModel.from_pretrained(base, folder)` puts them on the base. A head that was trained is in `head.safetensors`.

    Args:
        module: of a model with adapters, as `Task.module` returns it.
        folder: the folder, which must not be there.
        about: what the file of adapters says of itself.

    Raises:
        FedtideError: the module has no adapters, its base has statistics that were trained, or the folder is there.
    """
    folder = Path(folder)
    base = _with_adapters(module, "model")
    if norms := set(dict(module.named_buffers())) - fixed_buffers(module):
        but = "PEFT's folder holds no statistics of normalization"
        raise refused("model", min(norms), "a base without BatchNorm", but)
    check_new(folder)
    head = {name: value for name, value in module.state_dict().items() if in_layer(name, HEAD)}
    state = library("peft", "model.adapters").get_peft_model_state_dict(base)
    with making(folder) as temporary:
        base.peft_config["default"].save_pretrained(temporary)
        save_file({f"{PEFT}{name}": value.contiguous() for name, value in state.items()},
                  temporary / ADAPTERS, {**about, "format": "pt"})  # fmt: skip
        if head:
            save_file({name: value.contiguous() for name, value in head.items()}, temporary / ADAPTED_HEAD)
    return sum(value.numel() for value in (*state.values(), *head.values()))
