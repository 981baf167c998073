"""The report page: one file that opens offline, with figures, tables and everything that was configured."""

import re
import shutil
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.report.accuracy import accuracy_over_rounds
from fedtide.report.clusters import membership
from fedtide.report.narrative import setting
from fedtide.report.page import write_report
from fedtide.report.run_records import read_experiment
from fedtide.report.study import read_study
from fedtide.report.terminal import Screen, console, print_results
from fedtide.report.topics import PICTURES
from fedtide.runs import folder
from fedtide.runs.experiment import execute
from helpers import studies
from helpers.pages import Page
from helpers.studies import MOMENTUM, SCAFFOLD, STEADY, A, study


def finished(root: Path, *methods: dict, **changes) -> Path:
    return studies.finished(root, study(*methods, **changes))


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


def test_the_same_folder_gives_the_same_page(text, root):
    assert write_report([root]).read_text(encoding="utf-8") == text


# -- other experiments -------------------------------------------------------------------------------------------------

THREE_DOMAINS = {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "domains": 3}
NOBODY = {"held_out_clients": {"clients": 0}, "split": {"val": 0.0, "test": 0.0}}
CASES = {
    "one seed": {},
    "one group": {"shift": {"who": "always"}, "data": {"groups": {"by": "none"}}},
    "one round": {"rounds": 1},
    "nobody judged": {"data": NOBODY},
    "three groups": {"data": {"source": THREE_DOMAINS, "held_out_clients": {"clients": 3}}},
}


@pytest.mark.parametrize("case", CASES)
def test_any_experiment_has_a_page(tmp_path, case):
    root = finished(tmp_path / "run", A, **{"rounds": 4, **CASES[case]})
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert ("svg", "aria-label", "accuracy over rounds") in page.attributes
    assert "table" in page.tags


NAMES = [["<b>bold</b> & co", "quotes \"x\" 'y'", "100 % ^ {x}", "Ünïcödé"], ["_under", "$5", "$6 and $7", r"$\oops$"]]


@pytest.mark.parametrize("names", NAMES)
def test_methods_may_have_any_name(tmp_path, names):
    root = finished(tmp_path / "run", *[{**A, "name": name} for name in names], rounds=2)
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert [row[0] for row in page.cells[1 : 1 + len(names)]] == names
    assert "b" not in page.tags
    for name in names:
        assert name in page.text["text"].replace("\xa0", " "), f"{name} is missing in the legends"


LEGENDS = {
    "above": lambda axes: figures.legend_above(axes[0]),
    "narrow": lambda axes: figures.legend_above(axes[0], room=5.4),
    "small": lambda axes: figures.small_legend(axes[0]),
    "of the figure": lambda axes: figures.figure_legend(axes[0].figure, axes),
}


@pytest.mark.parametrize("count", [4, 20, 51])
@pytest.mark.parametrize("legend", LEGENDS)
@matplotlib.rc_context({**figures.STYLE, "figure.constrained_layout.use": True})
def test_a_legend_is_never_cut_and_leaves_panels_their_height(legend, count):
    figure = Figure(figsize=(6.4 if legend == "narrow" else 9.6, 4.6))
    axes = figure.subplots(2, 1, height_ratios=(3.0, 1.0))
    for number in range(count):
        axes[0].plot(
            [0, 1], [0, number], label=figures.label(f"FedAvg, {number} times the steps" + " more" * (number % 4))
        )
    LEGENDS[legend](axes)
    figures.svg(figure, "a picture")
    drawn = (figure.legends or [axes[0].get_legend()])[0].get_window_extent()
    assert 0 <= drawn.x0 < drawn.x1 <= figure.bbox.x1
    assert 0 <= drawn.y0 < drawn.y1 <= figure.bbox.y1
    high = [panel.get_window_extent().height / figure.dpi for panel in axes]
    assert min(high[0] / 2, high[1] / 0.6) > 1


