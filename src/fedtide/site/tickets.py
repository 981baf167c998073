"""A ticket: all that a node needs of a site, in one file without secrets.

A ticket is not signed. A node learns of the site's authority from the ticket, so a signature by this authority would
prove nothing. The seal finds damage. `fedtide deploy` and `fedtide join` print it, and people compare the two seals by
another way than the ticket came.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from fedtide.algorithms import REGISTRY
from fedtide.config import Experiment, Method, from_dict, resolved
from fedtide.config.schema import STUDIES
from fedtide.config.settings import Address
from fedtide.core.atomic import write_bytes
from fedtide.core.errors import FedtideError, refused, shown, unknown, within
from fedtide.core.files import read_toml
from fedtide.data.sources import CSV, NPZ, Texts
from fedtide.fields.shapes import explain, fields_of, list_marks, marks_of
from fedtide.fields.types import Count, Different, Distinct, Finite, IsFile, Strict, Text, Whole, spelled
from fedtide.fields.user_code import Python
from fedtide.models.transformer import Transformer
from fedtide.site.certificates import SKEW, check_authority, utc
from fedtide.tuning.between_clients import methods_of

SCHEME: Literal[1] = 1
"""Version of tickets and of what travels between nodes and server."""
LARGEST = 2_000_000
"""Maximum number of bytes of a ticket: a study with its classes and columns."""
SENT: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("title", "description", "rounds", "eval_every", "eval_splits", "precision", "model", "method")),
    "data": ("split", "transforms"),
    "fleet": ("threads", "channels_last"),
    "wire": None,
}
"""Keys of a study that a ticket has, and of its tables; None is all of a table."""
KEPT = ("init_from", "shift")
"""Keys of a method that a ticket has not: the server sends weights, and time goes by itself."""


NAME = spelled("[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?", "1 to 40 of a-z, 0-9 and -, with - in the middle alone")
VERSION = spelled("[0-9][0-9A-Za-z.+-]{0,39}", "a version such as 2.13.0, of 1 to 40 characters")
"""The version of a package: people paste it into a command, so it can be nothing else."""
NodeName = Annotated[str, NAME]
Digest = Annotated[str, spelled("[0-9a-f]{16}", "16 of 0-9 and a-f")]
Versions = Annotated[dict[Text, Annotated[str, VERSION]], Field(max_length=20)]
Ids = Annotated[tuple[Annotated[Whole, Field(le=10_000_000)], ...], Distinct]
Names = Annotated[tuple[Text, ...], Field(max_length=100_000), Different]
FileName = Annotated[str, spelled("[0-9A-Za-z_.-]{1,100}", "1 to 100 of a-z, A-Z, 0-9, '_', '.' and '-'")]
Sha256 = Annotated[str, spelled("[0-9a-f]{64}", "64 of 0-9 and a-f")]
PackageName = Annotated[str, spelled("[A-Za-z_][0-9A-Za-z_]{0,99}", "the name of a package, as Python imports it")]
AT_NODE = "/dev/null/base"
"""Path of the base in the study of a ticket: there is none, because each node finds its own."""
PLACES = ("path", "package", "cache_mb")
"""Keys of a model that each machine decides by itself: where its files are, and how much memory it may take."""
OF_TABLES = (
    "label", "cuts", "time", "categories", "missing", "scaled", "encoding", "separator", "decimal", "time_format",
    "clock", "units", "learned",
)  # fmt: skip
READ = {
    "csv": OF_TABLES,
    "npz": ("names",),
    "texts": tuple(
        name for name in fields_of(Texts) if name not in {"client", "kind", *PLACES, *marks_of(Texts, IsFile)}
    ),
}
"""Settings of a source by which a file is read."""


DAMAGED = "the ticket was damaged or changed; ask the site's owner for it again"
"""What is wrong with a ticket whose content is not that of its seal."""


class Base(Strict):
    """Description of the pretrained base of a study, which each node has itself: it is never sent.

    Args:
        name: name of its folder, file or package at the server, for people.
        package: the package that has it at the server; None if none does.
        files: digests of its files by name, which a node compares with those of its own; no node opens these names.
    """

    name: Annotated[Text, Field(max_length=200)]
    package: PackageName | None = None
    files: Annotated[dict[FileName, Sha256], Field(min_length=1, max_length=1000)]

    @property
    def digest(self) -> str:
        """Short digest of all files."""
        return digest_of_files(self.files)


def digest_of_files(digests: Mapping[str, str]) -> str:
    """Return a short digest of files, from the digest of each by its name."""
    return hashlib.sha256(json.dumps(dict(digests), sort_keys=True).encode()).hexdigest()[:16]


class RowsAbout(Strict):
    """Description of the rows that the clients of a study hold: never rows.

    Args:
        shape: of the features of one row.
        dtype: of the features.
        classes: number of classes.
        labels: names of the classes, in order; () if labels are numbers from 0.
        columns: features of a CSV file, in order.
        source: the study's source without its path, by which a CSV, Parquet, NPZ or JSON lines file is read.
        times: first and last time of the study's own rows, by whole days; () if they have no dates.
        padding: id of padding of rows of tokens; None for other rows.
    """

    shape: Annotated[tuple[Count, ...], Field(max_length=4)]
    dtype: Literal["uint8", "int64", "float32", "float64"]
    classes: Annotated[Count, Field(le=1_000_000)]
    labels: Names = ()
    columns: Names = ()
    source: dict[str, Any]
    times: Annotated[tuple[Finite, ...], Field(max_length=2)] = ()
    padding: Annotated[Whole, Field(le=10_000_000)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "RowsAbout":
        if math.prod(self.shape) > 100_000_000:
            raise ValueError(f"found {shown(self.shape)} as the shape of a row, allowed: 100,000,000 numbers at most")
        if self.labels and len(self.labels) != self.classes:
            raise ValueError(f"found {len(self.labels)} names of {self.classes} classes, allowed: one each")
        if len(self.times) == 1 or self.times != tuple(sorted(self.times)):
            raise ValueError(f"found {shown(self.times)} as times, allowed: none, or the first and the last")
        if self.columns and "learned" not in self.source and self.shape != (len(self.columns),):
            raise ValueError(f"found {len(self.columns)} columns and rows of shape {self.shape}, allowed: one each")
        if self.is_texts and (self.padding is None or self.shape != (self.source.get("context"),)):
            allowed = "tokens of the source's context, with an id of padding"
            raise ValueError(f"found {shown(self.shape)} as the shape of rows of texts, allowed: {allowed}")
        return self

    @property
    def is_texts(self) -> bool:
        """Tell whether rows are texts as tokens."""
        return self.source.get("kind") == Texts.kind

    @property
    def predicts_next(self) -> bool:
        """Tell whether the next token is predicted at each step."""
        return self.is_texts and self.source.get("label") is None

    def source_at(self, path: Path, base: Path | None = None) -> CSV | NPZ | Texts:
        """Return the source that reads a file of such rows; texts by the tokenizer of a base.

        Raises:
            FedtideError: the settings will not do.
        """
        settings = {key: value for key, value in self.source.items() if key != "kind"}
        kind = self.source.get("kind")
        if not isinstance(kind, str) or kind not in READ:
            raise refused("rows.source.kind", kind, ", ".join(READ))
        for key in settings:
            if key not in READ[kind]:
                raise unknown("rows.source", key, READ[kind])
        with within("rows.source"):
            if kind == "npz":
                return NPZ(path=str(path), **settings)
            if kind == "texts":
                return Texts(path=(str(path),), tokenizer=AT_NODE if base is None else str(base), **settings)
            return CSV(path=str(path), features=self.columns or None, **settings)


class AboutSite(Strict):
    """Facts of a site beside its study.

    Args:
        scheme: version of tickets and of what travels.
        digest: digest of the study, which names its run.
        made: time of making.
        versions: versions of packages where the site was made.
        rows: what rows look like.
        base: the pretrained base of its model; None if there is none.
    """

    scheme: Literal[1]
    digest: Digest
    made: datetime
    versions: Versions
    rows: RowsAbout
    base: Base | None = None


class Ticket(AboutSite):
    """All that a node needs of a site, beside the facts of the site.

    Args:
        node: its name in the roster.
        clients: ids of the clients that it stands for.
        registered: number of clients of all nodes, as the server says.
        address: HOST:PORT of the server.
        authority: certificate of the site's authority, which alone the node trusts, as PEM.
        seed: seed of the run.
        study: the configuration, as far as a node needs it.
    """

    node: NodeName
    clients: Ids
    registered: Count
    address: Address
    authority: Annotated[str, Field(max_length=20_000)]
    seed: Annotated[Whole, Field(le=2**63 - 1)]
    study: dict[str, Any]

    @property
    def seal(self) -> str:
        """Digest of the whole ticket, in groups of four, for people to compare."""
        text = json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return "-".join(digest[at : at + 4] for at in range(0, 32, 4))

    @property
    def experiment(self) -> Experiment:
        """The study, with its one method; a base has no place in it.

        Raises:
            FedtideError: it has no study, or names code or files.
        """
        return study_of(self.study)

    @property
    def is_private(self) -> bool:
        """Tell whether the study is private, so that nothing without noise is told of rows."""
        return self.experiment.privacy is not None

    def to_toml(self) -> str:
        """Return the ticket as text."""
        head = f"# Ticket of {self.node}, without secrets. Compare its seal by another way than it came.\n"
        values = self.model_dump(mode="json", exclude_none=True)
        return head + tomli_w.dumps({"seal": self.seal, **values}, multiline_strings=True)

    def write(self, path: Path) -> None:
        """Write the ticket to a new file."""
        write_bytes(path, self.to_toml().encode(), new=True)

    @staticmethod
    def read(path: Path) -> "Ticket":
        """Read a ticket that a stranger may have written.

        Raises:
            FedtideError: it is damaged, of another version, or has keys that no ticket has.
        """
        with within(str(path)):
            try:
                return Ticket.from_dict(read_toml(path, LARGEST))
            except RecursionError:
                raise FedtideError("nested too deeply") from None
            except FedtideError as error:
                is_cut = "not valid TOML" in str(error)
                more = "; if it is a ticket, ask the site's owner for it again" if is_cut else ""
                raise FedtideError(f"{error}{more}") from None

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Ticket":
        """Check the values of a ticket; see `read`."""
        values = dict(values)
        if not values.keys() & {"scheme", "seal"}:
            raise FedtideError("is no ticket; fedtide deploy and fedtide invite write them: SITE/tickets/NODE.ticket")
        seal = values.pop("seal", None)
        if values.get("scheme") != SCHEME or isinstance(values.get("scheme"), bool):
            raise refused("scheme", values.get("scheme"), f"{SCHEME}", "another version of fedtide made it")
        try:
            ticket = Ticket.model_validate(values)
        except ValidationError as error:
            is_cut = any(fault["type"] == "missing" for fault in error.errors())
            raise FedtideError(explain(error, Ticket, values) + (f"; {DAMAGED}" if is_cut else "")) from None
        if ticket.made.tzinfo is None:
            raise refused("made", str(ticket.made), "a time with its zone, such as 2026-03-01T12:00:00Z")
        if ticket.seal != seal:
            raise FedtideError(f"seal: found {shown(seal)}, but the content has {ticket.seal}: {DAMAGED}")
        ticket.rows.source_at(Path("rows"))
        has_base = isinstance(study_of(ticket.study).model, Transformer)
        if (ticket.base is not None) != has_base:
            name = "none" if ticket.base is None else ticket.base.name
            raise refused("base", name, "one if the study's model is a 'transformer', else none")
        if ticket.rows.is_texts and not has_base:
            raise refused("rows", "texts", "other rows, because the study's model is no 'transformer'")
        return ticket

    def check_clock(self, now: datetime) -> None:
        """Raise if this machine's clock is before the ticket was made, or its authority is not valid."""
        if now + SKEW < self.made:
            raise FedtideError(f"made: {utc(self.made)}, and this machine's clock says {utc(now)}; set the clock")
        if now - self.made > timedelta(days=3650):
            raise refused("made", utc(self.made), "at most ten years ago; set the clock, or ask for a new ticket")
        check_authority(self.authority.encode(), "authority", now)


