"""The one exception for what a person can cause."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SYNONYMS = {
    # names of earlier versions
    "batch": ("batch_size", "parallel_trials"),
    "optimiser": ("optimizer",),
    "steps": ("local_steps",),
    "schedule": ("lr_schedule",),
    "clip_norm": ("max_grad_norm",),
    "clip": ("max_grad_norm",),
    "size": ("clients_per_round",),
    "over": ("over_selection",),
    "select": ("cohort",),
    "rows": ("samples",),
    "held_out": ("held_out_clients", "test"),
    "step": ("time",),
    "pool": ("domain",),
    "valid": ("val",),
    "validation": ("val",),
    "unseen": ("held_out_clients",),
    "public": ("public_samples",),
    "prepare": ("transforms",),
    "dropout": ("dropout_rate",),
    "evaluate_every": ("eval_every",),
    "window": ("average_last",),
    "grouping": ("decide_per",),
    "weights": ("init_from",),
    "about": ("description",),
    "smoothing": ("blend",),
    "than": ("versus",),
    "by": ("bound",),
    "branch_average": ("normalize_by",),
    "style": ("kind",),
    "epsilon": ("exploration",),
    "decay": ("exploration",),
    "patience": ("freeze",),
    "check_every": ("freeze",),
    # names of other libraries
    "rate": ("lr", "dropout_rate"),
    "learning_rate": ("lr",),
    "step_size": ("lr",),
    "eta": ("lr",),
    "server_lr": ("server",),
    "global_lr": ("server",),
    "bs": ("batch_size",),
    "local_bs": ("batch_size",),
    "minibatch": ("batch_size",),
    "local_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "n_epochs": ("epochs",),
    "local_ep": ("epochs",),
    "optim": ("optimizer",),
    "l2": ("weight_decay",),
    "wd": ("weight_decay",),
    "num_clients": ("clients",),
    "n_clients": ("clients",),
    "total_clients": ("clients",),
    "num_rounds": ("rounds",),
    "n_rounds": ("rounds",),
    "global_rounds": ("rounds",),
    "comm_rounds": ("rounds",),
    "communication_rounds": ("rounds",),
    "fraction": ("cohort",),
    "fraction_fit": ("cohort",),
    "frac": ("cohort",),
    "join_ratio": ("cohort",),
    "sample_fraction": ("cohort",),
    "participation_rate": ("cohort",),
    "participants": ("cohort", "clients_per_round"),
    "clients_per_round": ("cohort",),
    "eval_interval": ("eval_every",),
    "eval_freq": ("eval_every",),
    "test_every": ("eval_every",),
    "seed": ("seeds",),
    "dataset": ("source",),
    "heterogeneity": ("partition",),
    "non_iid": ("partition",),
    "noniid": ("partition",),
    "dirichlet_alpha": ("alpha",),
    "concentration": ("alpha",),
    "net": ("model",),
    "network": ("model",),
    "arch": ("model",),
    "strategy": ("algorithm",),
    "aggregator": ("algorithm",),
    "proximal_mu": ("mu",),
    "prox_mu": ("mu",),
    "num_clusters": ("clusters", "components", "branches"),
    "n_clusters": ("clusters", "components", "branches"),
    "k": ("clusters", "components", "branches"),
    "num_classes": ("classes",),
    "num_samples": ("samples",),
    "num_workers": ("workers",),
    "n_jobs": ("workers", "parallel_trials"),
    "num_gpus": ("gpus",),
    # choices
    "mnist": ("idx:mnist",),
    "fmnist": ("idx:fashion-mnist",),
    "fashion_mnist": ("idx:fashion-mnist",),
    "kmnist": ("idx:kmnist",),
    "emnist": ("idx:emnist",),
    "cifar10": ("cifar:cifar-10-batches-bin",),
    "cifar_10": ("cifar:cifar-10-batches-bin",),
    "femnist": ("leaf",),
    "shakespeare": ("leaf", "play-roles"),
    "lda": ("dirichlet",),
    "dir": ("dirichlet",),
    "pathological": ("label-shards",),
    "shards": ("label-shards",),
    "resnet": ("resnet18",),
    "mobilenet": ("mobilenet-v2",),
    "shufflenet": ("shufflenet-v2",),
    "logistic": ("linear",),
    "logistic_regression": ("linear",),
    "ce": ("cross-entropy",),
    "block": ("block-cyclic",),
    "random": ("uniform",),
    "all": ("everyone",),
}
"""Words that people write for a key or a choice, and what they mean: from earlier versions and from other libraries."""


class FedtideError(Exception):
    """A mistake a person can mend: one clear line naming the file, key or row, what was found and what is allowed.

    The command line prints the line and exits with status 2; nothing is half-written when it is raised.

    >>> raise FedtideError("demo.toml: rounds: found 0, allowed: an integer of 1 or more")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: demo.toml: rounds: found 0, allowed: an integer of 1 or more
    """

    def __init__(self, line: str) -> None:
        words = (word if len(word) <= 400 else f"{word[:100]}..." for word in line.split())
        shown = printable(" ".join(words))
        super().__init__(shown if len(shown) <= 900 else f"{shown[:500]} ... {shown[-390:]}")


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading content that another program may have written."""


