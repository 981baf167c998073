"""What an open claim needs, and why another one does not hold."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.config import Claim
from fedtide.evaluate.metrics import Measure

DOCS = Path(__file__).resolve().parents[2] / "docs"
BETTER = Claim(text="A is better", method="A", versus="B")


@pytest.fixture(scope="module")
def telling():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        import telling

        yield telling


@given(gap=st.floats(0.1, 9.9), error=st.floats(0.1, 5.0), seeds=st.integers(3, 12), way=st.sampled_from([-1, 1]))
def test_the_report_calls_as_many_seeds_clear_and_one_fewer_not(telling, gap, error, seeds, way):
    gap, error = round(way * gap, 1), round(error, 1)
    needed = telling.seeds_that_tell(BETTER, f"{gap:+.1f} ± {error:.1f} points", seeds)

    def clear(count: int) -> bool:  # of as many seeds with this mean and spread
        values = np.resize([1.0, -1.0], count)
        values = values - values.mean()
        values = gap / 100 + values / values.std(ddof=1) * error / 100 * seeds**0.5
        return Measure.of(values.tolist()).clarity(gap / 100) == "clear"

    assert needed == telling.MOST + 1 or clear(needed)
    assert needed == seeds + 1 or not clear(needed - 1)


def test_a_bound_a_unit_and_a_number_that_was_rounded_away(telling):
    close = Claim(text="close", method="A", versus="B", within=0.01)
    assert telling.seeds_that_tell(close, "+1.3 ± 0.6 points", 5) == telling.seeds_that_tell(
        BETTER, "+0.3 ± 0.6 points", 5
    )
    above = Claim(text="above", method="A", measure="share_correlation", bound=0.95)
    assert telling.seeds_that_tell(above, "0.97 ± 0.02 correlation", 5) == telling.seeds_that_tell(
        BETTER, "+2.0 ± 2.0 points", 5
    )
    for unknown in ("+0.0 ± 0.0 points", "-", "3 of 5 seeds arrive"):
        assert telling.seeds_that_tell(BETTER, unknown, 5) is None


def test_verdicts_that_are_open_say_what_would_tell(telling):
    claims = {BETTER.text: BETTER}
    assert telling.verdict_of([BETTER.text, "+1.2 ± 0.6 points", "not seen"], claims, 5).startswith("not seen (")
    assert "more than 100" in telling.verdict_of([BETTER.text, "+0.1 ± 0.6 points", "too few seeds"], claims, 5)
    for row in (["A is better", "+3.0 ± 0.6 points", "holds"], ["another", "+0.1 ± 0.6 points", "not seen"]):
        assert telling.verdict_of(row, claims, 5) == row[-1]


def test_every_claim_that_does_not_hold_has_a_reason_and_no_other(telling):
    reasons = tomllib.loads((DOCS / "why.toml").read_text(encoding="utf-8"))
    for kept in sorted((DOCS / "results").glob("*.json")):
        result = json.loads(kept.read_text(encoding="utf-8"))
        tables = [part.get("claims", {"rows": []}) for part in [*result["points"], result]]
        wrong = {row[0] for table in tables for row in table["rows"] if row[-1] == "does not hold"}
        assert set(reasons.pop(kept.stem, {})) == wrong, kept.stem
    assert not reasons
