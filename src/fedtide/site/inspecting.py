"""The answers of a site whose study is the inspection, from sums that its server has opened."""

from pathlib import Path

from fedtide.core import checkpoint, codec
from fedtide.core.errors import FedtideError, refused
from fedtide.inspection.answers import Answers
from fedtide.inspection.by_sums import STAGES, answers
from fedtide.site.site import Site


def inspected(root: Path) -> Answers:
    """Return the answers to the eight questions between the clients of a site, after its last question.

    Raises:
        FedtideError: it is no site, its study is another one, a question was not asked yet, or a file is damaged.
    """
    site = Site.read(root, imports=False)
    if site.method.algorithm != "inspection":
        where = f"{root / 'study.toml'}: method '{site.method.name}'.algorithm"
        raise refused(where, site.method.algorithm, "'inspection', in a site made for it")
    folder = site.record / "checkpoints"
    about = checkpoint.check(folder, config=None)
    asked = 0 if about is None else about.round
    if about is None or asked < len(STAGES):
        but = f"answers follow the last; rounds = {len(STAGES)} in the study, and then: fedtide serve {root}"
        raise FedtideError(f"{root}: {asked} of {len(STAGES)} questions were asked; {but}")
    return answers(codec.from_file(checkpoint.check_files(folder, about) / checkpoint.FILES[0]), str(root))
