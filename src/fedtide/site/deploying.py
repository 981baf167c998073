"""From a study to real clients: make the folder of a site, or an app that a person's own Flower runs.

The app has these files:

    pyproject.toml              the app, as `flwr run` reads it
    fedtide_study/              the package that travels to the SuperLink and from there to the SuperNodes
        study.toml, site.toml, roster.toml      those of a site
        tickets/NAME.toml       the study, as far as a node needs it
        server_app.py, client_app.py            two lines each: Fedtide is installed where they run

Nothing here imports Flower.
"""

import math
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import tomli_w

from fedtide.cohorts import Arrivals
from fedtide.config import Experiment, Method, from_dict, resolved, to_toml
from fedtide.config.settings import Deploy, Local, WireSettings, split_address
from fedtide.core.atomic import check_new, making
from fedtide.core.errors import FedtideError, Words, quote, refused, unknown
from fedtide.data.partition import IID, Natural
from fedtide.data.rows import Rows
from fedtide.data.sources import CSV, NPZ, Texts
from fedtide.data.sources.cells import YEAR_1973
from fedtide.data.sources.files import find
from fedtide.data.sources.tabular import Every
from fedtide.evaluate.metrics import SHIPPED
from fedtide.fields.types import DAY
from fedtide.learn.device import CPU
from fedtide.models.model_files import digests_of_model, locate_model
from fedtide.models.tokenizing import padding_in
from fedtide.models.transformer import Transformer
from fedtide.remote.fleet import SIMULATION_ONLY
from fedtide.runs.build import cohort_of, host_of, model_of, rows_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from fedtide.runs.privacy import check_scores, plan_without_sampling
from fedtide.site import certificates
from fedtide.site.accounts import describe_plan, ledger_for, warn_of_noise
from fedtide.site.bases import describe_base
from fedtide.site.inspecting import QUESTIONS_OF
from fedtide.site.site import Roster, Site, check_fewest, check_hidden, installed_versions
from fedtide.site.tickets import READ, SCHEME, AboutSite, RowsAbout, check_portable
from fedtide.wire.keys import library

PACKAGE = "fedtide_study"
"""Name of the app's package."""
APART = 100.0
"""Ratio of the standard deviations of two features from which a person is told."""
TICKETS = "tickets"
"""Folder with a ticket for each node."""
MODULE = '''"""The {end} of the study: Fedtide, as it is installed here."""

from pathlib import Path

from fedtide.site.flower_app import {end}_app

app = {end}_app(Path(__file__).parent)
'''


def name_method(experiment: Experiment, method: str | None, where: str) -> str:
    """Return the name of the method that is deployed: the given name, or that of the only method.

    Raises:
        FedtideError: no method has the name, or there is no name and the study has several methods.
    """
    names = [entry.name for entry in experiment.method]
    if method is None and len(names) > 1:
        but = f"type --method {shlex.quote(names[0])}, for instance"
        raise FedtideError(f"{where}: --method: no value given, allowed: {quote(names)}; {but}")
    if method not in (None, *names):
        raise unknown(f"{where}: --method", str(method), names, quoted=True)
    return method or names[0]


def check_cohort(experiment: Experiment, method: Method, clients: int, where: str) -> None:
    """Raise if a method asks more clients in a round than there are; `where` begins the error."""
    cohort = cohort_of(method)
    size = 0 if cohort is None else cohort.clients_per_round or 0
    if size > clients:
        name = method.name if "=" not in method.name else experiment.method.index(method)  # a key ends at the first "="
        key = "cohort" if cohort == Arrivals(size) else "cohort.clients_per_round"
        but, option = f"the nodes have {clients} clients", shlex.quote(f"method.{name}.{key}={clients}")
        allowed = f"at most {clients}; type --set {option}"
        raise refused(f"{where}: method '{method.name}'.cohort.clients_per_round", size, allowed, but)


