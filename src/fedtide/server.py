"""Server optimizers: the averaged update as a direction (McMahan et al. 2017; Reddi et al. 2021).

`step(weights, memo, delta)` gives new weights and a new memo; `step_server` is the server's half of FedAvg.

>>> import fedtide as ft, torch
>>> weights, delta = (ft.base.Weights({"w": torch.tensor([number])}) for number in (1.0, 2.0))
>>> ft.server.SGD(0.5).step(weights, None, delta)[0].params
{'w': tensor([2.])}
"""

from fedtide.learn.server import SGD, Adagrad, Adam, KerasAdam, Server, Yogi, step_server

__all__ = ["SGD", "Adagrad", "Adam", "KerasAdam", "Server", "Yogi", "step_server"]
