"""What an open claim needs, and why another one does not hold."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.config import Claim
from fedtide.config.overrides import seed_list
from fedtide.evaluate.metrics import Measure

PAGES = Path(__file__).resolve().parents[2] / "pages"
BETTER = Claim(text="A is better", method="A", versus="B")


@pytest.fixture(scope="module")
def judging():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PAGES))
        import claims

        yield claims


@given(gap=st.floats(0.1, 9.9), error=st.floats(0.1, 5.0), seeds=st.integers(3, 12), way=st.sampled_from([-1, 1]))
def test_the_report_calls_as_many_seeds_clear_and_one_fewer_not(judging, gap, error, seeds, way):
    gap, error = round(way * gap, 1), round(error, 1)
    needed = judging.seeds_that_tell(BETTER, f"{gap:+.1f} ± {error:.1f} points", seeds)

    def clear(count: int) -> bool:  # of as many seeds with this mean and spread
        values = np.resize([1.0, -1.0], count)
        values = values - values.mean()
        values = gap / 100 + values / values.std(ddof=1) * error / 100 * seeds**0.5
        return Measure.of(values.tolist()).clarity(gap / 100) == "clear"

    assert needed == judging.MOST + 1 or clear(needed)
    assert needed == seeds + 1 or not clear(needed - 1)


def test_a_bound_a_unit_and_a_number_that_was_rounded_away(judging):
    close = Claim(text="close", method="A", versus="B", within=0.01)
    assert judging.seeds_that_tell(close, "+1.3 ± 0.6 points", 5) == judging.seeds_that_tell(
        BETTER, "+0.3 ± 0.6 points", 5
    )
    above = Claim(text="above", method="A", measure="share_correlation", bound=0.95)
    assert judging.seeds_that_tell(above, "0.97 ± 0.02 correlation", 5) == judging.seeds_that_tell(
        BETTER, "+2.0 ± 2.0 points", 5
    )
    for unknown in ("+0.0 ± 0.0 points", "-", "3 of 5 seeds arrive"):
        assert judging.seeds_that_tell(BETTER, unknown, 5) is None


def test_verdicts_that_are_open_say_what_would_tell(judging):
    claims = {BETTER.text: BETTER}
    assert judging.verdict_of([BETTER.text, "+1.2 ± 0.6 points", "not seen"], claims, 5).startswith("not seen (")
    assert "more than 100" in judging.verdict_of([BETTER.text, "+0.1 ± 0.6 points", "too few seeds"], claims, 5)
    for row in (["A is better", "+3.0 ± 0.6 points", "holds"], ["another", "+0.1 ± 0.6 points", "not seen"]):
        assert judging.verdict_of(row, claims, 5) == row[-1]


def test_claims_are_judged_by_first_and_fresh_seeds_together(judging):
    """One is clear with all seeds alone. Of another some seed never arrives, and a third one was not judged again."""
    names = [BETTER.text, "A is sooner", "A is new"]
    claims = {name: Claim(text=name, method="A", versus="B", measure="accuracy") for name in names}

    def result(values, *numbers):
        rows = [[name, *number] for name, number in zip(names, numbers, strict=False)]
        return {"points": [], "seeds": 2, "claims": {"rows": rows, "values": [values] * len(rows)}}

    late = "+2.0 ± 1.0 points; 1 and 2 of 2 seeds arrive", "not seen"
    first = result([0.01, 0.03], ("+2.0 ± 1.0 points", "too few seeds"), late, ("+2.0 ± 1.0 points", "too few seeds"))
    fresh = result([0.02, 0.02], ("+2.0 ± 0.0 points", "too few seeds"), late)
    table = judging.join_seeds(first, [fresh], claims)["claims"]
    assert table["joined"] == [True, False, False]
    assert [row[1:] for row in table["rows"]] == [
        ["+2.0 ± 0.4 points", "holds"],
        [*late],
        ["+2.0 ± 1.0 points", "too few seeds"],
    ]
    assert [pair and pair[1][1:] for pair in table["pairs"]] == [["+2.0 ± 0.0 points", "too few seeds"], [*late], None]
    added = result([0.05, 0.05], ("+5.0 ± 0.0 points", "too few seeds"), late)
    table = judging.join_seeds(first, [fresh, added], claims)["claims"]
    assert table["joined"] == [True, False, False]
    assert table["rows"][0][1] == "+3.0 ± 0.7 points"
    assert table["pairs"][0][1][1] == "+2.0 ± 0.0 points"


def test_no_seed_counts_twice():
    for path in sorted((PAGES / "results" / "added").glob("*.json")):
        seeds: list[int] = []
        for place in ("fresh", "added"):
            options = json.loads((PAGES / "results" / place / path.name).read_text(encoding="utf-8"))["options"]
            seeds += json.loads(seed_list(options[options.index("--seeds") + 1]))
        assert len(seeds) == len(set(seeds)), path.stem


def test_numbers_of_seeds_that_are_kept_give_the_rows_that_are_kept(of_pages):
    """But for those in which a seed never arrives, or methods are one run."""
    kept, judging = of_pages("recipes"), of_pages("claims")
    for path in sorted((PAGES / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        claims = judging.claims_of(kept.read_recipe(path.stem), result)
        for table in [part["claims"] for part in [*result["points"], result] if "values" in part["claims"]]:
            for row, values in zip(table["rows"], table["values"], strict=True):
                if row[0] in claims and "arrive" not in row[1] and row[-1] != judging.SAME:
                    assert judging.judge_claim(claims[row[0]], row, values, values) == row, path.stem


def test_every_claim_that_does_not_hold_has_a_reason_and_no_other(of_pages):
    kept, reasons = of_pages("recipes"), tomllib.loads((PAGES / "why.toml").read_text(encoding="utf-8"))
    for path in sorted((PAGES / "results").glob("*.json")):
        rows = kept.rows_of(kept.read_result(path.stem))
        wrong = {text for (_, text), row in rows.items() if row[-1] == kept.WRONG}
        assert set(reasons.pop(path.stem, {})) == wrong, path.stem
    assert not reasons