def choose(experiment: Experiment, method: str, clients: int, address: str | None, where: str) -> Experiment:
    """Return the study of a site: one method with the first seed, dealt to as many clients as the roster has.

    Args:
        experiment: the experiment of the file.
        method: name of one of its methods.
        clients: number of real clients; a rehearsal deals the study's rows to as many.
        address: HOST:PORT of the server, in place of the file's.
        where: name of the study in errors.
    """
    methods = {entry.name: entry for entry in experiment.method}
    if experiment.sweep:
        raise FedtideError(f"{where}: sweep: found one, allowed: none; --set chooses a value")
    check_portable(experiment, methods[method])
    if methods[method].decide_per == "oracle":
        but = "no server knows true groups of real clients"
        raise refused(f"method '{method}'.decide_per", "oracle", "client, batch, sample", but)
    privacy = experiment.privacy
    by_scores = {
        "stop_at": experiment.stop_at and experiment.stop_at.accuracy,
        "keep.best": experiment.keep and experiment.keep.best,
    }
    for key, value in by_scores.items() if privacy is not None and privacy.scores is None else ():
        if value is not None:
            but = "no scores reach the server of a private study"
            allowed = "none with wire.privacy, or a budget for them, wire.privacy.scores"
            raise refused(f"{where}: {key}", value, allowed, but)
    check_scores(experiment, where)
    for number, metric in enumerate(experiment.metrics):
        if metric.kind != "python" and any(shipped.needs for shipped in SHIPPED[metric.kind]):
            raise refused(f"metrics[{number}]", metric.kind, "metrics of what real clients send of an evaluation")
    deploy = experiment.deploy or Deploy()
    if address is not None:
        try:
            split_address(address)
        except ValueError as error:
            raise FedtideError(f"--address: {error}") from None
        deploy = deploy.model_copy(update={"address": address})
    check_cohort(experiment, methods[method], clients, where)
    check_fewest(deploy, clients, where)
    data = experiment.data
    if data.public_samples:
        raise refused(f"{where}: data.public_samples", data.public_samples, "0, because tickets carry no rows to nodes")
    if data.split.by != "random":
        but = "nodes divide rows by their content"
        raise refused(f"{where}: data.split.by", data.split.by, "random; type --set data.split.by=random", but)
    if experiment.fleet.device != CPU:  # a site has one digest, and machines of nodes have devices of their own
        raise refused(f"{where}: fleet.device", experiment.fleet.device, "cpu, which servers and nodes compute on")
    if experiment.data.without_clients is not None:
        raise refused(f"{where}: data.without_clients", "a list", "none, because a node leaves by fedtide forget")
    if experiment.liars is not None:
        raise refused(f"{where}: liars", Words("a table"), "none, because real clients lie by themselves")
    rows = rows_of(experiment, experiment.seeds[0])
    if not isinstance(rows, Rows):
        raise FedtideError(f"{where}: data.source: makes rows as they are needed, which real clients do not")
    partition = data.partition or (IID() if rows.client is None else Natural())
    if hasattr(partition, "clients"):
        partition = cast(Any, replace)(partition, clients=clients)
    changes: dict[str, Any] = {
        "method": (methods[method],),
        "seeds": experiment.seeds[:1],
        "data": data.model_copy(
            update={
                "source": data.source.write_out(data.folder) if isinstance(data.source, CSV) else data.source,
                "partition": partition,
                "held_out_clients": type(data.held_out_clients)(),
            }
        ),
        "deploy": deploy,
        "wire": write_plan(experiment, methods[method]),
        "fleet": Local(threads=experiment.fleet.threads, channels_last=experiment.fleet.channels_last),
        **dict.fromkeys(("baseline", "tune", "forgetting"), None),
        "claim": (),
    }
    text = to_toml(experiment.model_copy(update=changes))
    return from_dict(tomllib.loads(text), where=where, timed=False)  # as the file of the site will be read


def write_plan(experiment: Experiment, method: Method) -> WireSettings | None:
    """Return the wire with the plan of its privacy written out, from which servers and nodes calculate the same."""
    wire = experiment.wire
    if wire is None or wire.privacy is None:
        return wire
    plan = plan_without_sampling(wire.privacy, experiment.rounds, 1, experiment.shift_of(method).period)
    privacy = wire.privacy.model_copy(update={"distance": plan.distance, "times": plan.times})
    return wire.model_copy(update={"privacy": privacy})


