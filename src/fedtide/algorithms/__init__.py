"""The registry of algorithms: for each what it sends, what the server sees of a client, and what clients keep.

>>> import fedtide as ft
>>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
>>> ft.algorithms.fedprox(task, mu=0.1).name
'fedprox'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedtide.algorithms.aem import aem
from fedtide.algorithms.auxo import auxo
from fedtide.algorithms.centralized import centralized
from fedtide.algorithms.cfl import cfl
from fedtide.algorithms.cfl_released import cfl_released
from fedtide.algorithms.entry import Entry, Reduction, Trait, preset
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
from fedtide.algorithms.local_only import local_only
from fedtide.algorithms.minloss import minloss
from fedtide.algorithms.options import checked
from fedtide.algorithms.oracle import oracle
from fedtide.algorithms.pfedem import pfedem
from fedtide.algorithms.qfedavg import qfedavg
from fedtide.algorithms.scaffold import scaffold
from fedtide.algorithms.scsgd import scsgd
from fedtide.algorithms.tshot import tshot
from fedtide.algorithms.vanilla import vanilla
from fedtide.core.errors import nearest
from fedtide.core.types import Algorithm
from fedtide.learn.server import SGD, Adagrad, Adam, Yogi

# Options shared by several variants.
DRIFT = {"shift": {"how": {"kind": "label-swaps", "every": 2, "fraction": 0.5}}}
PUBLIC = {"data": {"public_samples": 8}}
FEW = {"lr": 0.05, "epochs": 4, "batch_size": 4, "optimizer": "adamw"}
FAST = {"lr": 4.0, "batch_size": 4}
MOMENTUM = {"kind": "sgd", "momentum": 0.5}
LINEAR = {"prior": {"kind": "linear", "period": 4}}
PRINTED = {"anchor": False}  # as the paper has it
TIMED = {**LINEAR, **PRINTED}
LEARNED = {"kind": "learned", "sketch": 4, "memory": 3}
ALWAYS = {"split_after": 1, "eps1": 1e9, "eps2": 0.0, "gamma": 0.0}
GRADIENT = {"variant": "gradient", "normalize_by": "participants", "weighting": "uniform"}
BY_SUMS = {"kind": "nothing", "fewest": 2}
FEW_CLUSTERS = {"kind": "k-means", "k_max": 3, "n_init": 2}

SERVER: tuple[Trait, ...] = ("labels", "nothing")
MIXED: tuple[Trait, ...] = ("groups", "meaning", "holdings", "nothing")

CERTAIN = "it answers by the branch that is more certain of a class"

# Options shared by several reductions.
KERAS = {"server": {"kind": "keras-adam", "lr": 0.01, "eps": 1e-4}}
FULL = {"local": {"lr": 0.1, "batch_size": 0}}
FALLING = {"local": {**FULL["local"], "lr_schedule": {"kind": "exponential", "factor": 0.5}}}
UNIFORM = {"weighting": "uniform"}
ONE_CLUSTER = {"clustering": {"kind": "k-means", "k_max": 1}, "cohort": "arrivals"}
MOVING = {"server": MOMENTUM}
NO_GROUPS = {"clustering": {**FEW_CLUSTERS, "min_silhouette": 1.0}, "trigger": {"kind": "fraction", "tau": 0.0}}
ONE_GROUP = {"clusters": 1, "pretrain": 3, "group_init": "same"}

REGISTRY: Mapping[str, Entry] = {
    "fedavg": Entry(
        fedavg, "weights down, update up", "global",
        variants={
            "wsm": {"loss": "wsm"},
            "by-size": {"cohort": {"kind": "by-size", "clients_per_round": 4}},
            "oort": {"cohort": {"kind": "oort", "clients_per_round": 3, "pacer_step": 2, "exploration_factor": 0.5}},
            "nearest": {"cohort": {"kind": "nearest", "clients_per_round": 3}},
        },
        reductions=[Reduction({"server": {"kind": "sgd", "lr": 1.0}}, "fedavg")],
    ),
    "fedsgd": Entry(
        fedsgd, "weights down, gradient step up", "global",
        reductions=[
            Reduction(FULL, "fedavg", FULL, 1e-6),
            Reduction(FALLING, "fedavg", FALLING, 1e-6),
        ],
    ),
    "fedprox": Entry(
        fedprox, "weights down, update up", "global", helps=("labels",),
        variants={"by-size": {"cohort": {"kind": "by-size", "clients_per_round": 3}}},
        reductions=[Reduction({"mu": 0.0}, "fedavg")],
    ),
    "fedavgm": Entry(
        preset("fedavgm", fedavg, "FedAvg with momentum on the server.", server=SGD(momentum=0.9)),
        "weights down, update up", "server-optimizer", helps=SERVER,
        reductions=[
            Reduction({}, "fedavg", {"server": {"kind": "sgd", "momentum": 0.9}}),
            Reduction({"server": {"momentum": 0.0}}, "fedavg"),
        ],
    ),
    "fedadagrad": Entry(
        preset("fedadagrad", fedavg, "FedAvg with Adagrad on the server.", server=Adagrad()),
        "weights down, update up", "server-optimizer", helps=SERVER,
        reductions=[Reduction({}, "fedavg", {"server": "adagrad"})],
    ),
    "fedadam": Entry(
        preset("fedadam", fedavg, "FedAvg with Adam on the server.", server=Adam()),
        "weights down, update up", "server-optimizer", helps=SERVER,
        reductions=[
            Reduction({}, "fedavg", {"server": "adam"}),
            Reduction({"server": {"lr": 0.1}}, "fedavg", {"server": {"kind": "adam", "lr": 0.1}}),
        ],
    ),
    "fedyogi": Entry(
        preset("fedyogi", fedavg, "FedAvg with Yogi on the server.", server=Yogi()),
        "weights down, update up", "server-optimizer", helps=SERVER,
        reductions=[Reduction({}, "fedavg", {"server": "yogi"})],
    ),
    "q-fedavg": Entry(
        qfedavg, "weights down, update and one number up", "global",
        variants={
            "oort": {"cohort": {"kind": "oort", "clients_per_round": 3, "pacer_step": 2, "exploration_factor": 0.5}},
        },
        reductions=[Reduction({"q": 0.0}, "fedavg", UNIFORM, 1e-6)],
    ),
    "scaffold": Entry(
        scaffold, "weights and control variate down, updates of both up", "global", helps=("labels",),
        keeps="its control variate, as large as the weights",
        exempt={"newcomers": "its control variate is a mean over all registered clients: with fewer it is larger"},
        variants={"one wsm": {"variant": "I", "weighting": "samples", "loss": "wsm"}},
    ),
    "fedbuff": Entry(
        fedbuff, "weights down, update up; the server steps when K have answered", "global",
        tells={"": "sums for each age of the model that they began from"},
        variants={"late": {"buffer": 2, "cohort": 3, "damping": 1.0, "mu": 0.1}},
        reductions=[
            # Where all clients take equally long, all that begin in a round answer in it.
            Reduction({}, "fedavg", UNIFORM),
            Reduction({"mu": 0.5, "weighting": "samples"}, "fedprox", {"mu": 0.5}),
        ],
    ),
    "vanilla": Entry(
        vanilla, "weights down, update up", "branches", helps=("hours",),
        variants={"certain": {"choose_per": "client"}},
        reductions=[Reduction({"branches": 1}, "fedavg", KERAS)],
    ),
    "fedtem": Entry(
        fedtem, "weights and mixture down, update up", "branches", helps=("hours",),
        reveals=("pi", "odds", "mu", "var", "n"),
        variants={
            "": TIMED,
            "cosine": {**PRINTED, "prior": {"kind": "cosine", "period": 4}},
            "block": {**PRINTED, "prior": {"kind": "block", "period": 4}},
            "soft": {**PRINTED, "prior": {"kind": "soft", "period": 4}},
            "uniform": {**PRINTED, "prior": "uniform"},
            "em-only": {**PRINTED, "prior": "em-only"},
            "learned": {**PRINTED, "prior": LEARNED},
            "sample": {**TIMED, "selection": "sample"},
            "bayes": {**TIMED, "selection": "bayes", "update": "overwrite", "variance": "total"},
            "three": {**TIMED, "branches": 3, "consistent_only": False},
            "features of branches": {
                **TIMED, "feature": "branches", "update": {"kind": "certainty", "min_share": 0.7},
            },
            "wsm": {**TIMED, "loss": {"kind": "wsm", "val": True}},
            "anchor": {**LINEAR, "anchor": True},
        },
        reductions=[Reduction({**PRINTED, "branches": 1}, "fedavg", KERAS)],
    ),
    "fedtkm": Entry(
        fedtkm, "weights and centers down, update, feature means and counts up", "branches", helps=("hours",),
        variants={
            "": TIMED,
            "vote": {**TIMED, "distance": "vote", "update": "certainty", "max_update_norm": 1.0, "rescale": True},
            "three": {**TIMED, "branches": 3, "alpha": {"kind": "integral", "schedule": "constant"}},
            "eta per period": {**TIMED, "alpha": "per-period"},
            "learned": {**PRINTED, "prior": LEARNED},
            "anchor": {**LINEAR, "anchor": True},
        },
        reductions=[Reduction({**PRINTED, "branches": 1}, "fedavg", KERAS)],
    ),
    "min-loss": Entry(
        minloss, "weights down, update and branch up", "branches", helps=("hours",),
        exempt={"numbers": CERTAIN},
        variants={
            "": PRINTED,
            "members": {**PRINTED, "lam": 0.0, "normalize_by": "members", "choose_per": "client"},
            "anchor": {"anchor": True},
        },
        reductions=[Reduction({**PRINTED, "branches": 1}, "fedavg", KERAS)],
    ),
    "scsgd": Entry(
        scsgd, "weights down, update up", "branches", helps=("hours",),
        exempt={"numbers": CERTAIN},
        variants={
            "": LINEAR,
            "half": {"prior": {"kind": "block", "period": 4}, "lam": 0.0},
            "whole": {**LINEAR, "branch_layer": "*"},
        },
        reductions=[Reduction({"branches": 1}, "fedavg", KERAS)],
    ),
    "t-shot": Entry(
        tshot, "weights and centers down, update and branch up", "branches", helps=("hours",),
        reveals=("centers", "counts"),
        variants={"": {"shots": 2}},
    ),
    "fedem": Entry(
        fedem, "K models down, the updates of all up", "mixture", helps=MIXED, keeps="its mixture",
        variants={
            "": {"components": 2, "component_layer": "head", "anchor": False},
            "whole": {"anchor": False, "normalize_by": "everyone"},
            "anchored": {"components": 2, "component_layer": "head"},
            "wsm": {"anchor": False, "loss": {"kind": "wsm", "blend": 0.1}},
        },
        reductions=[
            Reduction({"anchor": False, "components": 1, **KERAS, "component_layer": "head"}, "fedavg", KERAS),
            Reduction({"anchor": False, "components": 1, "component_layer": "*"}, "fedavg"),
        ],
    ),
    "fedgmm": Entry(
        fedgmm, "K models and Gaussians down, updates of all up", "mixture", helps=MIXED,
        reveals=("centers", "counts", "spreads"), keeps="its mixture",
        variants={
            "pca": {**PRINTED, "features": {"kind": "pca", "width": 2}, "components": 2, **PUBLIC},
            "": {**PRINTED, "features": "network", "components": 2, "gaussians": 2},
            "head": {
                **PRINTED, "features": {"kind": "frozen"}, "components": 3, "component_layer": "head",
                "gaussian_init": "random", "em_steps": 2,
            },
            "anchor": {"features": "network", "components": 2, "gaussians": 2, "anchor": True},
        },
        reductions=[Reduction({**PRINTED, "components": 1, "gaussians": 1}, "fedavg", tolerance=1e-6)],
    ),
    "pfedem": Entry(
        pfedem, "K models and Gaussians down, updates of some up", "mixture", helps=MIXED,
        reveals=("centers", "counts", "spreads"), keeps="nothing, or its shares",
        variants={
            "": {
                "anchor": False, "features": {"kind": "network", "layer": "dense1"},
                "gaussian_init": {"kind": "k-means++", "rounds": 2},
            },
            "head": {
                "anchor": False, "features": "network", "component_layer": "head", "gaussian_init": "random",
                "update": "overwrite", "em_steps": 2, "components": 3, "inference": "global",
            },
            "shares": {
                "anchor": False, "features": {"kind": "frozen", "seed": 3}, "keep_mixture": True, "update": "share",
            },
            "pca": {
                "anchor": False, "features": {"kind": "pca", "width": 2},
                "gaussian_init": {"kind": "k-means++", "rounds": 2}, "normalize_by": "participants", **PUBLIC,
            },
            "public": {
                "anchor": False, "features": {"kind": "pca", "width": 2}, "gaussian_init": "public", "components": 3,
                **PUBLIC,
            },
            "anchor": {"features": "frozen", "gaussian_init": "random", "inference": "client"},
        },
        reductions=[
            Reduction({"anchor": False, "components": 1}, "fedavg"),
            Reduction({"anchor": False, "components": 1, **UNIFORM}, "fedavg", UNIFORM),
            Reduction({"anchor": False, "components": 1, "normalize_by": "participants"}, "fedavg"),
        ],
    ),
    "aem": Entry(
        aem, "J models down, the update of one up", "clustered", helps=("groups", "meaning"),
        tells={"": "which model it trained, unless sums are secure"},
        keeps="nothing; what it makes for itself stays with it",
        variants={
            "mixture": {
                "anchor": False, "clusters": 3, "exploration": "power",
                "personal": {"kind": "mixture", "gating": FEW, "solver": FEW},
            },
            "tuned": {
                "anchor": False,
                "personal": {"kind": "mixture", "tune": True, "held": 0.3, "gating": FEW, "solver": FEW},
            },
            "stops": {
                "exploration": {"kind": "constant", "epsilon": 1.0}, "freeze": {"patience": 1, "check_every": 2},
                "personal": {"kind": "fine-tuned", "solver": FEW},
            },
            "ensemble": {
                "anchor": False, "personal": {"kind": "ensemble", "of": "logits", "solver": FEW, "model": "linear"},
            },
            "alone": {"anchor": False, "personal": {"kind": "alone", "solver": FEW}},
            "stacking": {
                "personal": {"kind": "stacking", "solver": FEW, "tuning": FEW, "model": "linear"},
                "personal_others": ["choice"],
            },
        },
        reductions=[
            Reduction({"anchor": False, "clusters": 1}, "fedavg"),
            Reduction(
                {"anchor": False, "clusters": 3, "exploration": {"epsilon": 0.0}}, "ifca", {**PRINTED, "clusters": 3}
            ),
            Reduction({"anchor": False, "clusters": 3, "hide_choice": True}, "aem", {"anchor": False, "clusters": 3}),
        ],
    ),
    "cfl": Entry(
        cfl, "weights of a cluster down, update up", "clustered", reveals=("update", "weight"),
        variants={
            "": ALWAYS,
            "shared": {**ALWAYS, "cluster_layer": "head", "server": MOMENTUM},
            "complete": {**ALWAYS, "linkage": "complete", "weighting": "samples", "server": "adam", "update_ttl": 1},
        },
        reductions=[
            Reduction({"split_after": 99}, "fedavg", UNIFORM),
            Reduction({"split_after": 99, "weighting": "samples"}, "fedavg"),
            Reduction({"split_after": 99, "cluster_layer": "head"}, "fedavg", UNIFORM),
        ],
    ),
    "cfl-released": Entry(
        cfl_released, "weights of a cluster down, update up", "clustered", reveals=("update", "weight"),
        exempt={
            "cover": "its fault: places within a cluster are taken for clients",
            "join": "its clusters are lists of the clients that it began with",
            "newcomers": "no client can join",
        },
        variants={"": {"split_after": 1, "eps1": 1e9, "eps2": 0.0}},
    ),
    "fielding": Entry(
        fielding, "a cluster's model down, its update up", "clustered", helps=("labels", "groups", "drift"),
        reveals=("representation",), keeps="what it said last",
        tells={"by sums": "two sums may differ by one client, whose representation is then their difference"},
        exempt={"newcomers": "registered clients that have said nothing count as members of the largest cluster"},
        variants={
            "drifts": {
                "clustering": FEW_CLUSTERS, "trigger": {"kind": "fraction", "tau": 0.2}, "pooling": False, **DRIFT,
            },
            "asked": {"clustering": FEW_CLUSTERS, "reporters": "participants", **DRIFT},
            "learned": {
                "trigger": {"kind": "learned", "explore": 2, "tried": [0.0, 0.9]},
                "cohort": {"kind": "by-size", "clients_per_round": 4}, **DRIFT,
            },
            "gain": {"clustering": FEW_CLUSTERS, "trigger": "gain", **DRIFT},
            "shared": {"clustering": FEW_CLUSTERS, "cluster_layer": "head", "server": MOMENTUM, **DRIFT},
            "pooled": {"clustering": FEW_CLUSTERS, "weighting": "samples", **MOVING, **DRIFT},
            "gradient": {
                "representation": {"kind": "gradient", "at": "global", "sketch": 8}, "clustering": FEW_CLUSTERS,
                "mu": 0.1, **DRIFT,
            },
            "oort": {
                "cohort": {"kind": "oort", "clients_per_round": 4, "pacer_step": 2, "exploration_factor": 0.5},
                "representation": {"kind": "labels", "malicious": 0.4}, **DRIFT,
            },
            "combined": {
                "representation": {
                    "kind": "combined",
                    "parts": ["labels", {"kind": "embedding", "layer": "dense1"}, {"kind": "gradient", "sketch": 8}],
                },
                "clustering": FEW_CLUSTERS, "trigger": {"kind": "fraction", "tau": 0.2}, "reassign_seconds": 0.5,
                "clustering_seconds": 2.0, **DRIFT,
            },
            "k-center": {"clustering": {"kind": "k-center", "k": 3}, "reassign": "all", "trigger": "adaptive", **DRIFT},
            "static": {
                "clustering": FEW_CLUSTERS, "reporters": "once", "trigger": {"kind": "fraction", "tau": math.inf},
                **DRIFT,
            },
            "fair": {
                "q": 1.0, "pooling": False, "server": "yogi", "clustering": FEW_CLUSTERS, "loss": "wsm",
                "drift_baseline": "last-clustering", **DRIFT,
            },
            "by sums": {
                "reveal": BY_SUMS, "clustering": FEW_CLUSTERS, "cohort": {"kind": "in-turn", "clients_per_round": 4},
                **DRIFT,
            },
            "by sums of several": {
                "reveal": BY_SUMS, "clustering": FEW_CLUSTERS, "trigger": "gain", "cluster_layer": "head",
                "representation": {"kind": "combined", "parts": ["labels", {"kind": "gradient", "sketch": 8}]}, **DRIFT,
            },
            "by sums, fair": {
                "reveal": {**BY_SUMS, "fewest_updates": 2}, "clustering": FEW_CLUSTERS, "q": 1.0, "pooling": False,
                "trigger": {"kind": "learned", "explore": 2, "tried": [0.0, 0.9]}, "reporters": "participants",
                "reassign": "all", **DRIFT,
            },
        },
        reductions=[
            Reduction(ONE_CLUSTER, "fedavg", UNIFORM),
            Reduction({**ONE_CLUSTER, "reveal": "nothing"}, "fedavg", UNIFORM),
            Reduction({**ONE_CLUSTER, "reveal": {**BY_SUMS, "fewest_updates": 3}}, "fedavg", UNIFORM),
            Reduction(
                {**ONE_CLUSTER, "reveal": "nothing", "mu": 0.3, "weighting": "samples"}, "fedprox", {"mu": 0.3},
            ),
            Reduction(
                {**NO_GROUPS, "reveal": BY_SUMS, "cohort": "uniform"}, "fedavg", {**UNIFORM, "cohort": "uniform"},
            ),
            Reduction({**ONE_CLUSTER, "reveal": "nothing", "q": 1.0, "pooling": False}, "q-fedavg", {"q": 1.0}),
            Reduction({**ONE_CLUSTER, "mu": 0.3, "weighting": "samples"}, "fedprox", {"mu": 0.3}),
            Reduction({**ONE_CLUSTER, "cohort": "by-size"}, "fedavg", {**UNIFORM, "cohort": "by-size"}),
            Reduction({**ONE_CLUSTER, "cohort": "uniform"}, "fedavg", {**UNIFORM, "cohort": "uniform"}),
            Reduction({**ONE_CLUSTER, "cluster_layer": "head", **MOVING}, "fedavg", {**UNIFORM, **MOVING}),
            Reduction({**ONE_CLUSTER, "pooling": False}, "fedavg", UNIFORM),
            Reduction({**NO_GROUPS, "cohort": "uniform"}, "fedavg", {**UNIFORM, "cohort": "uniform"}),
            Reduction({**ONE_CLUSTER, "q": 1.0, "pooling": False}, "q-fedavg", {"q": 1.0}),
            Reduction({**ONE_CLUSTER, "q": 1e-9, "pooling": False}, "fedavg", UNIFORM, 1e-6),
            Reduction(
                {**ONE_CLUSTER, "clustering": {"kind": "k-center", "k": 1}, "reassign": "all"}, "fedavg", UNIFORM,
            ),
        ],
    ),
    "ifca": Entry(
        ifca, "K models down, the update of one up", "clustered", helps=("groups", "meaning", "hours"),
        tells={"": "which model it trained, unless sums are secure"},
        variants={
            "": PRINTED,
            "gradient": {**PRINTED, **GRADIENT, "init_noise": 0.1, "clusters": 3},
            "head": {**PRINTED, "cluster_layer": "head", "clusters": 3, **GRADIENT},
            "hidden": {**PRINTED, "hide_choice": True},
            "tries": {
                **PRINTED, "n_init": 3, "choose_on": "train", "normalize_by": "participants", "server": "adam",
                "mu": 0.1,
            },
            "anchor": {"clusters": 3, "anchor": True},
        },
        reductions=[
            Reduction({**PRINTED, "clusters": 1}, "fedavg"),
            Reduction({**PRINTED, "clusters": 1, "mu": 0.5}, "fedprox", {"mu": 0.5}),
            Reduction({**PRINTED, "clusters": 1, "cluster_layer": "head"}, "fedavg"),
            Reduction({"clusters": 3, "hide_choice": True}, "ifca", {"clusters": 3}),
            Reduction({**PRINTED, **FULL, "clusters": 1, **GRADIENT}, "fedsgd", {**FULL, **UNIFORM}),
            Reduction({**FULL, "variant": "gradient"}, "ifca", FULL, 1e-6),
        ],
    ),
    "flexcfl": Entry(
        flexcfl, "weights of a group down, update up", "clustered", helps=("labels", "groups", "drift"),
        tells={"": "its group"}, reveals=("update", "shifted"),
        keeps="its label shares of then",
        variants={
            "": {"pooling": False, "clusters": 2, "pretrain": 5, "migrate": 0.0},
            "drifts": {"pooling": False, "clusters": 2, "pretrain": 5, "migrate": 0.0, **DRIFT},
            "few": {
                "pooling": False, "clusters": 2, "alpha": 1, "pretrain": 3, "group_init": "same", "eta_g": 0.1,
                "mu": 0.1, "server": "adam",
            },
            "still": {"pooling": False, "clusters": 3, "pretrain": 5, "migrate": None, "weighting": "uniform"},
            "silhouette": {"pooling": False, "clusters": "silhouette", "pretrain": 5},
            "shared": {"clusters": 2, "pretrain": 5, "migrate": 0.0, "cluster_layer": "head", **MOVING, **DRIFT},
            "pooled": {"clusters": 2, "pretrain": 5, "migrate": 0.0, **MOVING, **DRIFT},
        },
        reductions=[
            Reduction(ONE_GROUP, "fedavg"),
            Reduction({**ONE_GROUP, "pooling": False}, "fedavg"),
            Reduction({**ONE_GROUP, "mu": 0.5}, "fedprox", {"mu": 0.5}),
            Reduction({**ONE_GROUP, "cluster_layer": "head"}, "fedavg"),
        ],
    ),
    "auxo": Entry(
        auxo, "weights of a cluster down, update up", "clustered", helps=("drift",), tells={"": "its cluster"},
        reveals=("sketch",),
        variants={
            "": {
                "pooling": False, "split": {"kind": "rounds", "rounds": [1, 2]}, "min_participants": 2, "epsilon": 0.3,
                "update_fraction": 0.5,
            },
            "shared": {
                "split": {"kind": "rounds", "rounds": [1, 2]}, "min_participants": 2, "epsilon": 0.3,
                "cluster_layer": "head", "server": "adam",
            },
            "pooled": {"split": {"kind": "rounds", "rounds": [1, 2]}, "min_participants": 2, "epsilon": 0.3},
            "evidence": {
                "pooling": False, "split": {"kind": "evidence", "min_fraction": 0.0}, "min_participants": 2,
                "max_clusters": 3, "mu": 0.1, "server": "adam", **DRIFT,
            },
        },
        reductions=[
            Reduction({"split": {"kind": "rounds", "rounds": []}, "min_participants": 1}, "fedavg"),
            Reduction({"max_clusters": 1, "min_participants": 1, "cluster_layer": "head"}, "fedavg"),
            Reduction(
                {"max_clusters": 1, "min_participants": 1, "server": "adam", "mu": 0.5}, "fedprox",
                {"server": "adam", "mu": 0.5},
            ),
        ],
    ),
    "feddrift": Entry(
        feddrift, "its model down, update up; each step all models down, errors up", "clustered",
        helps=("groups", "drift"), tells={"": "its model"}, reveals=("bad", "rows"),
        keeps="nothing, or the rows of recent steps",
        variants={
            "": {**PRINTED, "rounds_per_step": 3, "delta": 0.0, "local": FAST},
            "loss": {
                **PRINTED, "rounds_per_step": 1, "delta": 0.01, "criterion": "loss", "max_clusters": 3,
                "init_new_from": "start", "mu": 0.1, "local": FAST, **DRIFT,
            },
            "window": {
                **PRINTED, "rounds_per_step": 1, "delta": 0.01, "variant": {"kind": "isolate", "merge": 0.1},
                "criterion": "loss", "window": 3, "server": MOMENTUM, "local": FAST, **DRIFT,
            },
            "shared": {
                **PRINTED, "rounds_per_step": 1, "delta": 0.01, "variant": {"kind": "isolate", "merge": 0.1},
                "criterion": "loss", "cluster_layer": "head", "window": 3, "server": MOMENTUM, "local": FAST, **DRIFT,
            },
            "eager": {**PRINTED, "rounds_per_step": 2, "delta": 0.0, "variant": "eager", "local": FAST, **DRIFT},
            "pooled": {
                **PRINTED, "rounds_per_step": 1, "delta": 0.01, "window": 3, "pooling": True, "local": FAST, **DRIFT,
            },
            "anchor": {"rounds_per_step": 1, "delta": 0.01, "window": 3, "anchor": True, "local": FAST, **DRIFT},
        },
        reductions=[
            Reduction({**PRINTED, "max_clusters": 1, "rounds_per_step": 2, "delta": 0.0}, "fedavg"),
            Reduction(
                {**PRINTED, "max_clusters": 1, "rounds_per_step": 2, "delta": 0.0, "cluster_layer": "head"}, "fedavg"
            ),
            # A client cannot do worse by more than all of its rows; rows that do not change are not rows of the past.
            Reduction({**PRINTED, "rounds_per_step": 1, "delta": 1.0, "window": 3, "mu": 0.5}, "fedprox", {"mu": 0.5}),
        ],
    ),
    "oracle": Entry(
        oracle, "weights of its true group down, update up", "clustered",
        reveals=("true_groups",),
        exempt={"deployed": "only a simulation knows the true groups"},
        variants={"shared": {"cluster_layer": "head", "server": "adam", **DRIFT}},
    ),
    "local": Entry(
        local_only, "nothing", "baseline", tells={"": "nothing"},
        keeps="its model, the one that validation rows judge, and checksums of its rows",
        exempt={
            "degenerate": "a client whose rows break its training spoils its own model alone, and nothing is summed",
            "update": "it starts from nothing that others have trained, so it cannot forget what is theirs",
        },
        variants={
            "": {"solver": FEW},
            "linear": {"solver": FEW, "model": "linear"},
        },
    ),
    "centralized": Entry(
        centralized, "nothing", "baseline", reveals=("all_rows",),
        exempt={
            "dropouts": "it asks no client, so that none can be absent",
            "deployed": "no server has the rows of its clients",
            "degenerate": "rows that break training break it for all, as there is no answer to refuse",
        },
    ),
}  # fmt: skip


# From Python an algorithm has its name in a file, with `_` for `-`, and its arguments are read as from a file.
globals().update({name.replace("-", "_"): checked(name, entry.make) for name, entry in REGISTRY.items()})


def __getattr__(name: str) -> Callable[..., Algorithm]:
    raise AttributeError(f"module 'fedtide.algorithms' has no attribute '{name}', {nearest(name, __dir__())}")


def __dir__() -> list[str]:
    return ["REGISTRY", "Entry", "Reduction", "preset", *(name.replace("-", "_") for name in REGISTRY)]