def study_of(values: Mapping[str, Any]) -> Experiment:
    """Return the study of a ticket: one registered method, which names neither code nor files."""
    for key, table in values.items():
        inside = SENT.get(key, ())
        if inside is None:
            continue
        for name in table if inside and isinstance(table, dict) else ("",):
            if name not in inside:
                raise refused(f"study.{key}{name and f'.{name}'}", shown(table), "no such key in a ticket")
    model = values.get("model")
    if isinstance(model, dict) and model.get("kind") == Transformer.kind:
        for key in PLACES:
            if key in model:
                raise refused(f"study.model.{key}", shown(model[key]), "no such key in a ticket")
        values = {**values, "model": {**model, "path": AT_NODE}}
    study = from_dict(values, where="study", timed=False, imports=False)
    if isinstance(study.model, Transformer) and (study.model.path, study.model.package) != (AT_NODE, None):
        raise refused("study.model", shown(model), "no file and no package, because a node finds its own base")
    if len(study.method) != 1:
        raise refused("study: method", f"{len(study.method)} methods", "one")
    method = study.method[0]
    for key in KEPT:
        if getattr(method, key) is not None:
            where = f"study: method '{method.name}'.{key}"
            raise refused(where, shown(getattr(method, key)), "no such key in a ticket")
    check_portable(study, method)
    return study


