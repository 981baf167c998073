"""Rounds of this checkout beside those of another commit, in turns: what changes since then cost or gain.

python bench/versions.py COMMIT [--works logistic,mlp] [--repeats 9] [--out bench/results.jsonl]

The commit is checked out into a temporary folder. Each side is a process with its own package and its own `rounds.py`.
The two take turns at going first. Speed is reported, never asserted.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
CONTENDERS = ("local-1", "workers-2", "stacked-1", "stacked-2")
SERVE = "--serve"
"""With this argument alone the script is one of the two sides."""


def serve() -> None:
    """Answer each line, [work, contender], with the seconds of a round, the median of a turn."""
    import rounds

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed does not come between
    with ExitStack() as stack:
        players: dict[tuple[str, str], Any] = {}
        for line in sys.stdin:
            name, contender = json.loads(line)
            work = rounds.WORKS[name]
            if (name, contender) not in players:
                one = next(c for c in rounds.contenders(work, ()) if c.name == contender)
                players[name, contender] = stack.enter_context(rounds.player(work, one, batch=work.batch))
                for _ in range(rounds.WARM_UP):
                    players[name, contender].round()
            rounds.rounds_for(rounds.UNTIMED, 1, players[name, contender])
            turn = rounds.rounds_for(rounds.TIMED, rounds.LEAST, players[name, contender])
            print(median(turn), file=answers, flush=True)


@contextmanager
def side(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that plays rounds with the package of a checkout."""
    path = os.pathsep.join(str(root / folder) for folder in ("src", "bench"))
    command = [sys.executable, "-P", __file__, SERVE]  # without the folder of this script, whose `rounds.py` is ours
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=root, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], work: str, contender: str) -> float:
    """Let a side play a turn, and return the seconds of a round."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([work, contender]), file=process.stdin, flush=True)
    return float(process.stdout.readline())


def short_name(commit: str) -> str | None:
    """Return the short name of a commit; None if there is no such commit."""
    command = ["git", "rev-parse", "--quiet", "--verify", "--short", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def compare(commit: str, works: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Return for each work and contender how many times as long a round took before, and now."""
    lines = []
    with checkout(commit) as tree, side(tree) as before, side(ROOT) as now:
        for work in works:
            for contender in CONTENDERS:
                pairs = []
                for turn in range(repeats):
                    order = (before, now) if turn % 2 else (now, before)  # who is second finds warmer caches
                    seconds = {each: ask(each, work, contender) for each in order}
                    pairs.append((seconds[before], seconds[now]))
                ratios = sorted(old / new for old, new in pairs)
                quartile = len(ratios) // 4
                lines.append(
                    {
                        "work": work,
                        "contender": contender,
                        "before": round(median(old for old, _ in pairs), 6),
                        "now": round(median(new for _, new in pairs), 6),
                        "ratio": round(median(ratios), 3),
                        "q1": round(ratios[quartile], 3),
                        "q3": round(ratios[-1 - quartile], 3),
                    }
                )
    return lines


def main() -> None:
    """Compare, print, append."""
    if sys.argv[1:] == [SERVE]:
        serve()
        return
    from rich.console import Console
    from rich.table import Table

    from machine import among, append, machine, now, options
    from works import WORKS

    parser = options(__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--works", type=among(WORKS), default=[*WORKS], help="which works, separated by commas")
    parser.add_argument("--repeats", type=int, default=9, help="turns")
    given = parser.parse_args()
    commit = short_name(given.commit)
    if commit is None:
        parser.error(f"commit: found '{given.commit}', allowed: one of this repository")
    date, where = now(), machine()
    lines = compare(commit, given.works, given.repeats)
    table = Table("work", "contender", "ms before", "ms now", "before / now", "quartiles")
    for line in lines:
        numbers = f"{1000 * line['before']:.2f}", f"{1000 * line['now']:.2f}", f"{line['ratio']:.2f}"
        table.add_row(line["work"], line["contender"], *numbers, f"{line['q1']:.2f} to {line['q3']:.2f}")
    Console(width=120).print(table)
    about = {"bench": "versions", "date": date, "of": short_name("HEAD"), "commit": commit, "repeats": given.repeats}
    append(given.out, [{**about, **line, **where} for line in lines])


if __name__ == "__main__":
    main()
