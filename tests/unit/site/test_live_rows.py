"""Rows that nodes hold now: read again when their files change, and counted in windows alone."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography")

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.loop import begin, play
from fedtide.core.trees import same
from fedtide.site.live_rows import COUNTED, LiveRows
from fedtide.site.seat import Seat
from fedtide.site.tickets import Ticket
from fedtide.transforms.watch import UNKNOWN
from helpers.hospitals import NAMES, STUDY
from helpers.near_sites import fleet_at, host_at, nodes_of, site_of


def watched(folder, labels: str = "never", train: str = "always", **changes):
    transform = {"kind": "watch", "windows": 2, "labels": labels, "train": train}
    method = {**STUDY["method"][0], "transforms": [transform]}
    return site_of(
        folder, played=f"FedAvg (watched{', trains never' * (train == 'never')})", method=[method], rows=90, **changes
    )


def live_files(folder, lines: int = 30, *, label: bool = False) -> dict:
    """The first rows of each node's file as those of now, without their labels."""
    files = {}
    for name in NAMES:
        header, *rows = (folder / f"{name}.csv").read_text().splitlines()
        kept = [place for place, column in enumerate(header.split(",")) if label or column != "label"]
        files[name] = folder / f"{name}-now.csv"
        write(files[name], [header, *rows[:lines]], kept)
    return files


def write(path, lines, columns) -> None:
    path.write_text("".join(",".join(line.split(",")[column] for column in columns) + "\n" for line in lines))


def windows_of(site, nodes, rounds: int = 3, between=lambda played: None):
    """The last state of the method, and of each window how many rows it has."""
    host = host_at(site)
    fleet, found = fleet_at(site, nodes, host), []
    start = begin(host.algorithm, fleet, seed=0, rounds=rounds)
    for step in play(host.algorithm, fleet, start, seed=0, rounds=rounds):
        found.append(step.facts["watch"])
        between(len(found))
    return step.state.inner, found


def served(folder, site, files):
    return nodes_of(folder, site, lambda name: "", files)


@pytest.mark.parametrize(
    ("wire", "rows"),
    [({}, [90, 40, 30]), ({"secure": True, "fewest": 3}, [90, 0, 0])],
    ids=["plain", "masked"],
)
def test_a_window_counts_the_rows_that_files_have_now_and_training_does_not(tmp_path, wire, rows):
    site = watched(tmp_path, **({"wire": wire} if wire else {}))
    files = live_files(tmp_path)
    trained, plain = windows_of(site, served(tmp_path, site, None))

    def change(round: int) -> None:
        """All files are new in the second window but that of lyon, and that of oslo is empty in the third."""
        header, *rows = files["oslo"].read_text().splitlines()
        files["oslo"].write_text("\n".join([header, *(rows if round == 1 else [])[:10]]) + "\n")
        files["berlin"].touch()

    state, windows = windows_of(site, served(tmp_path, site, files), between=change)
    assert [window["rows"] for window in plain] == [17] * 3  # validation rows
    assert [window["rows"] for window in windows] == rows  # a sum of fewer than three is not masked
    assert same(state, trained)


def test_windows_that_count_labels_go_without_a_file_that_has_none(tmp_path):
    site = watched(tmp_path, "first", "never")
    files = live_files(tmp_path, label=True) | {"lyon": live_files(tmp_path)["lyon"]}
    files["berlin"] = tmp_path / "berlin.csv"
    _, windows = windows_of(
        site, served(tmp_path, site, files), between=lambda round: [file.touch() for file in files.values()]
    )
    assert [window["clients"] for window in windows] == [1, 1, 3]


def test_a_file_is_counted_once_and_again_when_it_changed(tmp_path):
    site = watched(tmp_path)
    path = live_files(tmp_path)["berlin"]

    def read(round: int):
        return LiveRows({0: path}, site.about.rows, tmp_path).read(0, Moment(round, 9, 0.0))  # as a node begun anew

    first = read(3)
    assert (len(first), first.y.unique().tolist()) == (30, [UNKNOWN])
    assert same(read(3), first)  # the question may come again
    assert read(4) is None
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:11]) + "\n")
    assert len(read(4)) == 10
    path.write_text((tmp_path / "berlin.csv").read_text())
    labeled = read(5)
    assert (len(labeled), sorted(labeled.y.unique().tolist())) == (90, [0, 1, 2])
    (tmp_path / COUNTED).write_text("{")
    assert len(read(6)) == 90
    path.write_text("pulse,age\n1,2\n")
    with pytest.raises(FedtideError, match="no column 'weight'"):
        read(7)
    path.unlink()
    with pytest.raises(FedtideError, match=r"berlin-now\.csv: no such file"):
        read(7)


def test_a_seat_names_what_is_wrong_with_files_of_now(tmp_path):
    site = watched(tmp_path)
    ticket, data = Ticket.read(site.root / "tickets" / "berlin.ticket"), [tmp_path / "berlin.csv"]
    files = live_files(tmp_path)

    def seat(*watch):
        return Seat.read(ticket, data, home=tmp_path / "home", watch=watch)

    with pytest.raises(FedtideError, match="--watch: found '2 files', allowed: 1, one for each client of the ticket"):
        seat(files["berlin"], files["lyon"])
    lines = [line for line in seat(files["berlin"]).describe() if line.startswith("watch: ")]
    assert lines == [f"watch: {files['berlin']}: 30 rows without labels now; it is read again when it changes"]
    files["berlin"].unlink()
    with pytest.raises(FedtideError, match=r"berlin-now\.csv: no such file"):
        list(seat(files["berlin"]).describe())


def test_rows_of_now_are_refused_by_a_study_that_is_not_watched(tmp_path):
    site = site_of(tmp_path)
    ticket = Ticket.read(site.root / "tickets" / "berlin.ticket")
    with pytest.raises(FedtideError, match=r"--watch: found .*, allowed: none, because the study is not watched"):
        Seat.read(ticket, [tmp_path / "berlin.csv"], home=tmp_path / "home", watch=[tmp_path / "berlin.csv"])
