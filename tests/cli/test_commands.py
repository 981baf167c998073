"""Every command, as a person types it."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files

import pytest

import fedtide
from fedtide.algorithms import REGISTRY
from fedtide.cli import commands
from fedtide.config import Data, Experiment, Method, read
from fedtide.config.keys import keys_of
from fedtide.config.schema import SHARED, options_model
from fedtide.data.partition import IID
from fedtide.data.sources import Gaussians
from fedtide.laws.every import LAWS, Verdict
from fedtide.models import MLP
from fedtide.runs import folder
from helpers.shell import contents, done, refused, written
from helpers.studies import MOMENTUM, A, lines_of, record_of, study

pytestmark = pytest.mark.usefixtures("here", "undrawn")


# -- about -------------------------------------------------------------------------------------------------------------


NAMES = [command.__name__.removeprefix("list_") for command in commands.OURS] + commands.OF_REAL_CLIENTS.split()


@pytest.mark.parametrize("command", NAMES)
def test_every_command_has_help_without_what_is_for_python(capsys, command):
    assert done(command, "--help") == 0
    out, err = capsys.readouterr()
    assert f"Usage: fedtide {command}" in out
    assert "In Python" not in out
    assert err == ""
    if function := getattr(fedtide.api, command, None):
        assert " ".join(function.__doc__.split()[:5]) in " ".join(out.split())


AT_ONCE = """
import sys
from fedtide.cli.commands import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit:
        print(*{"torch", "numpy", "scipy", "pydantic", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""


def test_what_needs_no_computing_does_not_wait_for_what_computes():
    commands = ["--help", "--version", "run --help", "recipes", "recipes demo", "runn", "run x --sede 1", "resume"]
    made = subprocess.run([sys.executable, "-c", AT_ONCE, *commands], capture_output=True, text=True, check=True)
    said = [line for line in made.stderr.splitlines() if not line.startswith("fedtide: ")]
    assert said == [""] * len(commands)
    assert made.stderr.count("fedtide: ") == 3


def test_every_name_of_the_package_is_found_where_it_is_first_used():
    assert [name for name in dir(fedtide) if getattr(fedtide, name) is None] == []
    assert fedtide.run is fedtide.api.run


def test_a_key_below_a_value_is_refused_in_words(capsys):
    assert done("keys", "data.partition.alpha.x") == 2
    assert "allowed: 'data.partition.alpha', which has no keys of its own" in capsys.readouterr().err


def test_the_keys(capsys):
    assert done("keys") == 0
    assert capsys.readouterr().out.startswith("the top of the file\n")
    assert done("keys", "data.partition") == 0
    out = capsys.readouterr().out
    assert 'data.partition = { kind = "dirichlet" }' in out
    assert re.search(r"^alpha +number, more than 0 +0\.5 +concentration", out, re.MULTILINE)
    assert done("keys", "data.partitoin") == 2
    assert "did you mean 'partition'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", REGISTRY)
def test_one_algorithm_is_told_with_all_of_its_keys(capsys, name):
    assert done("algorithms", name) == 0
    out = " ".join(capsys.readouterr().out.split())
    entry = REGISTRY[name]
    for said in (entry.sends, entry.sees, entry.keeps, *entry.exempt.values()):
        assert said in out
    assert "Keys of the tables: fedtide keys method." in out
    for key in keys_of(name):
        assert key.meaning, key.name
        assert key.name in out
    assert {key.name for key in keys_of(name)} == options_model(name).model_fields.keys() | SHARED | {"shift"}


def test_a_recipe_is_printed_as_it_is(capsys):
    assert done("recipes", "demo") == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["title"]
    assert printed == files("fedtide").joinpath("recipes/demo.toml").read_text(encoding="utf-8")


# -- run ---------------------------------------------------------------------------------------------------------------

LAYOUT = {
    "config.toml", "environment.json", "report.html", "summary.json", "shift/", "shift/0.safetensors", "a/", "a/0/",
    "a/0/rounds.jsonl", "a/0/timings.jsonl", "a/0/clients.csv", "a/0/checkpoints/", "a/0/checkpoints/00000002/",
    "a/0/checkpoints/00000002/checkpoint.json", "a/0/checkpoints/00000002/state.safetensors",
    "a/0/checkpoints/00000002/memory.safetensors",
}  # fmt: skip


def test_a_run_leaves_a_folder_with_everything_and_says_where_it_is(capsys, here):
    file = written(here / "study.toml", A, rounds=2)
    assert done("run", file) == 0
    out, err = capsys.readouterr()
    root = here / "runs" / "study"
    assert set(contents(root)) == LAYOUT
    assert err == ""
    assert f"report: {root / 'report.html'}" in out
    assert "A · seed 0: round 2/2, accuracy" in out
    assert re.search(r"^A +\d", out, re.MULTILINE)
    assert read(root / "config.toml") == read(file)


def test_what_is_found_is_json_and_words_go_to_the_standard_error(capsys, here, monkeypatch):
    assert done("run", written(here / "study.toml", A, rounds=1), "--out", "x", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    summary = json.loads((here / "x" / "summary.json").read_text())
    assert found == {"report": str(here / "x" / "report.html"), "folder": "x", "summary": summary}
    assert "run folder: x" in err
    assert re.search(r"^A +\d", err, re.MULTILINE)

    def said(*arguments, status=0):
        assert done(*arguments) == status
        out, err = capsys.readouterr()
        assert err == ""
        return out

    assert (
        said("resume", "x", "--quiet", "--workers", 1)
        == said("report", "x", "--quiet")
        == said("verify", "x", "--quiet")
    )
    assert json.loads(said("report", "x", "--quiet", "--json"))["folders"] == [{"folder": "x", "summary": summary}]
    assert json.loads(said("verify", "x", "--quiet", "--json")) == {
        "runs": [{"run": "A · seed 0", "rounds": 1, "wrong": None}]
    }
    laws = [Verdict(law, broken) for law, broken in zip(LAWS[:2], (None, "it does not"), strict=True)]
    monkeypatch.setattr("fedtide.laws.every.check", lambda *given: laws)
    (first, second) = json.loads(said("check", "mine:it", "--quiet", "--json", status=1))["laws"]
    assert (first["law"], first["broken"], second["broken"]) == (LAWS[0].name, None, "it does not")
    assert done("run", "none.toml", "--json", "--quiet") == 2
    assert capsys.readouterr() == ("", "fedtide: none.toml: no such file\n")


def test_options_change_the_experiment(here):
    written(here / "study.toml", A, MOMENTUM, scale={"nano": {"rounds": 2}, "cpu": {"rounds": 3}})
    assert done(
        "run", "study.toml", "--scale", "nano", "--seeds", "3,5", "--set", "method.local.lr=0.5", "--set",
        "method.A.local.lr=0.7", "--set", "title=a b", "--workers", 1, "--out", "x",
    ) == 0  # fmt: skip
    made = read(here / "x" / "config.toml")
    assert (made.rounds, made.seeds, made.title) == (2, (3, 5), "a b")
    assert [m.settings()["local"].lr for m in made.method] == [0.7, 0.5]
    assert [len(lines_of(here / "x" / m / s)) for m in ("a", "momentum") for s in "35"] == [2, 2, 2, 2]
    assert done("run", "study.toml", "--workers", 1, "--out", "y") == 0
    assert read(here / "y" / "config.toml").rounds == 3


def test_the_results_in_the_terminal_are_those_of_the_report(capsys, here):
    written(here / "study.toml", A, MOMENTUM, seeds=[0, 1], baseline="A", rounds=4)
    assert done("run", "study.toml", "--workers", 1, "--out", "x") == 0
    out = capsys.readouterr().out
    summary = json.loads((here / "x" / "summary.json").read_text())
    for method in summary["methods"]:
        accuracy = method["measures"]["accuracy"]
        assert f"{100 * accuracy['mean']:.1f} ± {100 * accuracy['error']:.1f} %" in out
    assert f"{100 * summary['paired'][0]['difference']['mean']:+.1f} ±" in out


# -- resume, report ----------------------------------------------------------------------------------------------------


def test_resuming_a_finished_run_plays_nothing_and_makes_the_report_again(capsys, here):
    written(here / "study.toml", A, rounds=2)
    done("run", "study.toml", "--out", "x")
    before = contents(here / "x")
    (here / "x" / "report.html").unlink()
    (here / "x" / "summary.json").unlink()
    capsys.readouterr()
    assert done("resume", "x") == 0
    assert "0 runs, 1 already finished" in capsys.readouterr().out
    assert contents(here / "x") == before


@pytest.mark.parametrize("changes", [{}, {"sweep": {"method.local.lr": [0.1, 0.2]}}], ids=["one", "sweep"])
def test_more_seeds_can_be_added_to_a_finished_study(capsys, here, changes):
    written(here / "study.toml", A, rounds=2, **changes)
    assert done("run", "study.toml", "--seeds", "4", "--out", "x", "--workers", 1) == 0
    assert done("run", "study.toml", "--seeds", "1,4", "--out", "y", "--workers", 1) == 0
    capsys.readouterr()
    assert done("resume", "x", "--seeds", "1,4", "--workers", 1) == 0
    points = 2 if changes else 1
    assert f"{points} run{'s' * (points > 1)}, {points} already finished" in capsys.readouterr().out
    assert record_of(here / "x") == record_of(here / "y")
    told = json.loads((here / "x" / "summary.json").read_text())
    assert [p["methods"][0]["seeds"] for p in told.get("points", [told])] == [[1, 4]] * points


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ("1,2", "--seeds: found '1,2', but x also has 4; allowed: its seeds and new ones"),
        ("4,-1", "seeds"),
        ("4,x", "seeds"),
    ],
)
def test_seeds_that_cannot_be_added(capsys, here, seeds, said):
    written(here / "study.toml", A, rounds=1)
    done("run", "study.toml", "--seeds", "4", "--out", "x", "--workers", 1)
    capsys.readouterr()
    assert said in refused(capsys, here, "resume", "x", "--seeds", seeds)


