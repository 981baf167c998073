"""The answers of a site whose study is the inspection, from sums that its server has opened."""

from pathlib import Path
from typing import Any

from fedtide.core import checkpoint, codec
from fedtide.core.errors import FedtideError, refused
from fedtide.inspection.answers import Answers
from fedtide.inspection.by_sums import STAGES, answers
from fedtide.site.site import Site


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
    if site.method.algorithm != "inspection":
        where = f"{root / 'study.toml'}: method '{site.method.name}'.algorithm"
        raise refused(where, site.method.algorithm, "'inspection', in a site made for it")
    asked, state = last_state(site)
    if asked < len(STAGES):
        but = f"answers follow the last; rounds = {len(STAGES)} in the study, and then: fedtide serve {root}"
        raise FedtideError(f"{root}: {asked} of {len(STAGES)} questions were asked; {but}")
    return answers(state, str(root))
