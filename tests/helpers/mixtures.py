"""Experiments with mixtures, and what is on their pages."""

from __future__ import annotations

import re
from pathlib import Path

from fedtide.report.page import write_report
from helpers.pages import Page
from helpers.studies import A

FEW = {"lr": 0.05, "epochs": 2, "batch_size": 4, "optimizer": "adamw"}
MIXTURE = {
    **A, "name": "AEM", "algorithm": "aem",
    "mixture": {"gating": FEW, "solver": FEW},
}  # fmt: skip
STEADY = {"shift": {"who": "always"}, "rounds": 4}


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def shown(root: Path) -> set[str]:
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    return {value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")}