def describe_rows(experiment: Experiment, rows: Rows, directory: Path | None) -> RowsAbout:
    """Return the description by which a node reads its rows.

    Raises:
        FedtideError: files of nodes cannot hold such rows.
    """
    source = experiment.data.source
    model = model_of(experiment)
    if isinstance(source, Texts):
        if experiment.method[0].algorithm in QUESTIONS_OF:
            but = "its questions are about numbers, and features of texts are ids of tokens"
            raise refused("data.source.kind", source.kind, "rows of numbers", but)
        check_one_base(source, model, directory)
    elif rows.steps is not None:
        raise FedtideError(f"data.source: rows of {rows.name} are sequences, which nodes cannot read from files yet")
    if rows.value is not None:
        but = "nodes read classes alone, and numbers are standardized by all rows"
        raise refused("data.target.kind", experiment.data.target.kind, "'classes'", but)
    if getattr(source, "scaled", False) and not isinstance(source, CSV):
        but = "each node would scale by rows of its own"
        raise refused("data.source.scaled", True, "false, with rows that are scaled before, or a CSV file", but)
    # Rows of sources of other kinds come to nodes as arrays.
    kind = source.kind if isinstance(source, CSV | NPZ | Texts) else "npz"
    settings = resolved(experiment)["data"]["source"] if source.kind == kind else {}
    values = {"kind": kind} | {key: settings[key] for key in READ[kind] if settings.get(key) is not None}
    if "names" in values:
        values["names"] = {key: name for key, name in values["names"].items() if key not in ("client", "domain")}
    return RowsAbout(
        shape=rows.shape,
        dtype=cast(Any, str(rows.x.dtype).removeprefix("torch.")),
        classes=rows.classes,
        labels=rows.label_names,
        columns=source.feature_names(directory) if isinstance(source, CSV) else (),
        source=values,
        times=_days_of(rows) if isinstance(source, CSV) and not isinstance(source.time, Every) else (),
        padding=padding_in(model.folder) if isinstance(model, Transformer) else None,
    )


def check_one_base(source: Texts, model: Any, directory: Path | None) -> None:
    """Raise unless the tokenizer of texts is that of the model, because a node has one base for both."""
    if not isinstance(model, Transformer):
        but = "nodes make tokens by the tokenizer of their base"
        raise refused("model.kind", model.kind, "'transformer' for rows of texts", but)
    key = "data.source.tokenizer"
    path = None if source.tokenizer is None else str(find(source.tokenizer, directory, key))
    tokenizer, base = locate_model(path, source.package, key), locate_model(model.path, model.package)
    if tokenizer != base and digests_of_model(tokenizer) != digests_of_model(base):
        but = "its files are others, and a node has one base"
        raise refused(key, str(tokenizer), f"that of the model, {base}", but)


def _days_of(rows: Rows) -> tuple[float, ...]:
    """Return the first and the last time of rows, by whole days; () if they have none, or no dates."""
    if rows.time is None or float(rows.time.max()) < YEAR_1973:
        return ()
    return DAY * math.floor(float(rows.time.min()) / DAY), DAY * math.ceil(float(rows.time.max()) / DAY)


def warn_of_scales(experiment: Experiment, rows: Rows) -> Iterator[str]:
    """Say in a line that features differ by orders of magnitude, if nothing scales them."""
    source, transforms = experiment.data.source, experiment.data.transforms
    if rows.x.dim() != 2 or not rows.x.is_floating_point() or getattr(source, "scaled", True) or transforms:
        return
    spreads = rows.x.double().std(0, correction=0)
    used = spreads > 0
    if not used.any() or (largest := spreads.max()) < APART * (smallest := spreads[used].min()):
        return
    columns = source.feature_names(experiment.data.folder) if isinstance(source, CSV) else range(len(spreads))
    wide, narrow = (columns[int((spreads == spread).nonzero()[0])] for spread in (largest, smallest))
    scale = "set data.source.scaled = true" if isinstance(source, CSV) else "scale them before"
    ratio = f"{float(largest / smallest):,.0f}"
    yield f"data.source: feature {wide} varies {ratio} times as much as {narrow}, and nothing is scaled; {scale}"


