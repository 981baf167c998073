"""The page of the league: its numbers by hand, on two worlds of two seeds."""

import pytest

PM = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"


@pytest.fixture
def page(of_pages):
    return of_pages("league")


def world(name, **values):
    mean = {method: sum(seeds.values()) / len(seeds) for method, seeds in values.items() if seeds}
    return {"point": f"title {name}", "values": values, "accuracy": mean, "error": dict.fromkeys(mean, 0.01)}


@pytest.fixture
def results(page):
    """B diverges with one seed of the second world; the oracle has no rank."""
    first = world("x", A={"0": 0.8, "1": 0.6}, B={"0": 0.7, "1": 0.65}, Oracle={"0": 0.9, "1": 0.9})
    second = world("y", A={"0": 0.5, "1": 0.5}, B={"0": 0.6}, Oracle={"0": 0.9, "1": 0.9})
    return page.League({"points": [first, second]})


def test_a_mean_rank_is_over_worlds_and_seeds_and_who_diverges_is_last(results):
    """Of A: first, second; second, first where B diverged: 1.5. Of B as much."""
    assert results.ranks == {"A": 1.5, "B": 1.5}
    assert results.names == ["A", "B", "Oracle"]


def test_a_difference_is_paired_by_seeds(results):
    """A less B: 10 and -5 points, mean 2.5, deviation 15 / sqrt 2, error 7.5; one common seed has no error."""
    gap = results.difference("A", "B", results.worlds[0])
    assert (gap.mean, gap.error) == pytest.approx((2.5, 7.5))
    assert not results.is_above("A", "B", results.worlds[0])
    assert results.difference("A", "B", results.worlds[1]).error is None


def test_a_cell_says_how_many_seeds_diverged(page, results):
    assert page.score(results.worlds[0], "A") == f"70.0{PM}1.0"
    assert page.score(results.worlds[1], "B") == f"60.0{PM}1.0 (diverged with 1 of 2 seeds)"


def test_the_best_that_cannot_be_told_apart(page, results):
    """In x A is 2.5 ± 7.5 ahead. In y B has one seed of two, so it wins nothing."""
    assert page.winners(results).splitlines() == [
        f"- **x**: A (70.0{PM}1.0). Not to be told from it: B.",
        f"- **y**: A (50.0{PM}1.0), before all others.",
    ]


@pytest.mark.parametrize(
    ("score", "expected"), [([0.5, 0.8, 0.4, 0.77], (0.8, 0.4, 0.77, 4)), ([0.5, 0.8, 0.4, 0.7], (0.8, 0.4, 0.7, None))]
)
def test_who_is_back_has_95_percent_of_what_it_had(page, score, expected):
    """0.95 of 0.8 is 0.76."""
    assert page.fall({"rounds": [2, 4, 6, 8], "score": score}, 4) == expected


def test_safe_forms_stand_first_beside_the_best_single_model(page, monkeypatch):
    """In x FedAvg is the best single model: the safe form is 10 and -5 points off, so 2.5 ± 7.5; the other is level."""
    first = world("x", **{"FedAvg": {"0": 0.7, "1": 0.65}, "FedProx": {"0": 0.1, "1": 0.1}, "FedAdam": {"0": 0.1},
                          "M": {"0": 0.7, "1": 0.65}, "M (safe)": {"0": 0.8, "1": 0.6}})  # fmt: skip
    monkeypatch.setattr(page, "read_result", lambda _recipe: {"points": [first]})
    assert page.beside_one_model("some").splitlines()[2:] == [
        "| best single model | FedAvg 67.5 |",
        f"| **M (safe)** | +2.5{PM}7.5 |",
        "| M | = |",
    ]
