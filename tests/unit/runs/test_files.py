"""Files that a configuration names: looked for below the data directory, as sources are; what they hold is digested."""

import pytest
from safetensors.torch import save_file

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.runs.build import host_of, task_of
from fedtide.runs.digest import digest_of, digest_to_read
from fedtide.runs.folder import plan
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import Run
from helpers.studies import A, study

ALONE = {"groups": {"by": "none"}}
CHANGES = "client,round,concept\n0,2,night\n"


def net(path, seed=0) -> None:
    experiment = study(A)
    rows = host_of(experiment, experiment.method[0], 0).population.rows
    save_file(task_of(experiment, experiment.method[0], rows).init(Rng(seed)).params, path)


def named(kind: str, directory=None):
    """An experiment that names a file called `file`."""
    data = {**ALONE, **({} if directory is None else {"directory": str(directory)})}
    if kind == "changes":
        return study(A, data=data, shift={"who": "always", "what": {"kind": "change-points", "when": "file:file"}})
    if kind == "trace":
        return study(A, data=data, shift={"who": {"kind": "availability", "path": "file"}})
    options = {
        "init_from": {"init_from": "file"},
        "embedding": {"algorithm": "fielding", "representation": {"kind": "embedding", "weights": "file"}},
        "gradient": {
            "algorithm": "fielding",
            "representation": {"kind": "combined", "parts": ["labels", {"kind": "gradient", "weights": "file"}]},
        },
        "features": {"algorithm": "pfedem", "features": {"kind": "frozen", "weights": "file"}},
    }[kind]
    return study({**A, **options}, data=data, shift={"who": "always"})


def put(kind: str, path, seed: int = 0) -> None:
    if kind == "changes":
        path.write_text(CHANGES + f"1,{seed + 1},night\n")
    elif kind == "trace":
        path.write_text("client,start,end\n" + "".join(f"{c},0,{9 + seed}\n" for c in range(8)))
    else:
        net(path, seed)


KINDS = ["changes", "trace", "init_from", "embedding", "gradient", "features"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["data.directory", "FEDTIDE_DATA", "here"])
def test_a_file_is_found_as_those_of_sources_are(kind, where, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("FEDTIDE_DATA", raising=False)
    if where == "FEDTIDE_DATA":
        monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path / "there"))
    put(kind, tmp_path / ("here" if where == "here" else "there") / "file")
    experiment = named(kind, "../there" if where == "data.directory" else None)
    preflight(experiment)
    before = digest_of(experiment, experiment.method[0], 0)
    assert digest_of(experiment, experiment.method[0], 0) == before
    put(kind, tmp_path / ("here" if where == "here" else "there") / "file", seed=1)
    assert digest_of(experiment, experiment.method[0], 0) != before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_depends_on_is_the_content_and_not_the_folder(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        put(kind, tmp_path / folder / "file")
    one, two = (named(kind, tmp_path / folder) for folder in ("one", "two"))
    assert digest_of(one, one.method[0], 0) == digest_of(two, two.method[0], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_nowhere_is_one_line_with_every_place(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDTIDE_DATA", "/nowhere")
    with pytest.raises(FedtideError, match="no such file or folder: /elsewhere/file, /nowhere/file, file; ") as caught:
        preflight(named(kind, "/elsewhere"))
    assert "data.directory or FEDTIDE_DATA" in str(caught.value)


def test_a_method_waits_for_everybody_where_the_others_have_a_deadline():
    patient = {**A, "name": "B", "cohort": {"deadline": float("inf")}}
    hasty = {key: value for key, value in A.items() if key != "cohort"}
    defaults = {"cohort": {"kind": "uniform", "clients_per_round": 4, "deadline": 2.0}}
    experiment = study(hasty, patient, defaults=defaults, devices="log-normal")
    hosts = [host_of(experiment, method, 0) for method in experiment.method]
    assert [host.algorithm.traits.deadline for host in hosts] == [2.0, None]
    preflight(experiment)


@pytest.mark.parametrize(("options", "said"), [
    ({"representation": {"kind": "embedding", "width": 3}}, "representation.width: 3 needs public rows, found 0"),
    ({"representation": {"kind": "embedding", "layer": "hed"}}, "representation.layer: found 'hed'"),
    ({"representation": {"kind": "combined", "parts": ["labels", {"kind": "embedding", "layer": "hed"}]}},
     r"representation.parts\[1\].layer: found 'hed'"),
    ({"representation": {"kind": "combined", "parts": ["labels", {"kind": "embedding", "width": 3}]}},
     r"representation.parts\[1\].width: 3 needs public rows"),
])  # fmt: skip
def test_keys_of_representations_are_called_as_they_are_written(options, said):
    with pytest.raises(FedtideError, match=f"^method 'A'.{said}"):
        preflight(study({**A, "algorithm": "fielding", **options}))


@pytest.mark.parametrize("kind", ["changes", "init_from", "features"])
def test_a_file_that_changed_since_is_named_wherever_it_lies(kind, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        put(kind, tmp_path / folder / "file")
    one, two = (plan(named(kind, tmp_path / folder), tmp_path / "run")[0] for folder in ("one", "two"))
    assert digest_to_read(one) is None  # nothing is saved yet
    next(Run(one.experiment, one.method, one.seed, one.folder).play(lambda: True))
    assert digest_to_read(one) == digest_to_read(two)
    put(kind, tmp_path / "two" / "file", seed=1)
    assert digest_to_read(one)
    with pytest.raises(FedtideError, match=rf"{tmp_path}/two/file: has changed since {one.folder} was played; restore"):
        digest_to_read(two)