def _plan_site(
    experiment: Experiment, method: str | None, roster: Roster, root: Path, address: str | None, where: str
) -> Site:
    """Check a study and return its site, of which nothing is written; see `make_site`."""
    method = name_method(experiment, method, where)
    study = choose(experiment, method, roster.clients, address, where)
    check_hidden(study, roster, where)
    trial = preflight(study, where)
    for line in trial.notes:
        print(f"fedtide: {line}", file=sys.stderr)
    host = host_of(study, study.method[0], study.seeds[0])
    if (ledger := ledger_for(study, host.algorithm)) is not None and host.wire.clip is not None:
        for line in (*describe_plan(ledger), *warn_of_noise(ledger, host.wire.clip, trial.forms)):
            print(f"fedtide: {line}", file=sys.stderr)
    clients = host.population.registered
    if clients != roster.clients:
        but = f"the study deals its rows to {clients} clients"
        raise refused(f"{where}: --nodes", f"{roster.clients} clients", "as many; NAME:3 is a node with three", but)
    rows = cast(Rows, rows_of(study, study.seeds[0]))
    for line in warn_of_scales(study, rows):
        print(f"fedtide: {line}", file=sys.stderr)
    if names := [name for name in host.algorithm.traits.reveals if name in SIMULATION_ONLY]:
        but = f"it asks for '{names[0]}', which only a simulation knows"
        raise refused(f"{where}: --method", method, "one whose clients train together", but)
    about = AboutSite(
        scheme=SCHEME,
        digest=digest_of(study, study.method[0], study.seeds[0]),
        made=datetime.now(UTC).replace(microsecond=0),
        versions=installed_versions(),
        rows=describe_rows(study, rows, study.data.folder),
        base=describe_base(study),
    )
    return Site(root, study, about, roster)


def make_site(
    experiment: Experiment, method: str | None, roster: Roster, root: Path, address: str | None, where: str
) -> Site:
    """Make the folder of a site in one step.

    Args:
        experiment: the experiment of the file.
        method: name of one of its methods; None if there is only one.
        roster: the nodes.
        root: the folder, which must not exist.
        address: HOST:PORT of the server, in place of the file's.
        where: name of the study in errors.

    Raises:
        FedtideError: `root` exists, or the study cannot be deployed; nothing is written.
    """
    check_new(root, " with --out")
    library()
    site = _plan_site(experiment, method, roster, root, address, where)
    with making(root, 0o700) as temporary:
        new = replace(site, root=temporary)
        for folder in (new.authority, temporary / "tickets"):
            folder.mkdir(mode=0o700)
        certificates.make_authority(new.authority, new.deploy.address)
        new.write()
        new.write_tickets(roster.node)
    return site


def write_app(experiment: Experiment, method: str | None, nodes: str | None, out: Path, where: str) -> Site:
    """Write the app of a study in one step; return its package as a site.

    Args:
        experiment: the experiment of the file.
        method: name of one of its methods; None if there is only one.
        nodes: names, as in berlin,lyon:2,oslo; None names a node for each client of the study.
        out: the folder, which must not exist.
        where: name of the study in errors.

    Raises:
        FedtideError: `out` exists, or Flower cannot play the study; nothing is written.
    """
    check_new(out, " with --flower")
    if experiment.wire is not None:
        but = "masked and private sums need the keys that nodes of 'fedtide serve' have"
        raise FedtideError(f"{where}: wire: found a table, allowed: none in an app for Flower: {but}")
    if isinstance(experiment.model, Transformer):
        but = "nodes of 'fedtide join' have a base of their own"
        raise refused(f"{where}: model.kind", experiment.model.kind, "another in an app for Flower", but)
    if nodes is None:
        host = host_of(experiment, experiment.method[0], experiment.seeds[0])
        nodes = ",".join(f"node-{number}" for number in range(host.population.registered))
    site = _plan_site(experiment, method, Roster.of(nodes), out / PACKAGE, None, where)
    with making(out) as temporary:
        (temporary / "pyproject.toml").write_text(_project(site), encoding="utf-8")
        package = temporary / PACKAGE
        (package / TICKETS).mkdir(parents=True)
        replace(site, root=package).write()
        (package / "__init__.py").write_text('"""A study of Fedtide."""\n', encoding="utf-8")
        for end in ("server", "client"):
            (package / f"{end}_app.py").write_text(MODULE.format(end=end), encoding="utf-8")
        for node in site.roster.node:  # Flower knows the server and each node
            site.ticket_of(node, "127.0.0.1:1", "").write(package / TICKETS / f"{node.name}.toml")
    return site


def _project(site: Site) -> str:
    """Return the part of the app that Flower reads."""
    app = {
        "publisher": "fedtide",
        "components": {f"{end}app": f"{PACKAGE}.{end}_app:app" for end in ("server", "client")},
        "config": {"site": f"site-{site.digest}", "rehearsal": False},
    }
    project = {
        "name": f"fedtide-{site.digest}",
        "version": "1.0.0",
        "license": {"text": "Apache-2.0"},
        "description": site.experiment.title or "A study of Fedtide",
        "dependencies": [],  # flwr and fedtide are installed where the app runs
    }
    return tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
