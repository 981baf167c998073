"""Names that are markup, code or control characters somewhere: shown as they are, and never obeyed."""

import html
import random
from collections import Counter
from pathlib import Path

from fedtide.report import page
from helpers.shell import done, written
from helpers.studies import A

from .conftest import BATCH, limited

NAMES = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</title><b>", "A [/b]", "[red]x", "FedAvg [lr=0.1]",
    "{{7*7}}", "{% raw %}", "${x}", "%s%n", "\x1b[31mred", "a\rb", "tab\tbed", "two\nlines", "'; DROP TABLE runs", '"',
    "é\u202egnp.", "𝔣𝔢𝔡", "😀", "a" * 300, " ", "..", "../../up", "con", "-rf", "--help", "nan", "$\\alpha_1$",
    "x_{1}^2$", "_hidden", "&amp;", "]]>", "javascript:alert(1)", "a/b\\c", "=1+1",
    "@SUM(1)", "A\u200b", "\ufeffA", "a\u2028b",
]  # fmt: skip


def test_a_name_is_shown_as_it_is(seed, tmp_path, monkeypatch, capsys, tried: Counter[str]):
    for number in range(BATCH):
        folder = tmp_path / str(number)
        folder.mkdir()
        try_names(BATCH * seed + number, folder, monkeypatch, capsys, tried)


def try_names(seed: int, tmp_path: Path, monkeypatch, capsys, tried: Counter[str]) -> None:
    draw = random.Random(seed)
    name, title, tag = draw.sample(NAMES, 3)
    methods = [{**A, "name": name}, {**A, "name": "other"}]
    written(tmp_path / "study.toml", *methods, rounds=1, title=title, description=tag)
    monkeypatch.chdir(tmp_path)
    if seed % 40:  # pictures take seconds
        monkeypatch.setattr(page, "pictures_of", lambda *_: [])
    with limited():
        status = done("run", "study.toml", "--out", "x", "--workers", 1)
    out, err = capsys.readouterr()
    tried["hostile names"] += 1
    if status:
        assert status == 2, err
        assert err.count("\n") == 1, err
        tried["hostile names: refused in one line"] += 1
        assert sorted(path.name for path in tmp_path.parent.glob("*up*")) == []
        return
    text = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    for said in (name, title, tag):
        if "<" in said:
            assert said not in text.replace(html.escape(said), ""), f"{said!r} stands in the page as it is"
    if "7*7" in name + title + tag:
        assert "{{7*7}}" in html.unescape(text), "a name was run as a template"
    assert "\x1b[31m" not in out
