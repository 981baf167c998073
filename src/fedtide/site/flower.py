"""Write a study as an app that a person's own SuperLink and SuperNodes of Flower run.

    pyproject.toml              the app, as `flwr run` reads it
    fedtide_study/              what travels to the SuperLink and from there to the SuperNodes
        study.toml, site.toml, roster.toml      those of a site
        tickets/NAME.toml       what a node needs of the study
        server_app.py, client_app.py            two lines each: Fedtide is installed where they run

Nothing here imports Flower.
"""

from __future__ import annotations

from pathlib import Path

import tomli_w

from fedtide.config import Experiment, Method, to_toml
from fedtide.core.atomic import making
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.runs.build import host_of
from fedtide.site.site import AboutSite, Member, Roster, settled, write_roster
from fedtide.site.tickets import SCHEME, Ticket, study_for

PACKAGE = "fedtide_study"
"""Name of the app's package."""
FILES = ("study.toml", "site.toml", "roster.toml")
"""Files that make a folder a site."""
TICKETS = "tickets"
"""Folder with a ticket for each node."""
MODULE = '''"""The {end} of the study: Fedtide, as it is installed here."""

from pathlib import Path

from fedtide.site.flower_{end} import app_of

app = app_of(Path(__file__).parent)
'''


def write_app(
    experiment: Experiment, method: str | None, nodes: str | None, out: Path, where: str
) -> tuple[Method, AboutSite, Roster]:
    """Write the app of a study, all at once; return what it plays, with whom.

    Args:
        experiment: as its file says.
        method: name of one of its methods; None where it has but one.
        nodes: names, as in berlin,lyon:2,oslo; None names one for each client of the study.
        out: the folder, which must not be there.
        where: how messages call the study.

    Raises:
        FedtideError: there is something at `out`, or the study cannot be played by Flower; nothing is written.
    """
    if out.exists() or out.is_symlink():
        raise FedtideError(f"{out}: already exists, and is left as it is; allowed: --flower with another folder")
    if experiment.wire is not None:
        but = "masked and private sums need the keys that nodes of 'fedtide serve' have"
        raise FedtideError(f"{where}: wire: found a table, allowed: none in an app for Flower: {but}")
    names = [each.name for each in experiment.method]
    if method is None and len(names) > 1:
        raise FedtideError(f"{where}: --method: found none, allowed: {', '.join(names)}")
    if nodes is None:
        host = host_of(experiment, experiment.method[0], experiment.seeds[0], MemoryStore(None))
        nodes = ",".join(f"node-{number}" for number in range(host.population.registered))
    roster = Roster.of(nodes)
    study, about = settled(experiment, method or names[0], roster, None, where)
    with making(out) as made:
        package = made / PACKAGE
        (package / TICKETS).mkdir(parents=True)
        texts = {
            made / "pyproject.toml": _project(study, about),
            package / "__init__.py": '"""A study of Fedtide."""\n',
            package / "study.toml": to_toml(study),
            package / "site.toml": tomli_w.dumps(about.model_dump(mode="json")),
            **{package / f"{end}_app.py": MODULE.format(end=end) for end in ("server", "client")},
            **{package / TICKETS / f"{node.name}.toml": _ticket(study, about, roster, node) for node in roster.node},
        }
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        write_roster(package, roster)
    return study.method[0], about, roster


def _project(study: Experiment, about: AboutSite) -> str:
    """Return what Flower reads of the app."""
    components = {f"{end}app": f"{PACKAGE}.{end}_app:app" for end in ("server", "client")}
    config = {"site": f"site-{about.digest}", "rehearsal": False}
    app = {"publisher": "fedtide", "components": components, "config": config}
    project = {"name": f"fedtide-{about.digest}", "version": "1.0.0", "license": {"text": "Apache-2.0"}}
    project |= {"description": study.title or "A study of Fedtide"}
    project |= {"dependencies": []}  # flwr and fedtide are installed where the app runs
    return tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})


def _ticket(study: Experiment, about: AboutSite, roster: Roster, node: Member) -> str:
    """Return the ticket of a node; who the server is, and who it is itself, is known to Flower alone."""
    ticket = Ticket(
        scheme=SCHEME,
        node=node.name,
        clients=node.clients,
        registered=roster.clients,
        address="127.0.0.1:1",
        authority="",
        digest=about.digest,
        seed=study.seeds[0],
        made=about.made,
        versions=about.versions,
        rows=about.rows,
        study=study_for(study),
    )
    return tomli_w.dumps({"seal": ticket.seal, **ticket.model_dump(mode="json")}, multiline_strings=True)
