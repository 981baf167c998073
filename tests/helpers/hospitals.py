"""A study of three hospitals with files of rows, as real clients would have them."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

NAMES = ("berlin", "lyon", "oslo")
COLUMNS = ("pulse", "age", "weight")
CLASSES = ("calm", "ill", "well")

STUDY: dict[str, Any] = {
    "title": "Three hospitals",
    "rounds": 4,
    "eval_every": 2,
    "data": {"source": {"kind": "csv", "path": "pilot.csv", "client": "hospital"}},
    "shift": {"who": "always"},
    "model": {"kind": "mlp", "hidden": [5]},
    "method": [
        {"name": "FedAvg", "algorithm": "fedavg", "cohort": 3, "local": {"lr": 0.1, "batch_size": 20}},
        {"name": "SCAFFOLD", "algorithm": "scaffold", "cohort": 3, "local": {"lr": 0.1, "batch_size": 20}},
    ],
}


def hospitals(folder: Path, rows: int = 60, **changes: Any) -> Path:
    """Write the study, its pilot rows and a file of rows for each hospital; return the study's file."""
    draw = np.random.default_rng(0)
    for number, name in enumerate(("pilot", *NAMES)):
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow([*COLUMNS, "label", "hospital"])
            for row in range(rows):
                kind = row % len(CLASSES)
                x = draw.normal(size=3) + 2 * np.eye(3)[kind] + 0.3 * number
                lines.writerow([*(round(float(value), 4) for value in x), CLASSES[kind], f"h{row % 5}"])
    study = folder / "study.toml"
    source = STUDY["data"]["source"] | {"path": str(folder / "pilot.csv")}
    study.write_text(tomli_w.dumps({**STUDY, "data": {"source": source}, **changes}), encoding="utf-8")
    return study