def test_a_report_is_made_again_or_elsewhere_or_of_several(capsys, here):
    written(here / "study.toml", A, rounds=1)
    for name in ("x", "y"):
        done("run", "study.toml", "--out", name)
    capsys.readouterr()
    assert done("report", "x") == 0
    assert capsys.readouterr().out.strip() == "report: x/report.html"
    assert done("report", "x", "--out", "page.html") == 0
    assert (here / "page.html").is_file()
    assert done("report", "x", "y") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report: report.html"
    assert (here / "report.html").is_file()


@pytest.mark.parametrize(("old", "new"), [
    ("rounds = 3", "average_last = 2\nrounds = 3"), ('title = ""', 'title = "Mine"'),
    ("[data]\n", '[data]\ndirectory = "elsewhere"\n'),
])  # fmt: skip
def test_a_report_is_made_after_a_change_that_decides_no_number(here, old, new):
    written(here / "study.toml", A, rounds=3)
    done("run", "study.toml", "--out", "x")
    config = here / "x" / "config.toml"
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, new))
    assert done("report", "x") == 0
    assert done("resume", "x") == 0
    window = json.loads((here / "x" / "summary.json").read_text())["window"]
    assert window == (2 if "average_last" in new else 3)


def test_a_folder_made_from_python_is_reported_and_gone_on_with(capsys, here):
    """Its experiment is put together by hand: what it leaves out is written out with its defaults."""
    made = Experiment(
        rounds=2, data=Data(source=Gaussians(samples=64, dims=4), partition=IID(clients=8)), model=MLP(hidden=(5,)),
        method=(Method(name="A", algorithm="fedavg", options={"cohort": {"kind": "arrivals", "clients_per_round": 4}}),
                Method(name="B", algorithm="fedprox", options={"cohort": 4, "local": {"lr": 0.5}})),
    )  # fmt: skip
    fedtide.run(made, here / "x", workers=1)
    before = record_of(here / "x")
    assert done("report", "x") == 0
    capsys.readouterr()
    assert done("resume", "x") == 0
    assert "0 runs, 2 already finished" in capsys.readouterr().out
    shutil.rmtree(here / "x" / "b" / "0")
    assert done("resume", "x", "--workers", 1) == 0
    assert record_of(here / "x") == before


