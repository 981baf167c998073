"""The answers of a site whose study is the inspection, from sums that its server has opened."""

from pathlib import Path
from typing import Any

from fedtide.core import checkpoint, codec
from fedtide.core.errors import FedtideError, in_shell, refused
from fedtide.inspection import bounded, by_sums
from fedtide.inspection.answers import Answers
from fedtide.site.accounts import ledger_for
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.site import Site

QUESTIONS_OF = {"inspection": by_sums.STAGES, "bounded-inspection": bounded.STAGES}
"""The questions of each study that inspects, one a round."""


def last_state(site: Site) -> tuple[int, Any]:
    """Return the number of rounds that a site has played, and the state after them; 0 and None before the first.

    Raises:
        FedtideError: a file is damaged.
    """
    folder = site.record / "checkpoints"
    about = checkpoint.check(folder, config=None)
    if about is None:
        return 0, None
    return about.round, codec.from_file(checkpoint.check_files(folder, about) / checkpoint.FILES[0])


def inspected(root: Path) -> Answers:
    """Return the answers to the eight questions between the clients of a site, after its last question.

    Raises:
        FedtideError: it is no site, its study is another one, a question was not asked yet, or a file is damaged.
    """
    site = Site.read(root, imports=False)
    if site.method.algorithm not in QUESTIONS_OF:
        where = f"{root / 'study.toml'}: method '{site.method.name}'.algorithm"
        allowed = "'inspection' or 'bounded-inspection', in a site made for it"
        raise refused(where, site.method.algorithm, allowed)
    questions = len(QUESTIONS_OF[site.method.algorithm])
    asked, state = last_state(site)
    if asked < questions:
        but = f"answers follow the last; rounds = {questions} in the study, and then: fedtide serve {in_shell(root)}"
        raise FedtideError(f"{root}: {asked} of {questions} questions were asked; {but}")
    if isinstance(state, by_sums.State):
        return by_sums.answers(state, str(root))
    privacy = site.experiment.privacy
    ledger = ledger_for(site.experiment, algorithm_without_rows(site.experiment, site.about.rows))
    if privacy is None or ledger is None:
        return bounded.bounded_answers(state, {}, str(root))
    return bounded.bounded_answers(state, bounded.noise_on(state, privacy.clip, ledger.z), str(root), ledger.whole)
