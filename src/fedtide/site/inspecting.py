"""The answers of a site whose study is the inspection, from the sums that its server has opened."""

from pathlib import Path

from fedtide.core import checkpoint, codec
from fedtide.core.errors import FedtideError, refused
from fedtide.inspection.answers import Answers
from fedtide.inspection.by_sums import answers
from fedtide.site.site import Site


def inspected(root: Path) -> Answers:
    """Return the answers to the eight questions between the clients of a site, as far as they were asked.

    Raises:
        FedtideError: it is no site, its study is another one, nothing is opened yet, or a file is damaged.
    """
    site = Site.read(root, imports=False)
    if site.method.algorithm != "inspection":
        where = f"{root / 'study.toml'}: method '{site.method.name}'.algorithm"
        raise refused(where, site.method.algorithm, "'inspection', in a site made for it")
    folder = site.record / "checkpoints"
    about = checkpoint.check(folder, config=None)
    if about is None:
        raise FedtideError(f"{root}: no question was answered yet; allowed: a site that was served")
    return answers(codec.from_file(checkpoint.check_files(folder, about) / checkpoint.FILES[0]), str(root))