def printable(text: object) -> str:
    r"""Return a text, such as the name of a folder, without what a terminal would obey.

    >>> print(printable("runs/a\x1b[2J"))
    runs/a\x1b[2J
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def refused(key: str, found: Any, allowed: str, but: str = "") -> FedtideError:
    """The error of a value that is not allowed.

    Args:
        key: where it stands, as the person wrote it.
        found: the value; shown as Python writes it, cut at 60 characters.
        allowed: what would do, in words.
        but: why it will not do, where the range does not say so.

    >>> raise refused("clusters", 0, "an integer of 1 or more")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: clusters: found 0, allowed: an integer of 1 or more
    >>> raise refused("shift.what.by", "time", "labels, order", "rows have no time")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: shift.what.by: found 'time', but rows have no time; allowed: labels, order
    """
    reason = f", but {but};" if but else ","
    return FedtideError(f"{key}: found {shown(found)}{reason} allowed: {allowed}")


def unknown(key: str, found: str, choices: Sequence[str]) -> FedtideError:
    """The error of a name that is none of some choices, with the nearest of them.

    >>> raise unknown("kind", "perod", ["period", "phase"])
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: kind: found 'perod', allowed: period, phase; did you mean 'period'?
    """
    return FedtideError(f"{key}: found {shown(found)}, {nearest(found, choices)}")


@contextmanager
def within(key: str) -> Iterator[None]:
    """Put a key in front of the lines of errors that do not begin with it.

    >>> with within("personal"):
    ...     raise FedtideError("model.kind: found 'cnn', allowed: mlp")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: personal: model.kind: found 'cnn', allowed: mlp
    """
    try:
        yield
    except FedtideError as error:
        raise FedtideError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from None


def shown(value: Any) -> str:
    """Format a value that was found for an error line: at most 60 characters.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, allowed: Sequence[str]) -> str:
    """The tail of an error line: the allowed spellings, and the nearest one when there is one.

    >>> nearest("perod", ["period", "phase"])
    "allowed: period, phase; did you mean 'period'?"
    >>> nearest("x", ["period", "phase"])
    'allowed: period, phase'
    >>> nearest("learning_rate", ["lr", "momentum"])
    "allowed: lr, momentum; did you mean 'lr'?"
    >>> nearest("IFCA", ["fedavg", "ifca"])
    "allowed: fedavg, ifca; did you mean 'ifca'?"
    """
    import difflib

    written = {folded(name): name for name in allowed}
    meant = [written[folded(word)]] if folded(word) in written else synonyms(word, allowed)
    close = meant or [written[name] for name in difflib.get_close_matches(folded(word), written, n=1, cutoff=0.65)]
    tail = f"; did you mean '{close[0]}'?" if close else ""
    return f"allowed: {', '.join(allowed)}{tail}"


def synonyms(word: str, allowed: Sequence[str]) -> list[str]:
    """The allowed spellings of what a word means elsewhere; of "kind:path" the kind has to be allowed.

    >>> synonyms("Learning-Rate", ["lr", "momentum"]), synonyms("mnist", ["csv", "idx"])
    (['lr'], ['idx:mnist'])
    """
    return [name for name in SYNONYMS.get(folded(word), ()) if name.partition(":")[0] in allowed]


def folded(word: str) -> str:
    """A word without case, and with one way to divide it.

    >>> folded("Q-FedAvg "), folded("q_fedavg")
    ('q_fedavg', 'q_fedavg')
    """
    return word.strip().casefold().replace("-", "_").replace(" ", "_")
