"""Rollback of a site: the next round begins with an earlier model that its server has kept."""

from fedtide.core.errors import FedtideError, in_shell, refused
from fedtide.core.record import run_lock
from fedtide.runs.digest import digest_of
from fedtide.runs.rollback import Rollback, check_kept, check_open
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.serve import hold
from fedtide.site.site import Site
from fedtide.site.tickets import check_portable


def roll_back(site: Site, number: int) -> Rollback:
    """Write into the record of a site that its next round begins with an earlier model; nothing else is changed.

    No round is played again, so what nodes and ledgers wrote down stays true.

    Args:
        site: the site; no server plays it.
        number: rounds of the model, one that is kept.

    Raises:
        FedtideError: a server runs, the study is over, no such model is kept, or clients have gone on without it.
    """
    check_portable(site.experiment, site.method)  # no code of a site is run
    if not site.record.is_dir():
        raise FedtideError(f"{site.root}: was never served, so there is no earlier model")
    with hold(site), run_lock(site.record):
        config = digest_of(site.experiment, site.method, site.seed)
        about = check_open(site.record, site.run, config=config, rounds=site.experiment.rounds)
        traits = algorithm_without_rows(site.experiment, site.about.rows).traits
        if traits.keeps or traits.remembers:
            but = "nodes have what clients kept in later rounds alone"
            raise refused("ROUND", number, f"none, because clients of {site.method.name} keep something", but)
        go_on = f"fedtide serve {in_shell(site.root)}"
        rollback = check_kept(site.record, about, number, name=site.method.name, go_on=go_on)
        rollback.write(site.record)
    return rollback
