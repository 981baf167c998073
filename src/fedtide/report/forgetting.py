"""Measures of forgetting in one run: within a round, and over time."""

from __future__ import annotations

import math

from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.reading import ExperimentRecord, RunRecord


def local_forgetting(run: RunRecord) -> dict[str, float]:
    """Return the local client forgetting of a run, averaged over the measured rounds; empty if there are none.

    A round with nothing to compare (a single participant on its own rows) is left out.
    """
    lines = [line for line in run.forgetting if "skipped" not in line]
    if not lines:
        return {}
    known = [line for line in lines if line["known"]]
    return {
        "local_forgetting": mean_of_known(line["forgetting"]["mean"] for line in known),
        "local_forgetting_own": mean_of_known(line["forgetting"]["own"] for line in lines),
        "local_forgetting_apart": mean_of_known(line["forgetting"].get("apart") for line in known),
        "local_loss_increase": mean_of_known(line["loss_increase"]["mean"] for line in known),
    }


def over_time(record: ExperimentRecord, run: RunRecord) -> dict[str, float]:
    """Return the forgetting of groups that were away, over the last rounds (see `fedtide.evaluate.transfer`)."""
    transfer, window = run.transfer(record.view, record.groups), record.window
    if transfer is None:
        return {}
    back = [recovery.rounds for recovery in transfer.recoveries(window=window)]
    out = {
        "backward_transfer": transfer.backward(window),
        "forgetting": transfer.forgetting(window=window),
        **{f"forgetting_{group}": transfer.forgetting(k, window) for k, group in enumerate(record.groups)},
        "recovered": mean_of_known(math.isfinite(rounds) for rounds in back),
        "recovery_rounds": mean_of_known(rounds for rounds in back if math.isfinite(rounds)),
    }
    if run.labels is not None:
        out["forward_transfer"] = mean_of_known(transfer.forward(1 / run.labels["classes"]).tolist())
    return out
