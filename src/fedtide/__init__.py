"""Federated learning when the data will not hold still.

>>> import torch
>>> import fedtide as ft
>>> x, y = torch.randn(400, 20), torch.arange(400) % 4
>>> people = ft.population(x, y, ft.Dirichlet(clients=20, alpha=0.3))
>>> task = ft.Task(lambda: torch.nn.Linear(20, 4))
>>> algorithm = ft.fedavg(task, ft.LocalTrainer(rate=0.1), cohort=ft.Arrivals(5))
>>> result = ft.simulate(algorithm, people, rounds=8)
>>> len(result.accuracy)
1
"""

from importlib.metadata import PackageNotFoundError, version

from fedtide import cohorts
from fedtide.algorithms import REGISTRY
from fedtide.algorithms.aem import aem
from fedtide.algorithms.auxo import auxo
from fedtide.algorithms.cfl import cfl
from fedtide.algorithms.cfl_released import cfl_released
from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedbuff import fedbuff
from fedtide.algorithms.feddrift import feddrift
from fedtide.algorithms.fedem import fedem
from fedtide.algorithms.fedgmm import fedgmm
from fedtide.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
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
from fedtide.cohorts import Arrivals, Everyone, Uniform
from fedtide.config import Experiment, StopAt, from_dict, read
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import (
    Algorithm,
    Answer,
    Fleet,
    Moment,
    Prediction,
    Reply,
    Shard,
    Slotted,
    Sum,
    Weighted,
    Weights,
    shared_weights,
)
from fedtide.data.build import build
from fedtide.data.groups import ByDomain, ByLabels, HeldOutClients, OneGroup, Split
from fedtide.data.partition import (
    IID,
    ByGroup,
    Dirichlet,
    DirichletClass,
    LabelShards,
    Majority,
    Natural,
    Pachinko,
    Resample,
    Rotation,
)
from fedtide.data.population import Population
from fedtide.data.shift import Shift
from fedtide.data.shift.availability import Availability
from fedtide.data.shift.how import LabelSwaps, Permutation
from fedtide.data.shift.what import ChangePoints, ClusterDrift, DomainMixture, Stream
from fedtide.data.shift.who import Always, Periodic
from fedtide.data.transforms import CenterCrop, Downscale, Normalize, Standardize
from fedtide.fleets import devices
from fedtide.learn.augment import Flip, RandomCrop
from fedtide.learn.local import LocalTrainer
from fedtide.learn.loss import CrossEntropy
from fedtide.learn.server import SGD, Adagrad, Adam, Yogi
from fedtide.learn.task import Task
from fedtide.learn.wsm import WSM
from fedtide.multi import features, personal
from fedtide.parts import prior as priors
from fedtide.runs.simulate import population, simulate
from fedtide.study import run, tune

try:
    __version__ = version("fedtide")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"

__all__ = [
    "IID",
    "REGISTRY",
    "SGD",
    "WSM",
    "Adagrad",
    "Adam",
    "Algorithm",
    "Always",
    "Answer",
    "Arrivals",
    "Availability",
    "ByDomain",
    "ByGroup",
    "ByLabels",
    "CenterCrop",
    "ChangePoints",
    "ClusterDrift",
    "CrossEntropy",
    "Dirichlet",
    "DirichletClass",
    "DomainMixture",
    "Downscale",
    "Everyone",
    "Experiment",
    "FedtideError",
    "Fleet",
    "Flip",
    "HeldOutClients",
    "LabelShards",
    "LabelSwaps",
    "LocalTrainer",
    "Majority",
    "Moment",
    "Natural",
    "Normalize",
    "OneGroup",
    "Pachinko",
    "Periodic",
    "Permutation",
    "Population",
    "Prediction",
    "RandomCrop",
    "Reply",
    "Resample",
    "Rng",
    "Rotation",
    "Shard",
    "Shift",
    "Slotted",
    "Split",
    "Standardize",
    "StopAt",
    "Stream",
    "Sum",
    "Task",
    "Uniform",
    "Weighted",
    "Weights",
    "Yogi",
    "aem",
    "auxo",
    "build",
    "cfl",
    "cfl_released",
    "cohorts",
    "devices",
    "features",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "feddrift",
    "fedem",
    "fedgmm",
    "fedprox",
    "fedsgd",
    "fedtem",
    "fedtkm",
    "fedyogi",
    "fielding",
    "flexcfl",
    "from_dict",
    "ifca",
    "minloss",
    "oracle",
    "personal",
    "pfedem",
    "population",
    "priors",
    "qfedavg",
    "read",
    "run",
    "scaffold",
    "scsgd",
    "shared_weights",
    "simulate",
    "tshot",
    "tune",
    "vanilla",
]  # fmt: skip
