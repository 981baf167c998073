"""What a report shows of a blend of domains: pictures, tables, a warning, and nothing of it without a blend."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.report import figures, mixtures, narrative, tables
from fedtide.report.measures import check_measures, number, percent, points, signed_points, unit_of
from fedtide.report.page import write_report
from fedtide.report.reading import ExperimentRecord, read_experiment
from fedtide.report.summary import Measure, MethodSummary, Summary, summarize
from helpers.blended import BLEND, FLAT, SPLITTING
from helpers.mixtures import shown, texts
from helpers.pages import Page
from helpers.studies import A, finished, study
from helpers.toys import TOY

PICTURES = {"the blend that was learned", "how pure the split is", "training loss over clients"}
TABLES = {
    "Peaks and troughs", "Other ways to predict", "What was made of the blend", "How likely the inputs look",
    "Steadiness",
}  # fmt: skip
STILL = {**A, "name": "still", "shift": {"what": "static"}}
THREE = {**SPLITTING, "name": "three", "components": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    values = {**BLEND, "model": TOY["model"], "method": [A, SPLITTING, FLAT, THREE, STILL], "seeds": [0, 1]}
    return finished(tmp_path_factory.mktemp("blend") / "run", from_dict(values))


@pytest.fixture(scope="module")
def record(root) -> ExperimentRecord:
    (made,) = read_experiment(root)
    return made


@pytest.fixture(scope="module")
def summary(record) -> Summary:
    return summarize(record)


def changed(root: Path, to: Path, change, methods: str = "*") -> Path:
    """A copy of a run folder with its lines changed."""
    shutil.copytree(root, to)
    for path in to.glob(f"{methods}/*/rounds.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            change(line)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_the_blend_has_a_panel_for_every_method_that_learns_shares(record):
    found = texts(mixtures.blend_learned(record))
    assert {"splitting", "flat", "three", "day", "night", "as learned", "as it was", "rounds done"} <= set(found)
    assert {"A", "still"}.isdisjoint(found)
    assert "components of no domain" in found  # of three there is one too many


def test_many_cycles_have_panels_as_wide_as_the_page(record):
    def width(made: str) -> float:
        return float(re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)', made)[2])

    what = record.experiment.shift.what.__class__(cycles=10, samples=20)
    faster = record.experiment.model_copy(update={"shift": replace(record.experiment.shift, what=what)})
    methods = [replace(method, experiment=faster) for method in record.methods]
    assert width(mixtures.blend_learned(replace(record, methods=methods))) > width(mixtures.blend_learned(record))


def test_the_split_and_the_entropy_have_a_curve_for_every_method_that_tells_of_them(record):
    found = texts(mixtures.split_purity(record))
    assert {"splitting", "flat", "three", "all in one component", "posteriors, nats"} <= set(found)
    assert {"A", "still"}.isdisjoint(found)


def test_losses_have_a_curve_and_a_box_for_every_method(record):
    found = texts(mixtures.client_losses(record))
    assert all(found.count(name) == 2 for name in ("A", "splitting", "flat", "three", "still"))
    assert {"training loss of a client", "training loss of a client in the last cycle"} <= set(found)


def test_a_box_is_of_the_mean_quantiles_of_the_last_cycle(record):
    method = record.methods[0]
    assert mixtures.last_rounds(record, method) == 4
    assert mixtures.last_rounds(record, record.methods[-1]) == record.window
    lines = [line["client_loss"] for run in method.runs for line in run.lines[-6:]]
    got = mixtures.box(method.runs, 6)
    assert got["q50"] == pytest.approx(np.mean([line["q50"] for line in lines]))
    assert got["max"] == pytest.approx(np.mean([line["max"] for line in lines]))


def test_accuracy_stands_above_what_participants_hold(record):
    found = texts(figures.accuracy_over_rounds(record))
    assert {"day", "night", "rows held, %"} <= set(found)
    assert "participants, %" not in found


def test_a_shift_of_who_and_of_what_are_both_drawn(tmp_path):
    groups = {
        **BLEND["data"],
        "groups": {"by": "labels", "labels": [[0], [1, 2]]},
        "partition": {"kind": "iid", "clients": 6},
    }
    who = {**BLEND["shift"], "who": {"kind": "periodic", "period": 4}}
    values = {**BLEND, "data": groups, "shift": who, "model": TOY["model"], "method": [SPLITTING], "rounds": 4}
    folder = finished(tmp_path / "run", from_dict(values))
    (made,) = read_experiment(folder)
    found = texts(figures.accuracy_over_rounds(made))
    assert {"rows held, %", "participants, %"} <= set(found)
    assert any(title.startswith("held-out clients, ") for title in tables.density_table(made).header)


def test_without_a_blend_a_report_has_nothing_of_it(tmp_path):
    tem = {**A, "name": "FedTEM", "algorithm": "fedtem"}
    folder = finished(tmp_path / "run", study(A, tem))
    assert not PICTURES & shown(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert not any(f'>{title} <a class="anchor"' in page for title in TABLES)


def test_the_page_has_the_pictures_and_the_tables(root):
    assert shown(root) >= PICTURES
    page = (root / "report.html").read_text(encoding="utf-8")
    assert all(f'>{title} <a class="anchor"' in page for title in TABLES)


def test_domains_that_nobody_named_are_numbered(root, tmp_path):
    copied = changed(root, tmp_path / "run", lambda line: None)
    shutil.rmtree(copied / "shift")
    (again,) = read_experiment(copied)
    assert {"domain 1", "domain 2"} <= set(texts(mixtures.blend_learned(again)))


def test_shares_alone_are_drawn_without_a_split(root, tmp_path):
    (again,) = read_experiment(changed(root, tmp_path / "run", lambda line: line.pop("split", None)))
    assert {"splitting", "flat", "three"} <= set(texts(mixtures.blend_learned(again)))
    found = texts(mixtures.split_purity(again))
    assert "posteriors, nats" in found
    assert "all in one component" not in found


def test_a_folder_of_an_older_version_has_a_page(root, tmp_path):
    def older(line):
        for key in ("split", "domains", "client_loss"):
            line.pop(key, None)
        for view in line.get("scores", {}).values():
            for key in ("others", "density"):
                view.pop(key, None)

    copied = changed(root, tmp_path / "run", older)
    assert not PICTURES & shown(copied)


@pytest.mark.parametrize(("key", "wrong"), [
    ("domains", "much"), ("domains", [None]), ("split", [[1, 2], [3]]), ("split", [1]), ("client_loss", [1.0]),
    ("client_loss", {"min": 1.0}),
    ("client_loss", {"min": "low", "q25": 1, "q50": 1, "q75": 1, "max": 1}),
])  # fmt: skip
def test_a_damaged_line_is_named(root, tmp_path, key, wrong):
    copied = changed(root, tmp_path / "run", lambda line: line.update({key: wrong}), "splitting")
    with pytest.raises(FedtideError, match=rf"rounds.jsonl: line 1: damaged: '{key}' is of another kind"):
        write_report([copied])


@pytest.mark.parametrize("wrong", [{"others": [1.0]}, {"others": {"global": "good"}}, {"densities": 3.0}])
def test_damaged_scores_are_named(root, tmp_path, wrong):
    copied = changed(root, tmp_path / "run", lambda line: line["scores"]["held_out_clients"].update(wrong), "splitting")
    with pytest.raises(FedtideError, match="'others' or 'densities' is of another kind"):
        write_report([copied])


# -- measures and tables -----------------------------------------------------------------------------------------------

BLENDED = {
    "split_purity": percent, "fullest_component": percent, "share_error": points, "share_correlation": number,
    "posterior_entropy": number, "log_likelihood": number, "training_loss": number,
    "loss_spread": number, "peak_gain": signed_points,
    "trough_gain": signed_points, "accuracy_by_global": percent,
}  # fmt: skip


def test_measures_are_in_the_summary_and_have_units(summary):
    measures = {method.name: method.measures for method in summary.methods}
    assert set(BLENDED) <= set(measures["splitting"])
    assert set(BLENDED) & set(measures["A"]) == {"training_loss", "loss_spread", "peak_gain", "trough_gain"}
    assert set(BLENDED) & set(measures["still"]) == {"training_loss", "loss_spread"}
    assert {name: unit_of(name) for name in BLENDED} == BLENDED
    assert [name for own in measures.values() for name in own if unit_of(name) is None] == []


def test_the_other_way_is_the_same_where_it_is_the_same(summary):
    got = summary.method("splitting").measures
    assert got["accuracy_by_global"].values == got["accuracy"].values
    header, (first, *_) = (made := tables.ways_table(summary)).header, made.rows
    assert header == ["method", "as it predicts", "global", "class 0"]
    assert first == ["splitting", *[percent(got[name]) for name in ("accuracy", "accuracy", "accuracy_by_class 0")]]
    assert [row[0] for row in made.rows] == ["splitting", "flat", "three"]


def test_another_way_to_predict_may_be_claimed():
    claims = [{"text": "x", "method": "A", "measure": name} for name in BLENDED]
    check_measures(study(A, claim=claims))
    with pytest.raises(FedtideError, match="accuracy_by_<way to predict>"):
        check_measures(study(A, claim=[{"text": "x", "method": "A", "measure": "acuracy_by_global"}]))


def test_peaks_and_troughs_have_two_rows_for_every_method_with_cycles(record, summary):
    made = tables.peaks_table(record, summary)
    assert made.header == ["method", "last minus second", "cycle 1", "cycle 2", "cycle 3"]
    assert [row[0] for row in made.rows][:2] == ["A, peak", "A, trough"]
    assert len(made.rows) == 8
    curves = [run.accuracy("held_out_clients")[1] for run in record.methods[0].runs]
    peaks = [[values[part].max() for values in curves] for part in (slice(0, 4), slice(4, 8), slice(8, 12))]
    gain = [c - b for b, c in zip(*peaks[1:], strict=True)]
    assert made.rows[0][1:] == [signed_points(Measure.of(gain)), *(percent(Measure.of(peak)) for peak in peaks)]


def test_densities_have_a_column_for_every_view(record):
    made = tables.density_table(record)
    assert made.header == ["method", "training clients", "held-out clients", "validation rows"]
    assert [row[0] for row in made.rows] == ["splitting", "flat", "three"]


def test_tables_of_a_study_without_a_blend_are_none(tmp_path):
    folder = finished(tmp_path / "run", study(A, rounds=2))
    (made,) = read_experiment(folder)
    told = summarize(made)
    assert tables.peaks_table(made, told) is tables.ways_table(told) is None
    assert tables.measured(told, tables.BLEND) is tables.density_table(made) is None
    assert not made.blended


# -- a collapse --------------------------------------------------------------------------------------------------------


def card(*fullest: float) -> str:
    measures = {"accuracy": Measure.of([0.5] * len(fullest)), "fullest_component": Measure.of(list(fullest))}
    method = MethodSummary("M", "x", list(range(len(fullest))), 0, measures)
    return narrative.sentence(Summary("", "", 4, "train_clients", 4, None, [], [method]), method)


@pytest.mark.parametrize(("fullest", "said"), [
    ([0.96], "One of its components has nearly all training rows, of whatever domain: the mixture collapsed."),
    ([0.96, 0.99], "One of its components has nearly all training rows, of whatever domain: the mixture collapsed."),
    ([0.5, 0.99, 0.6], "In 1 of 3 seeds one of its components has nearly all training rows, of whatever domain"),
    ([0.95], None),
])  # fmt: skip
def test_a_component_that_has_all_rows_is_told(fullest, said):
    found = card(*fullest)
    assert said in found if said else "components" not in found
    assert "  " not in found


def test_the_card_of_a_collapsed_method_says_so(root):
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert page.text["dd"].count("the mixture collapsed") == 1