def test_clusters_over_time_are_those_of_methods_that_have_some(tmp_path):
    """A fine-tuned model and IFCA of one cluster have one model for all, so that their panels would be of one color."""
    of_one = {**A, "name": "of one", "algorithm": "ifca", "clusters": 1}
    tuned = {**A, "name": "tuned", "transforms": ["fine-tuned"]}
    root = finished(tmp_path / "run", tuned, of_one, {**A, "name": "true groups", "algorithm": "oracle"}, rounds=2)
    (record,) = read_experiment(root)
    slots = {m.name: membership(m.runs[0], record.clustered, record.groups).slots for m in record.methods}
    assert {name: len(np.unique(slot)) for name, slot in slots.items()} == {
        "tuned (fine-tuned)": 1,
        "of one": 1,
        "true groups": 2,
    }
    assert [axes.get_title() for axes in PICTURES["clusters"](record).figure.axes] == ["true groups", ""]
    (alone,) = read_experiment(finished(tmp_path / "alone", tuned, of_one, rounds=2))
    assert PICTURES["clusters"](alone) is None


SWEEPS = [
    ({"method.local.lr": [0.1, 0.2]}, True, True),
    ({"method.local.lr": [0.1, 0.2]}, False, True),
    ({"shift.who": ["always", {"kind": "periodic", "period": 4.0}]}, True, False),
    ({"method.local.lr, data.split.test": [[0.1, 0.2], [0.2, 0.3]]}, False, False),
]


@pytest.mark.parametrize(("sweep", "judged", "choice"), SWEEPS)
def test_a_point_is_chosen_among_settings_and_never_among_worlds(tmp_path, undrawn, capsys, sweep, judged, choice):
    """Three methods at two points: the table of points has a row for each method."""
    splits = {} if judged else {"eval_splits": ["train_clients"]}
    root = finished(tmp_path / "run", A, MOMENTUM, SCAFFOLD, rounds=2, sweep=sweep, **splits)
    text, missing = write_report([root]).read_text(encoding="utf-8"), "no point was chosen"
    header, *rows = Page(text).cells[:4]
    assert (header[0], [row[0] for row in rows]) == ("method", ["A", "momentum", "scaffold"])
    marks = [sum("chosen" in cell for cell in row) for row in rows]
    assert marks == ([1, 1, 1] if choice and judged else [0, 0, 0])
    print_results(read_study(root), console())
    terminal = capsys.readouterr().out
    assert [missing in terminal, missing in text] == [choice and not judged] * 2
    assert ("chosen by validation rows" in text) == (choice and judged)


def test_a_partition_without_a_number_of_clients_has_the_number_of_judged_ones(tmp_path):
    natural = {"source": {"kind": "play-roles"}, "partition": "natural", "groups": {"by": "none"}}
    experiment = from_dict({"rounds": 1, "data": natural, "model": "lstm", "eval_clients": 5,
                            "shift": {"who": "always"}, "method": [A]})  # fmt: skip
    (record,) = read_experiment(studies.finished(tmp_path / "run", experiment))
    assert re.match(r"Clients of a simulation, of whom \d+ are judged; 1 seed", setting(record))


def test_a_report_says_who_lies(tmp_path):
    lying = from_dict({"rounds": 1, "liars": {"share": 0.25}, "shift": {"who": "always"}, "method": [A],
                       "data": {"partition": {"kind": "iid", "clients": 12}}, "model": "linear"})  # fmt: skip
    (record,) = read_experiment(studies.finished(tmp_path / "run", lying))
    assert "25 % of the clients lie (sign-flip, factor 1). " in setting(record)


def test_nothing_is_written_where_one_of_several_folders_is_not_finished(root, tmp_path):
    shutil.copytree(root, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink(missing_ok=True)
    folder.create(study(), tmp_path / "new")
    with pytest.raises(FedtideError, match="no run is finished yet"):
        write_report([tmp_path / "run", tmp_path / "new"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


# -- contents, links, files --------------------------------------------------------------------------------------------


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
    assert saved["methods.tex"].read_text().splitlines()[1] == "\\begin{tabular}{lrrrrrrr}"


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


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_screen_without_a_width_is_as_wide_as_most(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert Screen().width == 80
