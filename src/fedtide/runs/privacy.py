"""Privacy of a run: the releases of a plan, and the server's noise, which follows from the budget."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fedtide.cohorts import Poisson, Uniform
from fedtide.config import Experiment, Method, points
from fedtide.config.settings import Privacy
from fedtide.core.base import Algorithm, Moment
from fedtide.core.errors import Words, refused, unknown, within
from fedtide.evaluate.metrics import BY_WAY
from fedtide.fleets.engines import Host
from fedtide.remote.offline import trial
from fedtide.runs.build import cohort_of, cohort_size
from fedtide.wire.accounting import Plan, Sampling
from fedtide.wire.clip import WHOLE
from fedtide.wire.ledger import Ledger, Safe
from fedtide.wire.noise import Draw, score_deviation, with_noise
from fedtide.wire.pipeline import Wire
from fedtide.wire.vector import Form

MUCH = 10.0
"""Epsilon above which a budget promises little."""


def check_delta(privacy: Privacy, clients: int, where: str = "") -> None:
    """Raise if a run may tell all of some client: it may say more than epsilon with the probability delta of each."""
    if privacy.delta * clients >= 1:
        allowed = f"below 1/{clients}, one over the number of clients"
        raise refused(f"{where}wire.privacy.delta", privacy.delta, allowed)


def warn_of_epsilon(epsilon: float, how: str = "") -> str:
    """Return a line about a budget that promises little; "" for another. `how` says how the budget is spent.

    >>> warn_of_epsilon(8.0), warn_of_epsilon(25.0)
    ('', 'warning: wire.privacy comes to epsilon 25, which promises little; ask for 10 or less')
    """
    line = f"warning: wire.privacy comes to epsilon {epsilon:.3g}{how}, which promises little; ask for {MUCH:g} or less"
    return line if epsilon > MUCH else ""


BLURRED = 0.05
"""Noise on an accuracy above which it tells little."""


def warn_of_blur(ledger: Ledger, clients: int) -> str:
    """Return a line about scores that noise hides; "" for others, and without scores in the ledger.

    >>> scores = Ledger(Plan(10, 10), 20.0, 1e-5)
    >>> warn_of_blur(Ledger(Plan(10, 10), 1.0, 1e-5, score_ledger=scores), 100)  # 20 / 2 * sqrt(2) / 100
    'warning: noise on the accuracy of 100 clients is about 0.14; raise wire.privacy.scores or eval_every'
    >>> warn_of_blur(Ledger(Plan(10, 10), 1.0, 1e-5, score_ledger=scores), 1000)
    ''
    """
    noise = 0.0 if ledger.score_ledger is None else score_deviation(ledger.score_ledger.z) / max(clients, 1)
    how = "raise wire.privacy.scores or eval_every"
    return f"warning: noise on the accuracy of {clients} clients is about {noise:.2g}; {how}" if noise > BLURRED else ""


def plan_of(privacy: Privacy, experiment: Experiment, method: Method, host: Host) -> Plan:
    """Return the releases that a run may make."""
    rounds, shift, people = experiment.rounds, experiment.shift_of(method), host.population
    cohort, questions = cohort_of(method), len(host.algorithm.works)
    fixed = privacy.distance is not None or privacy.times is not None
    absent = experiment.liars is not None and experiment.liars.attack.kind == "absent"
    # A client that is drawn uniformly from all, anew in each round, gains by not being known.
    always = shift.who.kind == "always" and people.availability is None and people.there(Moment(0, rounds)) is None
    in_the_way = {
        "clients come and go by a clock that is known": not always,
        "its noise is banded": privacy.noise == "banded",
        "`distance` or `times` says when a client may come": fixed,
        "the number of answers before its deadline tells who was drawn": getattr(cohort, "deadline", None) is not None,
        "the number of answers tells whether clients that have left were drawn": len(people.left) > 0,
        "the number of answers tells whether liars that stay away were drawn": absent,
        "its clients are asked in several sums": host.algorithm.traits.fewest is not None,
    }
    poisson = isinstance(cohort, Poisson)
    if poisson:
        fewest = host.wire.fewest
        in_the_way |= {f"no sum of fewer than {fewest} clients is opened, which tells how many came": fewest > 1}
        if why := next((why for why, is_so in in_the_way.items() if is_so), ""):
            needs = "uniform, or clients that are always there, plain noise, secure = false and fewest = 1"
            raise refused("cohort", "poisson", needs, why)
    if poisson or (isinstance(cohort, Uniform) and not any(in_the_way.values())):
        drawn = min(cohort.asked(), people.registered)
        return Plan(rounds, rounds, releases=questions, sampling=Sampling(drawn, people.registered, poisson))
    return plan_without_sampling(privacy, rounds, questions, shift.period)


def plan_without_sampling(privacy: Privacy, rounds: int, questions: int, period: float | None = None) -> Plan:
    """Return the releases of a run in which it is known who takes part, as with real clients.

    Args:
        privacy: of the study.
        rounds: how many.
        questions: sums that a client is in, in each of its rounds.
        period: of the shift, in rounds.
    """
    usual = 1 if period is None else max(round(period), 1)
    distance = min(usual if privacy.distance is None else privacy.distance, rounds)
    most = math.ceil(rounds / distance)
    times = most if privacy.times is None else min(privacy.times, most)
    return Plan(rounds, times, distance, distance if privacy.noise == "banded" else 1, questions)


def sums_of(method: Method, host: Host) -> tuple[Form, ...]:
    """Return the forms of all sums of a method, found by a trial.

    Raises:
        FedtideError: it sums something before round 0.
    """
    like, classes = host.population.few()
    forms: dict[Form, None] = {}
    with within(f"method '{method.name}'"):
        for fleet, _ in trial(host.algorithm, like, classes, wire=host.wire):
            for query in fleet.queries:
                if query.ask.forms and query.ask.version[0] < 0:
                    why = f"it asks '{query.ask.question}' before round 0, which no budget plans"
                    raise refused("wire.privacy", Words("a table"), "a method that sums from round 0 on alone", why)
                forms |= dict.fromkeys((query.ask.forms or {}).values())
    registered = host.population.registered
    people = cohort_size(method, registered) if host.wire.divisor is None else registered
    return tuple(replace(form, people=people) for form in forms)


def check_needed(experiment: Experiment, sums: Iterable[Form], where: str) -> None:
    """Raise if a bound names nothing that a method sums."""
    names = sorted({leaf.name or WHOLE for form in sums for leaf in form.leaves})
    for point in points(experiment, where):
        privacy = point.experiment.privacy
        for name in () if privacy is None else privacy.clip:
            if name not in names:
                raise unknown(f"{where}: wire.privacy.clip", name, names)


def check_scores(experiment: Experiment, where: str) -> None:
    """Raise if scores are sums, and the experiment wants numbers of them that no sum of accuracies tells."""
    if experiment.wire is None or not experiment.wire.build().sums_scores:
        return
    otherwise = (
        "" if experiment.privacy else ", or wire.sum_scores = false, which shows the server those of each client"
    )
    by, liars = None if experiment.keep is None else experiment.keep.by, experiment.liars
    wanted = {
        "metrics": [metric.kind for metric in experiment.metrics],
        "references": experiment.references,
        "keep.by": [by] if by is not None and by != experiment.score else [],
        "liars.attack": ["backdoor"] if liars is not None and liars.attack.kind == "backdoor" else [],
    }
    for number, claim in enumerate(experiment.claim):
        wanted[f"claim[{number}].measure"] = (
            [claim.measure] if claim.measure and claim.measure.startswith(BY_WAY) else []
        )
    for key, names in wanted.items():
        if names:
            raise refused(f"{where}: {key}", ", ".join(names), f"none{otherwise}", "scores are sums")
    if experiment.score != "accuracy":
        kind, but = experiment.data.target.kind, "scores are sums of bounded numbers"
        raise refused(f"{where}: data.target", kind, f"classes{otherwise}", but)


def plan_of_scores(experiment: Experiment, algorithm: Algorithm) -> Plan:
    """Return the releases of all evaluations of a run: a client is in each of them, once for each part of its rows.

    Test rows may be of the source, or still to come, whatever `data.split.test` is. So only `eval_splits` leaves
    them out.
    """
    parts = ["train_clients", *(["val"] if experiment.data.split.val else [])]
    named = [name for name in parts if experiment.eval_splits is None or name in experiment.eval_splits]
    uses = 1 + len(algorithm.others)
    times = math.ceil(experiment.rounds / experiment.eval_every)
    return Plan(experiment.rounds, times, releases=max(len(named), 1) * uses)


def ledger_with(
    privacy: Privacy, plan: Plan, experiment: Experiment, algorithm: Algorithm, path: Path | None = None
) -> Ledger:
    """Return the ledger of a plan, with the noise of a study."""
    z = privacy.multiplier if privacy.epsilon is None else plan.noise(privacy.epsilon, privacy.delta)
    assert z is not None
    scores = None
    if privacy.scores is not None:
        judged = plan_of_scores(experiment, algorithm)
        scores = Ledger(judged, judged.noise(privacy.scores, privacy.delta), privacy.delta)
    return Ledger(plan, z, privacy.delta, path, score_ledger=scores)


def server_wire(
    experiment: Experiment, method: Method, host: Host, draw: Draw, ledger: Path | None = None, safe: Safe | None = None
) -> Wire:
    """Return the wire as the server knows it: with noise, where there is privacy, and a ledger.

    Args:
        method: one of its methods.
        host: that of the method, whose wire is as clients know it.
        draw: fresh noise.
        ledger: file of the releases; None keeps them in this process.
        safe: keeps what was released, where clients are real.
    """
    if (privacy := experiment.privacy) is None:
        return host.wire
    plan = plan_of(privacy, experiment, method, host)
    return with_noise(host.wire, ledger_with(privacy, plan, experiment, host.algorithm, ledger), draw, safe)