def check_portable(experiment: Experiment, method: Method) -> None:
    """Raise if a study names code of a user's own, or files; none of these is imported or opened."""
    where = f"method '{method.name}'"
    if method.algorithm not in REGISTRY and method.algorithm not in STUDIES:
        allowed = "a registered name, because tickets bring no code to nodes"
        raise refused(f"{where}.algorithm", method.algorithm, allowed)
    parts = {f"{where}.{key}": value for key, value in {**method.settings(), "loss": method.loss}.items()}
    base = experiment.model if isinstance(experiment.model, Transformer) else None  # its files do not travel
    model = {"model": experiment.model} if base is None else {"model.adapters": base.adapters}
    parts |= {**model, "data.transforms": experiment.data.transforms}
    for key, name in foreign(parts):
        raise refused(key, name, "what names no code and no file, because tickets bring neither to nodes")
    for entry in methods_of(method.options["entries"]) if method.algorithm == "tournament" else ():
        check_portable(experiment, entry)


def foreign(part: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a part of a configuration that name code of a user's own, or files, with these names."""
    if isinstance(part, Python):
        yield key, part.name
    elif isinstance(part, Mapping):
        for name, value in part.items():
            yield from foreign(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(part, list | tuple):
        for number, value in enumerate(part):
            yield from foreign(value, f"{key}[{number}]")
    for name, kind in fields_of(type(part)).items():
        value, inside = getattr(part, name), f"{key}.{name}"
        has_file = any(isinstance(mark, IsFile) for mark in list_marks(kind)) or name == "package"
        if value is not None and has_file:
            yield inside, str(value)
        yield from foreign(value, inside)


def study_for(experiment: Experiment) -> dict[str, Any]:
    """Return the study of a ticket, as far as a node needs it."""
    values = {key: value for key, value in resolved(experiment).items() if key in SENT}
    for key, inside in SENT.items():
        if inside is not None:
            values[key] = {name: values[key][name] for name in inside if name in values[key]}
    values["method"] = [{key: value for key, value in values["method"][0].items() if key not in KEPT}]
    if isinstance(experiment.model, Transformer):
        values["model"] = {key: value for key, value in values["model"].items() if key not in PLACES}
    return values