# -- options that cannot be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "said"), [
    (["runn", "study.toml"], "runn"),
    (["run"], "experiment|EXPERIMENT|required"),
    (["run", "study.toml", "--workers", "0"], "--workers: found 0, allowed: 1 or more"),
    (["run", "study.toml", "--set", "rounds"], "--set: found 'rounds', allowed: key=value"),
    (["run", "study.toml", "--seeds", "a"], "--seeds: found 'a', allowed: whole numbers of 0 or more"),
    (["run", "study.toml", "more.toml"], "more.toml"),
    (["run", "nowhere.toml"], "nowhere.toml: no such file"),
    (["run", "recipe:dmo"], "recipe: found 'dmo', did you mean 'demo'"),
    (["run", "recipe:demo", "--scale", "paper"], "scale: found 'paper', allowed: "),
    (["resume", "nowhere"], r"nowhere: not a run folder \(there is none\)"),
    (["report"], "report|RUN-FOLDERS|required"),
    (["algorithms", "feilding"], "algorithms: found 'feilding', did you mean 'fielding'. Allowed: "),
])  # fmt: skip
def test_a_command_that_cannot_be_is_one_clear_line(capsys, here, arguments, said):
    written(here / "study.toml", A)
    assert re.search(said, refused(capsys, here, *arguments))


def test_the_report_of_a_run_without_a_finished_run_says_how_to_go_on(capsys, here):
    folder.create(study(), here / "x")
    assert "no run is finished yet; go on with: fedtide resume x" in refused(capsys, here, "report", "x")
