"""Options of methods that are ours, as tests of them use them: the safe form without its transforms."""

from fedtide.algorithms import REGISTRY

CERTAIN = dict(REGISTRY["fedtem"].safe.options)
LEAKY = dict(REGISTRY["fedtkm"].safe.options)
MOVING = dict(REGISTRY["pfedem"].safe.options)
