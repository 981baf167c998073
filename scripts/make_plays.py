"""Make the text that ships with the package: comedies by day, tragedies and histories by night.

    python scripts/make_plays.py DATA_DIR

DATA_DIR holds `shakespeare/mit_shakespeare_roles.jsonl.gz`: a JSON line per role with `play`, `role` and `speeches`, in
the order spoken. Kept are eleven comedies, and six tragedies and five histories; of these the roles that say at least
2,000 characters, and of each its first speeches, up to 4,000 characters. Writes
`src/fedtide/data/bundled/plays.jsonl.gz` with `play`, `role`, `genre`, `domain` (day or night) and `speeches`.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "src/fedtide/data/bundled/plays.jsonl.gz"
GENRES = {
    "comedy": (
        "asyoulikeit", "comedy_errors", "lll", "merchant", "merry_wives", "midsummer", "much_ado", "taming_shrew",
        "tempest", "twelfth_night", "two_gentlemen",
    ),
    "tragedy": ("hamlet", "julius_caesar", "lear", "macbeth", "othello", "romeo_juliet"),
    "history": ("1henryiv", "henryv", "john", "richardii", "richardiii"),
}  # fmt: skip
LEAST, MOST = 2_000, 4_000
"""Characters of a role: fewest to be kept at all, most that are kept."""


def roles(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is kept of each role."""
    genre_of = {play: genre for genre, plays in GENRES.items() for play in plays}
    for line in lines:
        genre = genre_of.get(line["play"])
        if genre is None or sum(map(len, line["speeches"])) < LEAST:
            continue
        kept, size = [], 0
        for speech in line["speeches"]:
            size += len(speech)
            if size > MOST:
                break
            kept.append(speech)
        domain = "day" if genre == "comedy" else "night"
        yield {"play": line["play"], "role": line["role"], "genre": genre, "domain": domain, "speeches": kept}


def main(folder: Path) -> None:
    """Choose from the file in `folder` and write the bundled one."""
    with gzip.open(folder / "shakespeare/mit_shakespeare_roles.jsonl.gz", "rt", encoding="utf-8") as file:
        kept = list(roles(map(json.loads, file)))
    text = "".join(json.dumps(role, ensure_ascii=False) + "\n" for role in kept)
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))  # without a time, so that it is the same each time
    for domain in ("day", "night"):
        mine = [role for role in kept if role["domain"] == domain]
        size = sum(len(speech) for role in mine for speech in role["speeches"])
        print(f"{domain}: {len(mine)} roles of {len({role['play'] for role in mine})} plays, {size} characters")
    print(f"{TARGET}: {TARGET.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
