"""Tiny federations for tests: eight clients in two groups, four features, three classes."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any

from torch import nn

from fedtide.config import Experiment, from_dict
from fedtide.laws.toy import TOY, Played, played

PARTS = ("train", "val", "test")
"""Of the rows that a client holds in all."""

FEW = {"lr": 0.05, "epochs": 4, "batch_size": 4, "optimizer": "adamw"}
FAST = {"lr": 4.0, "batch_size": 4}
"""Steps that make a model worse now and then."""
MOMENTUM = {"kind": "sgd", "momentum": 0.5}
PRIORS = ("linear", "cosine", "block", "soft", "uniform", "em-only")
LINEAR = {"prior": {"kind": "linear", "period": 4}}
FEW_CLUSTERS = {"kind": "k-means", "k_max": 3, "n_init": 2}
ALWAYS = {"split_after": 1, "eps1": 1e9, "eps2": 0.0, "gamma": 0.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedtem": ("fedtem", LINEAR),
    "fedtkm": ("fedtkm", LINEAR),
    "scsgd": ("scsgd", LINEAR),
    "t-shot": ("t-shot", {"shots": 2}),
    **{
        f"fedtem {kind}": ("fedtem", {"prior": {"kind": kind} | ({} if kind in PRIORS[-2:] else {"period": 4})})
        for kind in PRIORS[1:]
    },
    "fedtem sample": ("fedtem", {**LINEAR, "selection": "sample"}),
    "fedtem bayes": ("fedtem", {**LINEAR, "selection": "bayes", "update": "overwrite", "variance": "total"}),
    "fedtem three": ("fedtem", {**LINEAR, "branches": 3, "consistent_only": False}),
    "fedtkm vote": (
        "fedtkm",
        {**LINEAR, "distance": "vote", "update": "certainty", "max_update_norm": 1.0, "rescale": True},
    ),
    "fedtkm three": ("fedtkm", {**LINEAR, "branches": 3, "eta_schedule": "constant"}),
    "scsgd half": ("scsgd", {"prior": {"kind": "block", "period": 4}, "lam": 0.0}),
    "scsgd whole": ("scsgd", {**LINEAR, "share_trunk": False}),
    "fedtem features of branches": (
        "fedtem",
        {**LINEAR, "feature": "branches", "update": {"kind": "certainty", "min_share": 0.7}},
    ),
    "min-loss members": ("min-loss", {"lam": 0.0, "branch_average": "members", "choose_per": "client"}),
    "fedprox by-size": ("fedprox", {"cohort": {"kind": "by-size", "clients_per_round": 3}}),
    "q-fedavg oort": (
        "q-fedavg",
        {"cohort": {"kind": "oort", "clients_per_round": 3, "pacer_step": 2, "exploration_factor": 0.5}},
    ),
    "fedbuff late": ("fedbuff", {"buffer": 2, "cohort": 3, "damping": 1.0, "mu": 0.1}),
    "fedprox stragglers": ("fedprox", {"local": {"lr": 0.1, "batch_size": 4, "epochs": 3}, "stragglers": 0.5}),
    "scaffold one wsm": ("scaffold", {"variant": "I", "weighting": "samples", "loss": "wsm"}),
    "fedavg wsm": ("fedavg", {"loss": "wsm"}),
    "fedavg by-size": ("fedavg", {"cohort": {"kind": "by-size", "clients_per_round": 4}}),
    "fedavg oort": (
        "fedavg",
        {"cohort": {"kind": "oort", "clients_per_round": 3, "pacer_step": 2, "exploration_factor": 0.5}},
    ),
    "fedavg nearest": ("fedavg", {"cohort": {"kind": "nearest", "clients_per_round": 3}}),
    "fedtem wsm": ("fedtem", {**LINEAR, "loss": {"kind": "wsm", "val": True}}),
    "ifca gradient": ("ifca", {"variant": "gradient", "start_noise": 0.1, "clusters": 3}),
    "ifca head": ("ifca", {"own_layer": "head", "clusters": 3, "variant": "gradient"}),
    "ifca hidden": ("ifca", {"hidden": True}),
    "ifca tries": ("ifca", {"starts": 3, "choose_on": "train", "divide": "participants", "server": "adam"}),
    "cfl": ("cfl", ALWAYS),
    "cfl complete": (
        "cfl",
        {**ALWAYS, "linkage": "complete", "weighting": "samples", "server": "adam", "update_ttl": 1},
    ),
    "cfl-released": ("cfl-released", {"split_after": 1, "eps1": 1e9, "eps2": 0.0}),
    "aem mixture": (
        "aem",
        {"clusters": 3, "decay": "power", "personal": {"kind": "mixture", "gating": FEW, "solver": FEW}},
    ),
    "aem tuned": ("aem", {"personal": {"kind": "mixture", "tune": True, "held": 0.3, "gating": FEW, "solver": FEW}}),
    "aem stops": (
        "aem",
        {"epsilon": 1.0, "patience": 1, "check_every": 2, "personal": {"kind": "fine-tuned", "solver": FEW}},
    ),
    "aem ensemble": ("aem", {"personal": {"kind": "ensemble", "of": "logits", "solver": FEW, "model": "linear"}}),
    "aem alone": ("aem", {"personal": {"kind": "alone", "solver": FEW}}),
    "fielding drifts": ("fielding", {"clustering": FEW_CLUSTERS, "trigger": {"kind": "fraction", "tau": 0.2}}),
    "fielding asked": ("fielding", {"clustering": FEW_CLUSTERS, "reporters": "participants"}),
    "fielding learned": (
        "fielding",
        {
            "trigger": {"kind": "learned", "explore": 2, "tried": [0.0, 0.9]},
            "cohort": {"kind": "by-size", "clients_per_round": 4},
        },
    ),
    "fielding gradient": (
        "fielding",
        {"representation": {"kind": "gradient", "at": "global", "sketch": 8}, "clustering": FEW_CLUSTERS, "mu": 0.1},
    ),
    "fielding oort": (
        "fielding",
        {
            "cohort": {"kind": "oort", "clients_per_round": 4, "pacer_step": 2, "exploration_factor": 0.5},
            "representation": {"kind": "labels", "malicious": 0.4},
        },
    ),
    "fielding combined": (
        "fielding",
        {
            "representation": {
                "kind": "combined",
                "parts": ["labels", {"kind": "embedding", "layer": "dense1"}, {"kind": "gradient", "sketch": 8}],
            },
            "clustering": FEW_CLUSTERS,
            "trigger": {"kind": "fraction", "tau": 0.2},
            "reassign_seconds": 0.5,
            "clustering_seconds": 2.0,
        },
    ),
    "fielding k-center": (
        "fielding",
        {"clustering": {"kind": "k-center", "k": 3}, "reassign": "all", "trigger": "adaptive"},
    ),
    "fielding static": (
        "fielding",
        {"clustering": FEW_CLUSTERS, "reporters": "once", "trigger": {"kind": "fraction", "tau": math.inf}},
    ),
    "fielding fair": (
        "fielding",
        {
            "q": 1.0,
            "server": "yogi",
            "clustering": FEW_CLUSTERS,
            "loss": "wsm",
            "drift_baseline": "last-clustering",
        },
    ),
    "pfedem": (
        "pfedem",
        {"features": {"kind": "network", "layer": "dense1"}, "gaussian_init": {"kind": "k-means++", "rounds": 2}},
    ),
    "pfedem head": (
        "pfedem",
        {
            "features": "network",
            "component_layer": "head",
            "gaussian_init": "random",
            "update": "overwrite",
            "em_steps": 2,
            "components": 3,
            "inference": "global",
        },
    ),
    "pfedem shares": ("pfedem", {"features": {"kind": "frozen", "seed": 3}, "keep_mixture": True, "update": "share"}),
    "pfedem pca": (
        "pfedem",
        {
            "features": {"kind": "pca", "width": 2},
            "gaussian_init": {"kind": "k-means++", "rounds": 2},
            "normalize_by": "participants",
        },
    ),
    "pfedem public": ("pfedem", {"features": {"kind": "pca", "width": 2}, "gaussian_init": "public", "components": 3}),
    "fedgmm pca": ("fedgmm", {"features": {"kind": "pca", "width": 2}, "components": 2}),
    "fedgmm": ("fedgmm", {"features": "network", "components": 2, "gaussians": 2}),
    "fedgmm head": (
        "fedgmm",
        {
            "features": {"kind": "frozen"},
            "components": 3,
            "component_layer": "head",
            "gaussian_init": "random",
            "em_steps": 2,
        },
    ),
    "flexcfl": ("flexcfl", {"clusters": 2, "pretrain": 5, "migrate": 0.0}),
    "flexcfl drifts": ("flexcfl", {"clusters": 2, "pretrain": 5, "migrate": 0.0}),
    "flexcfl few": (
        "flexcfl",
        {"clusters": 2, "alpha": 1, "pretrain": 3, "group_init": "same", "eta_g": 0.1, "mu": 0.1, "server": "adam"},
    ),
    "flexcfl still": ("flexcfl", {"clusters": 3, "pretrain": 5, "migrate": None, "weighting": "uniform"}),
    "auxo": (
        "auxo",
        {"split": {"kind": "rounds", "rounds": [1, 2]}, "min_participants": 2, "epsilon": 0.3, "update_fraction": 0.5},
    ),
    "auxo evidence": (
        "auxo",
        {
            "split": {"kind": "evidence", "min_fraction": 0.0},
            "min_participants": 2,
            "max_clusters": 3,
            "mu": 0.1,
            "server": "adam",
        },
    ),
    "feddrift": ("feddrift", {"rounds_per_step": 3, "delta": 0.0, "local": FAST}),
    "feddrift loss": (
        "feddrift",
        {
            "rounds_per_step": 1,
            "delta": 0.01,
            "criterion": "loss",
            "max_clusters": 3,
            "init_new_from": "start",
            "mu": 0.1,
            "local": FAST,
        },
    ),
    "feddrift window": (
        "feddrift",
        {
            "rounds_per_step": 1,
            "delta": 0.01,
            "variant": {"kind": "isolate", "merge": 0.1},
            "criterion": "loss",
            "window": 3,
            "server": MOMENTUM,
            "local": FAST,
        },
    ),
    "feddrift eager": ("feddrift", {"rounds_per_step": 2, "delta": 0.0, "variant": "eager", "local": FAST}),
    "fedem": ("fedem", {"components": 2, "component_layer": "head"}),
    "fedem whole": ("fedem", {"normalize_by": "everyone"}),
    "fedem wsm": ("fedem", {"loss": {"kind": "wsm", "smoothing": 0.1}}),
}
"""Algorithms as the laws meet them: with a period that fits, and with their options."""

RIVALS = {"flexcfl drifts", "auxo evidence", "feddrift loss", "feddrift window", "feddrift eager"}

DRIFTING = {name for name in VARIANTS if name.startswith("fielding ")} | RIVALS
"""Those that meet labels which change."""

PUBLIC = {"pfedem pca", "pfedem public", "fedgmm pca"}
"""Those that need public rows."""


def toy(algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy experiment with one method.

    Args:
        algorithm: registered name or module:function.
        options: of the method; local training and a cohort of four are given. A cohort that is a word is one of four.
        changes: top-level keys; tables are merged into the toy's.
    """
    values = copy.deepcopy(TOY)
    if algorithm in DRIFTING:
        values["shift"] = {**values["shift"], "how": {"kind": "label-swaps", "every": 2, "fraction": 0.5}}
    for key, value in changes.items():
        both = isinstance(values.get(key), dict) and isinstance(value, dict)
        values[key] = {**values[key], **value} if both else value
    if algorithm in PUBLIC:
        values["data"] = {"public_samples": 8, **values["data"]}
    algorithm, own = VARIANTS.get(algorithm, (algorithm, {}))
    options = {**own, **(options or {})}
    cohort = options.get("cohort", "uniform" if algorithm == "fielding" else 4)
    if isinstance(cohort, str) and cohort != "everyone":
        cohort = {"kind": cohort, "clients_per_round": 4}
    method = {"name": "toy", "algorithm": algorithm, "local": {"lr": 0.1, "batch_size": 4}, **options, "cohort": cohort}
    return from_dict({**values, "method": [method]})


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with BatchNorm."""
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes))


@lru_cache(maxsize=2)
def reference(name: str) -> Played:
    """The toy of a method played as it is, once for all tests of a method that only read it."""
    return played(toy(name))
