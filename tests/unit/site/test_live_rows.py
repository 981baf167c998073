"""Rows that nodes hold now: read again when their files change, and counted in windows alone."""

from dataclasses import replace

import pytest

pytest.importorskip("cryptography")

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.loop import begin, play
from fedtide.core.trees import same
from fedtide.data.partition import Split
from fedtide.remote.policy import Policy
from fedtide.site.client_rows import FileRows
from fedtide.site.live_rows import COUNTED, LiveRows
from fedtide.site.seat import Seat
from fedtide.site.tickets import Ticket
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


def change(path) -> None:
    """Change a number of the first row."""
    header, first, *rows = path.read_text().splitlines()
    number, *others = first.split(",")
    path.write_text("\n".join([header, ",".join([str(float(number) + 1), *others]), *rows]) + "\n")


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
    ("wire", "rows"), [({}, [90, 60, 30]), ({"secure": True, "fewest": 3}, [90, 0, 90])], ids=["plain", "masked"]
)
def test_a_window_counts_the_rows_that_files_have_now_and_training_does_not(tmp_path, wire, rows):
    site = watched(tmp_path, **({"wire": wire} if wire else {}))
    files = live_files(tmp_path)
    trained, plain = windows_of(site, served(tmp_path, site, None))

    def news(round: int) -> None:
        """Berlin and oslo have other rows in the second window, lyon has in the third."""
        for name in ("berlin", "oslo") if round == 1 else ("lyon",):
            change(files[name])

    state, windows = windows_of(site, served(tmp_path, site, files), between=news)
    assert [window["rows"] for window in plain] == [17] * 3  # validation rows
    assert [window["rows"] for window in windows] == rows  # a sum of fewer than three is not masked
    assert same(state, trained)


def test_windows_that_count_labels_go_without_a_file_that_has_none(tmp_path):
    site = watched(tmp_path, "first", "never")
    unlabeled = live_files(tmp_path)["lyon"].read_text()
    files = live_files(tmp_path, label=True)
    files["lyon"].write_text(unlabeled)
    _, windows = windows_of(
        site, served(tmp_path, site, files), between=lambda round: [change(file) for file in files.values()]
    )
    assert [window["clients"] for window in windows] == [2, 2, 3]


def test_rows_are_counted_once(tmp_path):
    site = watched(tmp_path)
    path, about = live_files(tmp_path)["berlin"], site.about.rows
    own = FileRows.read([tmp_path / "berlin.csv"], [0], about, Split())

    def asked(round: int, counted: int, *, labels: bool = False, least: int = 1) -> int:
        """How many rows a node that is begun anew has for a window; 0 if it answers with none."""
        live = LiveRows(own, {0: path}, about, tmp_path, policy=lambda: Policy(rows_at_least=least))
        rows = live.new_rows(0, {"labels": labels, "counted": counted})
        if rows is None:
            return 0
        live.note(0, Moment(round, 9, 0.0))
        return len(rows.shard(0, Moment(round, 9, 0.0)).val)

    assert asked(3, -1) == 30
    assert asked(3, -1) == 30  # the question may come again
    assert asked(4, -1) == 30  # no window has counted it: it was lost, or others had none
    assert asked(5, 4) == 0
    path.touch()
    assert asked(6, 4) == 0
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:11]) + "\n")
    assert asked(6, 4) == 10
    for damaged in ("{", "[1]", '{"0": 5}', '{"0": [null]}'):
        (tmp_path / COUNTED).write_text(damaged)
        assert asked(7, 6) == 10
    with pytest.raises(FedtideError, match=r"berlin-now\.csv: rows: found 10, allowed: 11 or more, as rows_at_least"):
        asked(8, 7, least=11)
    with pytest.raises(FedtideError, match=r"berlin-now\.csv: no labels, and this window counts them; allowed"):
        asked(8, 7, labels=True)
    path.write_text((tmp_path / "berlin.csv").read_text())
    assert asked(8, 7, labels=True) == 90
    assert asked(9, 8) == 0  # without labels, in the order of the file, they are the same rows
    path.write_text("pulse,age\n1,2\n")
    with pytest.raises(FedtideError, match="no column 'weight'"):
        asked(9, 8)
    path.unlink()
    with pytest.raises(FedtideError, match=r"berlin-now\.csv: no such file"):
        asked(9, 8)


def test_labels_that_no_window_counts_are_not_read(tmp_path):
    site = watched(tmp_path)
    (tmp_path / "always").mkdir()
    path = live_files(tmp_path, label=True)["berlin"]
    path.write_text(path.read_text().replace("calm", "dead"))
    ticket = Ticket.read(site.root / "tickets" / "berlin.ticket")
    seat = Seat.read(ticket, [tmp_path / "berlin.csv"], home=tmp_path / "home", watch=[path])
    assert any("30 rows without labels now" in line for line in seat.describe())
    counting = replace(
        seat, ticket=Ticket.read(watched(tmp_path / "always", "always").root / "tickets" / "berlin.ticket")
    )
    with pytest.raises(FedtideError, match="label: found 'dead', allowed: calm, ill, well"):
        list(counting.describe())
    live_files(tmp_path)
    assert f"warning: {path}: no labels, so this node stays out of windows that count them" in counting.describe()


def test_a_seat_names_what_is_wrong_with_files_of_now(tmp_path):
    site = watched(tmp_path)
    ticket, data = Ticket.read(site.root / "tickets" / "berlin.ticket"), [tmp_path / "berlin.csv"]
    files = live_files(tmp_path)

    def seat(*watch):
        return Seat.read(ticket, data, home=tmp_path / "home", watch=watch)

    with pytest.raises(FedtideError, match="--watch: found '2 files', allowed: 1, one for each client of the ticket"):
        seat(files["berlin"], files["lyon"])
    lines = [line for line in seat(files["berlin"]).describe() if line.startswith("watch: ")]
    assert lines == [f"watch: {files['berlin']}: 30 rows without labels now"]
    files["berlin"].unlink()
    with pytest.raises(FedtideError, match=r"berlin-now\.csv: no such file"):
        list(seat(files["berlin"]).describe())


def test_rows_of_now_are_refused_by_a_study_that_is_not_watched(tmp_path):
    site = site_of(tmp_path)
    ticket = Ticket.read(site.root / "tickets" / "berlin.ticket")
    with pytest.raises(FedtideError, match=r"--watch: found .*, allowed: none, because the study is not watched"):
        Seat.read(ticket, [tmp_path / "berlin.csv"], home=tmp_path / "home", watch=[tmp_path / "berlin.csv"])
