"""The registry of algorithms: for each what it sends, what the server sees of a client, and what clients keep.

>>> import fedtide as ft
>>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
>>> ft.algorithms.fedprox(task, mu=0.1).name
'fedprox'
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from fedtide.algorithms.aem import aem
from fedtide.algorithms.auxo import auxo
from fedtide.algorithms.cfl import cfl
from fedtide.algorithms.cfl_released import cfl_released
from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedbuff import fedbuff
from fedtide.algorithms.feddrift import feddrift
from fedtide.algorithms.fedem import fedem
from fedtide.algorithms.fedgmm import fedgmm
from fedtide.algorithms.fedprox import fedprox
from fedtide.algorithms.fedsgd import fedsgd
from fedtide.algorithms.fedtem import fedtem
from fedtide.algorithms.fedtkm import fedtkm
from fedtide.algorithms.fielding import fielding
from fedtide.algorithms.flexcfl import flexcfl
from fedtide.algorithms.ifca import ifca
from fedtide.algorithms.minloss import minloss
from fedtide.algorithms.oracle import oracle
from fedtide.algorithms.pfedem import pfedem
from fedtide.algorithms.qfedavg import qfedavg
from fedtide.algorithms.scaffold import scaffold
from fedtide.algorithms.scsgd import scsgd
from fedtide.algorithms.tshot import tshot
from fedtide.algorithms.vanilla import vanilla
from fedtide.core.types import Algorithm
from fedtide.learn.server import SGD, Adagrad, Adam, Yogi

SELECTED = "sums only, or what its cohort asks"

# Options shared by several variants.
DRIFT = {"shift": {"how": {"kind": "label-swaps", "every": 2, "fraction": 0.5}}}
PUBLIC = {"data": {"public_samples": 8}}
FEW = {"lr": 0.05, "epochs": 4, "batch_size": 4, "optimizer": "adamw"}
FAST = {"lr": 4.0, "batch_size": 4}
MOMENTUM = {"kind": "sgd", "momentum": 0.5}
LINEAR = {"prior": {"kind": "linear", "period": 4}}
ALWAYS = {"split_after": 1, "eps1": 1e9, "eps2": 0.0, "gamma": 0.0}
FEW_CLUSTERS = {"kind": "k-means", "k_max": 3, "n_init": 2}


@dataclass(frozen=True)
class Entry:
    """An algorithm in the registry.

    Args:
        make: builds an Algorithm from a task and ingredients; its signature is the algorithm's configuration.
        sends: payloads down and up, in a few words.
        sees: values of a single client that the server sees.
        keeps: memory of a client between rounds.
        exempt: laws that cannot hold for the algorithm, each with the reason.
        variants: options that the laws are tested with, by name. The name "" has those that the algorithm needs to show
            its effect within six rounds of a short period. Tables `shift` and `data` are merged into the experiment's.
    """

    make: Callable[..., Algorithm]
    sends: str
    sees: str = "sums only"
    keeps: str = "nothing"
    exempt: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def preset(name: str, make: Callable[..., Algorithm], summary: str, **defaults: Any) -> Callable[..., Algorithm]:
    """Build an algorithm's function from another one by changing defaults.

    Its docstring goes on with that of the first new default, whose module says where the preset is from.

    Args:
        name: of the algorithm.
        make: builds an Algorithm from a task and ingredients.
        summary: first line of the docstring.
        defaults: ingredients that replace defaults of `make`.
    """
    parameters = inspect.signature(make).parameters.values()
    signature = inspect.Signature([p.replace(default=defaults.get(p.name, p.default)) for p in parameters])
    kind = type(next(iter(defaults.values())))

    @wraps(make)
    def made(*given: Any, **options: Any) -> Algorithm:
        bound = signature.bind(*given, **options)
        bound.apply_defaults()
        return replace(make(*bound.args, **bound.kwargs), name=name)

    rule, rest = inspect.getdoc(kind) or "", inspect.getdoc(make) or ""
    made.__doc__ = "\n\n".join([summary, rule.partition("\n\nArgs:")[0], rest.partition("\n\n")[2]])
    made.__module__ = kind.__module__
    made.__name__ = made.__qualname__ = name
    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


REGISTRY: Mapping[str, Entry] = {
    "fedavg": Entry(
        fedavg,
        "weights down, update up",
        sees=SELECTED,
        variants={
            "wsm": {"loss": "wsm"},
            "by-size": {"cohort": {"kind": "by-size", "clients_per_round": 4}},
            "oort": {"cohort": {"kind": "oort", "clients_per_round": 3, "pacer_step": 2, "exploration_factor": 0.5}},
            "nearest": {"cohort": {"kind": "nearest", "clients_per_round": 3}},
        },
    ),
    "fedsgd": Entry(fedsgd, "weights down, gradient step up"),
    "fedprox": Entry(
        fedprox,
        "weights down, update up",
        sees=SELECTED,
        variants={
            "by-size": {"cohort": {"kind": "by-size", "clients_per_round": 3}},
        },
    ),
    "fedavgm": Entry(
        preset("fedavgm", fedavg, "FedAvg with momentum on the server.", server=SGD(momentum=0.9)),
        "weights down, update up",
        sees=SELECTED,
    ),
    "fedadagrad": Entry(
        preset("fedadagrad", fedavg, "FedAvg with Adagrad on the server.", server=Adagrad()),
        "weights down, update up",
        sees=SELECTED,
    ),
    "fedadam": Entry(
        preset("fedadam", fedavg, "FedAvg with Adam on the server, in the paper's form or Keras'.", server=Adam()),
        "weights down, update up",
        sees=SELECTED,
    ),
    "fedyogi": Entry(
        preset("fedyogi", fedavg, "FedAvg with Yogi on the server.", server=Yogi()),
        "weights down, update up",
        sees=SELECTED,
    ),
    "q-fedavg": Entry(
        qfedavg,
        "weights down, update and one number up",
        sees=SELECTED,
        variants={
            "oort": {"cohort": {"kind": "oort", "clients_per_round": 3, "pacer_step": 2, "exploration_factor": 0.5}}
        },
    ),
    "scaffold": Entry(
        scaffold,
        "weights and control variate down, updates of both up",
        keeps="its control variate, as large as the weights",
        variants={"one wsm": {"variant": "I", "weighting": "samples", "loss": "wsm"}},
    ),
    "fedbuff": Entry(
        fedbuff,
        "weights down, update up; the server steps when K have answered",
        sees="sums for each age of the model that they began from",
        variants={"late": {"buffer": 2, "cohort": 3, "damping": 1.0, "mu": 0.1}},
    ),
    "vanilla": Entry(vanilla, "weights down, update up"),
    "fedtem": Entry(
        fedtem,
        "weights and mixture down, update up",
        sees="mean posterior, log-odds, feature mean and variance, rows",
        variants={
            "": LINEAR,
            "cosine": {"prior": {"kind": "cosine", "period": 4}},
            "block": {"prior": {"kind": "block", "period": 4}},
            "soft": {"prior": {"kind": "soft", "period": 4}},
            "uniform": {"prior": "uniform"},
            "em-only": {"prior": "em-only"},
            "sample": {**LINEAR, "selection": "sample"},
            "bayes": {**LINEAR, "selection": "bayes", "update": "overwrite", "variance": "total"},
            "three": {**LINEAR, "branches": 3, "consistent_only": False},
            "features of branches": {
                **LINEAR,
                "feature": "branches",
                "update": {"kind": "certainty", "min_share": 0.7},
            },
            "wsm": {**LINEAR, "loss": {"kind": "wsm", "val": True}},
        },
    ),
    "fedtkm": Entry(
        fedtkm,
        "weights and centers down, update, feature means and counts up",
        variants={
            "": LINEAR,
            "vote": {**LINEAR, "distance": "vote", "update": "certainty", "max_update_norm": 1.0, "rescale": True},
            "three": {**LINEAR, "branches": 3, "eta_schedule": "constant"},
        },
    ),
    "min-loss": Entry(
        minloss,
        "weights down, update and branch up",
        variants={"members": {"lam": 0.0, "branch_average": "members", "choose_per": "client"}},
    ),
    "scsgd": Entry(
        scsgd,
        "weights down, update up",
        variants={
            "": LINEAR,
            "half": {"prior": {"kind": "block", "period": 4}, "lam": 0.0},
            "whole": {**LINEAR, "share_trunk": False},
        },
    ),
    "t-shot": Entry(
        tshot,
        "weights and centers down, update and branch up",
        sees="centers of its raw inputs and their counts",
        variants={"": {"shots": 2}},
    ),
    "fedem": Entry(
        fedem,
        "K models down, the updates of all up",
        keeps="its blend",
        variants={
            "": {"components": 2, "component_layer": "head"},
            "whole": {"normalize_by": "everyone"},
            "wsm": {"loss": {"kind": "wsm", "smoothing": 0.1}},
        },
    ),
    "fedgmm": Entry(
        fedgmm,
        "K models and Gaussians down, updates of all up",
        sees="sums; at the start centers of its features too",
        keeps="its blend",
        variants={
            "pca": {"features": {"kind": "pca", "width": 2}, "components": 2, **PUBLIC},
            "": {"features": "network", "components": 2, "gaussians": 2},
            "head": {
                "features": {"kind": "frozen"},
                "components": 3,
                "component_layer": "head",
                "gaussian_init": "random",
                "em_steps": 2,
            },
        },
    ),
    "pfedem": Entry(
        pfedem,
        "K models and Gaussians down, updates of some up",
        sees="sums; at the start centers of its features too",
        keeps="nothing, or its shares",
        variants={
            "": {
                "features": {"kind": "network", "layer": "dense1"},
                "gaussian_init": {"kind": "k-means++", "rounds": 2},
            },
            "head": {
                "features": "network",
                "component_layer": "head",
                "gaussian_init": "random",
                "update": "overwrite",
                "em_steps": 2,
                "components": 3,
                "inference": "global",
            },
            "shares": {"features": {"kind": "frozen", "seed": 3}, "keep_mixture": True, "update": "share"},
            "pca": {
                "features": {"kind": "pca", "width": 2},
                "gaussian_init": {"kind": "k-means++", "rounds": 2},
                "normalize_by": "participants",
                **PUBLIC,
            },
            "public": {"features": {"kind": "pca", "width": 2}, "gaussian_init": "public", "components": 3, **PUBLIC},
        },
    ),
    "aem": Entry(
        aem,
        "J models down, the update of one up",
        sees="which model it trained, unless hidden",
        keeps="nothing; what it makes for itself stays with it",
        variants={
            "mixture": {"clusters": 3, "decay": "power", "personal": {"kind": "mixture", "gating": FEW, "solver": FEW}},
            "tuned": {"personal": {"kind": "mixture", "tune": True, "held": 0.3, "gating": FEW, "solver": FEW}},
            "stops": {
                "epsilon": 1.0,
                "patience": 1,
                "check_every": 2,
                "personal": {"kind": "fine-tuned", "solver": FEW},
            },
            "ensemble": {"personal": {"kind": "ensemble", "of": "logits", "solver": FEW, "model": "linear"}},
            "alone": {"personal": {"kind": "alone", "solver": FEW}},
        },
    ),
    "cfl": Entry(
        cfl,
        "weights of a cluster down, update up",
        sees="its update and what it counts for",
        variants={
            "": ALWAYS,
            "complete": {**ALWAYS, "linkage": "complete", "weighting": "samples", "server": "adam", "update_ttl": 1},
        },
    ),
    "cfl-released": Entry(
        cfl_released,
        "weights of a cluster down, update up",
        sees="its update and what it counts for",
        exempt={"cover": "its fault: places within a cluster are taken for clients"},
        variants={"": {"split_after": 1, "eps1": 1e9, "eps2": 0.0}},
    ),
    "fielding": Entry(
        fielding,
        "a cluster's model down, its update up",
        sees="its representation, whenever it drifts",
        keeps="what it said last",
        variants={
            "drifts": {"clustering": FEW_CLUSTERS, "trigger": {"kind": "fraction", "tau": 0.2}, **DRIFT},
            "asked": {"clustering": FEW_CLUSTERS, "reporters": "participants", **DRIFT},
            "learned": {
                "trigger": {"kind": "learned", "explore": 2, "tried": [0.0, 0.9]},
                "cohort": {"kind": "by-size", "clients_per_round": 4},
                **DRIFT,
            },
            "gradient": {
                "representation": {"kind": "gradient", "at": "global", "sketch": 8},
                "clustering": FEW_CLUSTERS,
                "mu": 0.1,
                **DRIFT,
            },
            "oort": {
                "cohort": {"kind": "oort", "clients_per_round": 4, "pacer_step": 2, "exploration_factor": 0.5},
                "representation": {"kind": "labels", "malicious": 0.4},
                **DRIFT,
            },
            "combined": {
                "representation": {
                    "kind": "combined",
                    "parts": ["labels", {"kind": "embedding", "layer": "dense1"}, {"kind": "gradient", "sketch": 8}],
                },
                "clustering": FEW_CLUSTERS,
                "trigger": {"kind": "fraction", "tau": 0.2},
                "reassign_seconds": 0.5,
                "clustering_seconds": 2.0,
                **DRIFT,
            },
            "k-center": {"clustering": {"kind": "k-center", "k": 3}, "reassign": "all", "trigger": "adaptive", **DRIFT},
            "static": {
                "clustering": FEW_CLUSTERS,
                "reporters": "once",
                "trigger": {"kind": "fraction", "tau": math.inf},
                **DRIFT,
            },
            "fair": {
                "q": 1.0,
                "server": "yogi",
                "clustering": FEW_CLUSTERS,
                "loss": "wsm",
                "drift_baseline": "last-clustering",
                **DRIFT,
            },
        },
    ),
    "ifca": Entry(
        ifca,
        "K models down, the update of one up",
        sees="which model it trained, unless hidden",
        variants={
            "gradient": {"variant": "gradient", "init_noise": 0.1, "clusters": 3},
            "head": {"cluster_layer": "head", "clusters": 3, "variant": "gradient"},
            "hidden": {"hide_choice": True},
            "tries": {"n_init": 3, "choose_on": "train", "normalize_by": "participants", "server": "adam"},
        },
    ),
    "flexcfl": Entry(
        flexcfl,
        "weights of a group down, update up",
        sees="its group, the update that it was grouped by, how far its labels moved",
        keeps="its label shares of then",
        variants={
            "": {"clusters": 2, "pretrain": 5, "migrate": 0.0},
            "drifts": {"clusters": 2, "pretrain": 5, "migrate": 0.0, **DRIFT},
            "few": {
                "clusters": 2,
                "alpha": 1,
                "pretrain": 3,
                "group_init": "same",
                "eta_g": 0.1,
                "mu": 0.1,
                "server": "adam",
            },
            "still": {"clusters": 3, "pretrain": 5, "migrate": None, "weighting": "uniform"},
        },
    ),
    "auxo": Entry(
        auxo,
        "weights of a cohort down, update up",
        sees="its cohort, and a part of its update",
        variants={
            "": {
                "split": {"kind": "rounds", "rounds": [1, 2]},
                "min_participants": 2,
                "epsilon": 0.3,
                "update_fraction": 0.5,
            },
            "evidence": {
                "split": {"kind": "evidence", "min_fraction": 0.0},
                "min_participants": 2,
                "max_clusters": 3,
                "mu": 0.1,
                "server": "adam",
                **DRIFT,
            },
        },
    ),
    "feddrift": Entry(
        feddrift,
        "its model down, update up; each step all models down, errors up",
        sees="its model, how badly each model does on its rows, how many they are",
        keeps="nothing, or the rows of recent steps",
        variants={
            "": {"rounds_per_step": 3, "delta": 0.0, "local": FAST},
            "loss": {
                "rounds_per_step": 1,
                "delta": 0.01,
                "criterion": "loss",
                "max_clusters": 3,
                "init_new_from": "start",
                "mu": 0.1,
                "local": FAST,
                **DRIFT,
            },
            "window": {
                "rounds_per_step": 1,
                "delta": 0.01,
                "variant": {"kind": "isolate", "merge": 0.1},
                "criterion": "loss",
                "window": 3,
                "server": MOMENTUM,
                "local": FAST,
                **DRIFT,
            },
            "eager": {"rounds_per_step": 2, "delta": 0.0, "variant": "eager", "local": FAST, **DRIFT},
        },
    ),
    "oracle": Entry(
        oracle,
        "weights of its true group down, update up",
        sees="its true group: a bound, as nobody can know it",
    ),
}


def __getattr__(name: str) -> Callable[..., Algorithm]:
    """Return an algorithm by its name in an experiment file, with `_` for `-`: `ft.algorithms.q_fedavg`."""
    if (entry := REGISTRY.get(name.replace("_", "-"))) is None:
        raise AttributeError(f"module 'fedtide.algorithms' has no attribute '{name}'")
    return entry.make


def __dir__() -> list[str]:
    return ["REGISTRY", "Entry", *(name.replace("-", "_") for name in REGISTRY)]
