"""A study of texts of three offices, with a file of texts for each, on a tiny pretrained base."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedtide.config import read
from fedtide.site.deploying import make_site
from fedtide.site.site import Roster, Site
from helpers.language import save

NAMES = ("berlin", "lyon", "oslo")
TOPICS = {"sky": ("sun", "moon"), "time": ("day", "night"), "talk": ("good", "bye")}
LOCAL = {"lr": 0.1, "batch_size": 4, "optimizer": "adamw"}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": "fedavg"},
    "FedTEM": {"algorithm": "fedtem", "branch_layer": "*", "prior": {"kind": "linear", "period": 4}},
}


def offices(folder: Path, head: str = "classification", texts: int = 24, **changes: Any) -> Path:
    """Write a study, its base, and files of texts: of the pilot, and CSV, JSON lines and CSV of the offices.

    Args:
        folder: where all is written.
        head: of the model.
        texts: number of texts of each file.
        changes: other tables of the study.
    """
    draw = np.random.default_rng(0)
    for number, name in enumerate(("pilot", *NAMES)):
        lines = []
        for text in range(texts):
            topic = [*TOPICS][text % 3]
            words = [*draw.choice(TOPICS[topic], 2), *draw.choice(("is", "up", "a", "b")[number:], 2)]
            lines.append({"text": " ".join(words), "topic": topic, "shift": "early" if text % 2 else "late"})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows = "".join(f"{line['text']},{line['topic']},{line['shift']},c{k % 5}\n" for k, line in enumerate(lines))
        (folder / f"{name}.csv").write_text("text,topic,shift,office\n" + rows)
    model = save(folder / "model", "llama" if head == "next-token" else "bert")
    label = {} if head == "next-token" else {"label": "topic"}
    source = {"kind": "texts", "path": str(folder / "pilot.csv"), "tokenizer": str(model), "context": 6, **label}
    adapters = {"kind": "lora", "rank": 2, "targets": ["q_proj"] if head == "next-token" else ["query", "value"]}
    study = {
        "title": "Three offices",
        "rounds": 3,
        "eval_every": 2,
        "shift": {"who": "always"},
        "data": {"source": source | {"client": "office", "domain": "shift"}, "groups": "none"},
        "model": {"kind": "transformer", "path": str(model), "head": head, "adapters": adapters},
        "method": [{"name": name, "cohort": 3, "local": LOCAL, **options} for name, options in METHODS.items()],
    }
    (folder / "study.toml").write_text(tomli_w.dumps(study | changes))
    return folder / "study.toml"


def site_of(folder: Path, played: str = "FedAvg", head: str = "classification", **changes: Any) -> Site:
    study = read(offices(folder, head, **changes))
    return make_site(study, played, Roster.of(",".join(NAMES)), folder / "site", None, "study.toml")
