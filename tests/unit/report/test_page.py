"""The report page: one file that opens offline, with figures, tables and everything that was configured."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedtide.core.errors import FedtideError
from fedtide.draw import figures
from fedtide.draw.html import swatch
from fedtide.draw.tables import Table
from fedtide.report.accuracy import accuracy_over_rounds
from fedtide.report.page import write_report
from fedtide.report.run_records import RunRecord, read_experiment
from fedtide.runs import folder
from fedtide.runs.experiment import execute
from helpers import studies
from helpers.pages import Page
from helpers.studies import MOMENTUM, STEADY, A, run_of, study


def finished(root: Path, *methods: dict, **changes) -> Path:
    return studies.finished(root, study(*methods, **changes))


@pytest.fixture
def undrawn(monkeypatch):
    """Without pictures, which take longer than all else."""
    monkeypatch.setattr("fedtide.report.page.pictures_of", lambda record: [])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return finished(
        tmp_path_factory.mktemp("page") / "run",
        A,
        {**STEADY, "name": "A, steady"},
        MOMENTUM,
        seeds=[0, 1],
        baseline="A",
        rounds=8,
        title="Day & night <here>",
        description="What 1 < 2 does",
    )


@pytest.fixture(scope="module")
def text(root):
    path = write_report([root])
    assert path == root / "report.html"
    return path.read_text(encoding="utf-8")


def test_what_is_known_of_clients_is_read_once(root, tmp_path, monkeypatch):
    read, folders = RunRecord._read_clients, []
    monkeypatch.setattr(RunRecord, "_read_clients", lambda run: folders.append(run.folder) or read(run))
    write_report([root], out=tmp_path / "report.html")
    assert len(folders) == len(set(folders)) == 6


def test_a_report_at_the_end_of_a_run_reads_no_file_of_the_package(root, tmp_path, monkeypatch, text):
    """Which may have been edited or upgraded since the run began."""
    read, package = Path.read_text, Path(figures.__file__).parent

    def read_elsewhere(path, *given, **named):
        assert package not in path.parents
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", read_elsewhere)
    assert read(write_report([root], tmp_path / "again.html")) == text


def test_the_page_loads_nothing_from_anywhere(text):
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base"} & set(page.tags)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset", "background"):
            assert value.startswith(("#", "data:image/png;base64,", "data:image/svg+xml;", "data:text/")), (
                f"<{tag} {name}={value[:60]}>"
            )
        assert not name.startswith("on")
    assert not re.search(r"url\((?!['\"]?(?:#|%23))", text)
    assert "@import" not in text
    assert "file:" not in text


def test_the_page_opens_with_its_title_figures_and_tables(text):
    page = Page(text)
    assert page.text["h1"] == "Day & night <here>"
    assert page.text["title"].startswith("Day & night <here> · Fedtide")
    assert "What 1 < 2 does" in page.text["p"]
    assert text.startswith("<!doctype html>")
    assert [v for tag, n, v in page.attributes if (tag, n) == ("svg", "aria-label")] == [
        "accuracy over rounds", "accuracy within one period", "accuracy on the participants", "accuracy over clients",
    ]  # fmt: skip
    assert page.tags.index("h1") < page.tags.index("nav") < page.tags.index("table") < page.tags.index("figure")
    headers = [row[0] for row in page.cells]
    assert headers == ["method", "A", "A, steady", "momentum"] * 6
    titles = [row[1] for row in page.cells if row[0] == "method"]
    assert titles == [
        "mean over the whole run",
        "day clients",
        "day clients",
        "backward transfer",
        "mean over clients",
        "to clients",
    ]
    assert page.cells[0] == [
        "method",
        "mean over the whole run",
        "against A",
        "worst point",
        "swing",
        "last round",
        "best",
        "validation rows",
    ]


def test_every_method_has_a_row_and_a_sentence_behind_a_click(text):
    page = Page(text)
    for name in ("A", "A, steady", "momentum"):
        assert name in page.text["dt"]
        assert f"{name} has an accuracy of " in page.text["dd"]
    assert [cell[:1] for cell in next(zip(*page.cells[1:4], strict=False))] == ["A", "A", "m"]
    assert "\xa0±\xa0" in page.text["dd"]
    assert " ± " not in page.text["dd"]
    assert "The shift costs " in page.text["p"]
    assert "Means over seeds ± one standard error" in page.text["p"]
    assert "Lines are means over 2\xa0seeds, bands one standard error." in page.text["p"]


def test_the_whole_configuration_and_the_environment_are_on_the_page(text, root):
    page = Page(text)
    assert page.text["pre"] == (root / "config.toml").read_text()
    assert re.search(r"run: \d{4}-\d\d-\d\dT.*, Python 3\.\d+\.\d+, .* cores; fedtide .*, torch 2", page.text["p"])


def test_the_same_folder_gives_the_same_page(text, root):
    assert write_report([root]).read_text(encoding="utf-8") == text


@pytest.mark.usefixtures("undrawn")
def test_a_crash_while_it_is_written_leaves_the_old_page(root, tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("the old page")

    def crash(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_report([root], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "the old page"


# -- several folders ---------------------------------------------------------------------------------------------------


def test_several_folders_are_sections_of_one_page(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = finished(tmp_path / "other", A, rounds=3)
    path = write_report([root, other])
    assert path == Path("report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("section") == 2
    assert page.text["h1"] == "Day & night <here> and other"
    assert page.cells[0][:2] == ["method", "averaged over"]
    assert [row[0] for row in page.cells[1:5]] == ["run: A", "run: A, steady", "run: momentum", "other: A"]
    pictures = [v for tag, n, v in page.attributes if (tag, n) == ("svg", "aria-label")]
    assert pictures[0] == "accuracy of all methods"
    for name in ("run", "other"):
        assert name in page.text["h2"]
        assert re.search(rf"{name}: \d{{4}}-", page.text["p"])
    assert (other / "summary.json").is_file()


def test_folders_of_one_name_are_told_apart(tmp_path):
    roots = [finished(tmp_path / place / "run", A, rounds=2) for place in ("a", "b")]
    page = Page(write_report(roots, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [row[0] for row in page.cells[1:3]] == ["a/run: A", "b/run: A"]
    ids = [value for tag, name, value in page.attributes if name == "id" and tag in ("figure", "h2", "div")]
    assert len(set(ids)) == len(ids)


# -- other experiments -------------------------------------------------------------------------------------------------

CASES = {
    "one seed": (
        {},
        {"accuracy over rounds", "accuracy within one period", "accuracy on the participants", "accuracy over clients"},
    ),
    "no shift": ({"shift": {"who": "always"}}, {"accuracy over rounds", "accuracy over clients"}),
    "one group": (
        {"shift": {"who": "always"}, "data": {"groups": {"by": "none"}}},
        {"accuracy over rounds", "accuracy over clients"},
    ),
    "one round": ({"rounds": 1}, {"accuracy over rounds", "accuracy over clients"}),
    "nobody judged": ({"data": {"held_out_clients": {"clients": 0}, "split": {"val": 0.0, "test": 0.0}}}, set()),
    "three groups": (
        {
            "data": {
                "source": {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "domains": 3},
                "held_out_clients": {"clients": 3},
            }
        },
        {"accuracy over rounds", "accuracy within one period", "accuracy on the participants", "accuracy over clients"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_any_experiment_has_a_page(tmp_path, case):
    changes, pictures = CASES[case]
    root = finished(tmp_path / "run", A, **{"rounds": 4, **changes})
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    shown = {v for tag, n, v in page.attributes if (tag, n) == ("svg", "aria-label")}
    assert shown >= pictures
    assert "bands one standard error" not in page.text["p"]
    assert "table" in page.tags


NAMES = [
    ["<b>bold</b> & co", "quotes \"x\" 'y'", "100 % ^ {x}", "Ünïcödé"],
    ["_under", "_score"],
    ["$5", "$6 and $7"],
    [r"$\oops$"],
]


@pytest.mark.parametrize("names", NAMES)
def test_methods_may_have_any_name(tmp_path, names):
    root = finished(tmp_path / "run", *[{**A, "name": name} for name in names], rounds=2)
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert [row[0] for row in page.cells[1 : 1 + len(names)]] == names
    assert "b" not in page.tags
    for name in names:
        assert name in page.text["text"].replace("\xa0", " "), f"{name} is missing in the legends"


def test_groups_may_have_any_name(tmp_path):
    groups = {"by": "labels", "labels": [[0], [1, 2]], "names": ["day, cloudy", "<night> & $x$"]}
    root = finished(tmp_path / "run", A, rounds=4, data={"groups": groups})
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert {"day, cloudy clients", "<night> & $x$ clients"} <= {cell for row in page.cells for cell in row}
    assert "day, cloudy" in page.text["text"]


@pytest.mark.usefixtures("undrawn")
def test_runs_that_are_not_finished_are_told(tmp_path):
    experiment = study({**A, "name": "a"}, MOMENTUM, seeds=[0, 1])
    folder.create(experiment, tmp_path)
    with pytest.raises(FedtideError, match="no run is finished yet; go on with: fedtide resume"):
        write_report([tmp_path])
    assert not (tmp_path / "report.html").exists()
    list(run_of(experiment, tmp_path, 0).play())
    list(run_of(experiment, tmp_path, 1).play(lambda: True))
    page = Page(write_report([tmp_path]).read_text(encoding="utf-8"))
    assert "Not finished and not counted: 1 of" in page.text["strong"]
    assert "momentum" not in page.text["dt"]


def test_nothing_is_written_where_one_of_several_folders_is_not_finished(root, tmp_path):
    shutil.copytree(root, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink(missing_ok=True)
    folder.create(study(), tmp_path / "new")
    with pytest.raises(FedtideError, match="no run is finished yet"):
        write_report([tmp_path / "run", tmp_path / "new"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


# -- sweeps ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_of_many_points_shows_all_in_a_table_and_the_chosen_in_sections(tmp_path):
    root = finished(tmp_path / "run", A, rounds=2, sweep={"method.local.lr": [0.001, 0.1, 0.2, 0.3, 1.0]})
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert [row[0] for row in page.cells[:6]] == ["point", *(f"lr {r}" for r in (0.001, 0.1, 0.2, 0.3, 1.0))]
    assert sum("← chosen" in cell for row in page.cells for cell in row) == 1
    (chosen,) = [row[0] for row in page.cells if any("← chosen" in cell for cell in row)]
    assert page.tags.count("section") == 1
    assert chosen in page.text["h2"]
    assert "chosen by validation rows, never by test rows" in page.text["p"]


# -- figures -----------------------------------------------------------------------------------------------------------


def test_no_two_methods_look_alike():
    looks = [figures.look(number) for number in range(16)]
    assert len({str(look) for look in looks}) == 16
    assert len({str(swatch(look)) for look in looks}) == 16
    assert len({look.color for look in looks}) == 8
    assert {look.marker for look in looks[8:]} == {"o"}


def test_early_accuracies_below_the_axis_are_told():
    axes = Figure().subplots()
    accuracies = np.array([0.1, 0.8, 0.81, 0.82])
    axes.plot(range(4), 100 * accuracies, label="A")
    figures.from_below(axes, [accuracies])
    assert axes.get_ylim()[0] == 76
    assert [text.get_text() for text in axes.texts] == ["▾ below this axis: early evaluations, down to 10.0 %"]
    figures.from_below(other := Figure().subplots(), [])
    assert not other.texts


def test_a_picture_says_its_numbers(text):
    told = re.findall("<desc>(.*?)</desc>", text)
    assert len(told) == 4
    assert re.search(r"A, steady: [0-9.]+ at 2, [0-9.]+ at 8, lowest [0-9.]+, highest [0-9.]+", told[0])


# -- contents, links, files --------------------------------------------------------------------------------------------


def test_every_entry_of_the_contents_leads_somewhere(text):
    page = Page(text)
    ids = [value for tag, name, value in page.attributes if name == "id" and tag in ("figure", "h2", "div")]
    there = {value[1:] for tag, name, value in page.attributes if (tag, name) == ("a", "href") and value[0] == "#"}
    assert len(set(ids)) == len(ids)
    assert there == set(ids)
    assert {"accuracy-over-rounds", "table-cost", "methods"} <= there


def test_pictures_and_tables_are_saved_as_files_and_on_the_page(root, tmp_path):
    page = Page(
        write_report([root], tmp_path / "page.html", pictures=tmp_path / "files", saved_tables=tmp_path / "files")
        .read_text(encoding="utf-8")
    )  # fmt: skip
    names = [value for tag, name, value in page.attributes if (tag, name) == ("a", "download")]
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href") and value[0] != "#"]
    saved = {path.name: path for path in (tmp_path / "files").iterdir()}
    assert saved.keys() - set(names) == {name.replace(".svg", ".pdf") for name in names if name.endswith(".svg")}
    for name, link in zip(names, links, strict=True):
        assert unquote(link.partition(",")[2]) == saved[name].read_text(encoding="utf-8")
    ElementTree.fromstring(saved["accuracy-over-rounds.svg"].read_text(encoding="utf-8"))
    assert saved["accuracy-over-rounds.pdf"].read_bytes().startswith(b"%PDF")
    assert saved["methods.csv"].read_text().startswith('method,"mean over the whole run, %"')
    assert saved["methods.tex"].read_text().startswith("\\begin{tabular}{lrrrrrrr}")


@pytest.mark.usefixtures("undrawn")
def test_a_nano_run_says_that_it_means_nothing_and_has_no_verdicts(tmp_path):
    claim = {"text": "A learns", "method": "A", "bound": 0.0}
    experiment = study(A, rounds=2, claim=[claim])
    for name, scale in (("small", "nano"), ("large", "cpu")):
        folder.create(experiment, tmp_path / name, scale=scale)
        assert execute(experiment, tmp_path / name, workers=1)
        text = write_report([tmp_path / name]).read_text(encoding="utf-8")
        assert ("its numbers mean nothing" in text) is (scale == "nano")
        assert (["claim", "found", "verdict"] in Page(text).cells) is (scale == "cpu")
        assert "A learns" in text


def test_figures_leave_no_trace_in_matplotlib(root):
    import matplotlib
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    (record,) = read_experiment(root)
    assert accuracy_over_rounds(record) == accuracy_over_rounds(record)
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == []


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_table_as_csv_and_latex():
    table = Table(
        ["method", "mean", "against A_1", "to clients"],
        [["A_1", "91.5 ± 0.2 %", "-", "2 MB"], ["5 & 6", "90.0 ± 1.0 %", "▼ -1.5 ± 0.4 points", "999 B"]],
    )
    assert table.csv().splitlines() == [
        'method,"mean, %","mean, standard error","against A_1, points","against A_1, standard error",to clients',
        "A_1,91.5,0.2,,,2 MB",
        "5 & 6,90.0,1.0,-1.5,0.4,999 B",
    ]
    assert table.latex().splitlines() == [
        r"\begin{tabular}{lrrr}", r"\toprule", r"method & mean & against A\_1 & to clients \\", r"\midrule",
        r"A\_1 & 91.5 $\pm$ 0.2 \% & -- & 2 MB \\",
        r"5 \& 6 & 90.0 $\pm$ 1.0 \% & $\blacktriangledown$ -1.5 $\pm$ 0.4 points & 999 B \\",
        r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_columns_of_words_are_aligned_to_the_left():
    table = Table(
        ["method", "averaged over", "time", "gain", "verdict", "nothing"],
        [["A", "the last round", "≥ 7.5 rounds", "▲ +1.0 points", "holds", "-"],
         ["B", "the last round", "-", "= -0.0 points", "-", ""]],
    )  # fmt: skip
    assert table.words == [True, True, False, False, True, False]
    assert table.latex().startswith(r"\begin{tabular}{llrrlr}")
