"""The page of papers: every command is one that can be given."""

import json
from pathlib import Path

import pytest

from fedtide.config import points, read

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "src" / "fedtide" / "recipes"
FAMILIES = ("experts", "fedtem", "fielding", "ifca", "pfedem", "wsm")


@pytest.fixture
def papers(of_pages):
    return of_pages("papers")


def test_commands_can_be_given(papers):
    """They are read, with every point of their sweeps; the data need not be there."""
    rows = [row for paper in papers.contents() for row in paper["rows"]]
    commands = [papers.command(row, scale) for row in rows for scale in ("paper", "cpu")]
    commands += [[*papers.command(row, "paper"), *row["larger_sets"]] for row in rows if "larger_sets" in row]
    seen = {tuple(command) for command in commands if command}
    assert len(seen) > 60
    for _, verb, recipe, _, scale, *rest in sorted(seen):
        sets = rest[1::2]
        assert rest[::2] == ["--set"] * len(sets)
        experiment = read(RECIPES / f"{recipe.removeprefix('recipe:')}.toml", scale=scale, sets=sets)
        assert verb == "show" or verb == ("run" if experiment.tune is None else "tune")
        assert points(experiment)


def test_every_recipe_of_a_paper_has_a_row_and_a_row_says_how_it_stands(papers):
    rows = [row for paper in papers.contents() for row in paper["rows"]]
    named = {row[key] for row in rows for key in ("recipe", "cpu_recipe") if key in row}
    there = {path.stem for path in RECIPES.glob("*.toml")}
    assert named <= there
    assert {name for name in there if name.split("-")[0] in FAMILIES} - named == {"fedtem-rates"}
    assert all(row["item"] and row["covers"] for row in rows)
    items = [(paper["title"], row["item"]) for paper in papers.contents() for row in paper["rows"]]
    assert len(set(items)) == len(items)


def test_methods_that_a_command_spells_have_nothing_of_ours(papers):
    rows = [row for paper in papers.contents() for row in paper["rows"] if "paper" in row]
    spelled = [row for row in rows if row["paper"] and any(each.startswith("method=[") for each in row["paper"])]
    for row in spelled:
        recipe = RECIPES / f"{row['recipe']}.toml"
        experiment = read(recipe, scale="paper", sets=row["paper"][1::2])
        played = {method.settings()["local"].lr for method in read(recipe, scale="paper").method}
        if "defaults.local" not in " ".join(row["paper"]):
            assert {method.settings()["local"].lr for method in experiment.method} <= played, row["item"]
        for method in points(experiment)[0].experiment.method:
            options, said = method.settings(), f"{row['item']}: {method.name}"
            assert all(transform.kind == "shared" for transform in method.all_transforms), said
            if method.algorithm == "fielding":
                assert options["clustering"].min_silhouette == -1, said
            if method.algorithm == "fedtem":
                agrees = options["consistent_only"] and options["prior"].kind != "em-only"
                assert (options["update"].kind, agrees) == ("overwrite", False), said
            if method.algorithm == "fedtkm":
                assert (options["alpha"].kind, options["rescale"]) == ("integral", True), said
    assert len(spelled) > 10


def test_claims_on_forms_of_ours_say_nothing_of_a_paper(papers, tmp_path, monkeypatch):
    rows = [
        ["It gains", "+1", "holds"],
        ["It gains (our form)", "+2", "holds"],
        ["It helps (our claim)", "0", "not seen"],
    ]
    (tmp_path / "results").mkdir()
    kept = {"points": [{"point": "", "accuracy": {"A": 0.5}, "claims": {"rows": rows}}], "seeds": 5, "rounds": 4}
    (tmp_path / "results" / "one.json").write_text(json.dumps(kept), encoding="utf-8")
    monkeypatch.setattr("recipes.RESULTS", tmp_path / "results")
    monkeypatch.setattr("recipes.RECIPES", tmp_path)
    recipe = "rounds = 4\n[scale.cpu]\n[[method]]\nname = 'A'\n"
    recipe += "\n".join(f'[[claim]]\ntext = "{text}"' for text, *_ in rows)
    (tmp_path / "one.toml").write_text(recipe, encoding="utf-8")
    assert papers.verdicts_of({"item": "Figure 1", "recipe": "one"}) == "[holds: 1](recipes.md#one), 5 seeds"
    assert papers.verdicts_of({"item": "Ours: a form", "recipe": "one"}).startswith("[holds: 2, not seen: 1]")
    (tmp_path / "one.toml").write_text(f'{recipe}\n[[claim]]\ntext = "It lasts"', encoding="utf-8")
    assert papers.verdicts_of({"item": "Figure 1", "recipe": "one"}).endswith(
        ", 5 seeds, of an earlier form of the recipe"
    )


def test_results_of_other_claims_methods_rounds_or_points_are_old(papers):
    recipe = {
        "rounds": 4, "method": [{"name": "A"}, {"name": "B"}], "claim": [{"text": "better"}],
        "sweep": {"method.local.lr": [0.1, 0.3]}, "scale": {"cpu": {}},
    }  # fmt: skip
    claims = {"rows": [["better", "+1", "holds"]]}
    point = {"point": "", "accuracy": {"A": 0.5, "B": 0.5, "B, fine-tuned": 0.6}, "claims": claims}
    kept = {"points": [point, point], "rounds": 4}
    assert not papers.is_old(kept, recipe)
    assert papers.is_old(kept, {**recipe, "claim": []})
    assert papers.is_old(kept, {**recipe, "method": [*recipe["method"], {"name": "C"}]})
    assert papers.is_old(kept, {**recipe, "method": recipe["method"][:1]})
    longer = {**recipe, "method": [*recipe["method"], {"name": "A, twice the steps"}]}
    assert not papers.is_old(kept, longer)
    safe = {"point": "", "accuracy": {"A (safe)": 0.5, "B": 0.5}, "claims": claims}
    assert not papers.is_old({"points": [safe, safe], "rounds": 4}, recipe)
    assert papers.is_old(kept, {**longer, "claim": [{"text": "better", "versus": "A, twice the steps"}]})
    assert papers.is_old(kept, {**recipe, "scale": {"cpu": {"rounds": 8}}})
    assert papers.is_old(kept, {**recipe, "scale": {"cpu": {"sweep": {"method.local.lr": [0.1]}}}})


def test_hours_of_a_kept_run_are_those_of_its_workers(papers):
    kept = {"minutes": 30.0, "cores": 2}
    assert papers.spent_hours({**kept, "options": []}) == 1.0
    assert papers.spent_hours({**kept, "options": ["--workers", "1"]}) == 0.5


def test_samples_are_counted_by_hand(papers, of_pages):
    """60,000 pictures in four turns for 2,400 clients: a hundred each, ten epochs, 300 rounds, ten seeds."""
    hours = of_pages("hours")
    row = {"recipe": "ifca-recovery"}
    counted = [samples for _, samples in hours.passes(papers.experiment_of(row))]
    one = 2400 * 100 * 10 * 300 * 10
    assert counted[0] == one
    assert counted[1] == pytest.approx(one + 2400 * 100 * 4 / 3 * 300 * 10)  # IFCA looks at four models, forward
