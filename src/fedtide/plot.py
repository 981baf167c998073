"""Pictures of a run as figures of matplotlib: of a run folder, or of what `ft.run` and `ft.results` return.

They are those of the report. Of a sweep each wants the name of a `point`. What a run has nothing of is refused with
what it would need.

>>> import fedtide as ft
>>> from fedtide.runs.simulate import Result
>>> ft.plot.accuracy(Result(None, [], [4, 8], [0.5, 0.75])).axes[0].get_xlabel()
'rounds done'
"""

from fedtide.report.plots import (
    accuracy,
    accuracy_of_all,
    accuracy_over_time,
    blend,
    branches,
    budget_spent,
    by_hour,
    client_losses,
    clients,
    clusters,
    drift,
    forgetting,
    forgetting_over_rounds,
    gate_weights,
    gate_weights_over_sweep,
    groups,
    labels,
    local_models,
    metrics,
    nodes_over_rounds,
    participants,
    period,
    rhythm,
    split_purity,
)

__all__ = [
    "accuracy", "accuracy_of_all", "accuracy_over_time", "blend", "branches", "budget_spent", "by_hour",
    "client_losses", "clients", "clusters", "drift", "forgetting", "forgetting_over_rounds", "gate_weights",
    "gate_weights_over_sweep", "groups", "labels", "local_models", "metrics", "nodes_over_rounds", "participants",
    "period", "rhythm", "split_purity",
]  # fmt: skip
