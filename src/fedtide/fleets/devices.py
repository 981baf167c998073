"""Devices and their clock: how fast the clients of a simulation compute and send, and how long answers take."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import ComputeCost
from fedtide.core.errors import refused
from fedtide.core.files import open_file
from fedtide.core.rng import Rng
from fedtide.data.sources.files import find, reading
from fedtide.fields.types import Count, DataFile, Fraction, ingredient
from fedtide.fleets.ask import Ask


class Clock(Protocol):
    """A simulated clock; see `DeviceClock` for the arguments."""

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Compute the seconds until each client would have answered (clients,), in float64."""

    def round(self, asks: Sequence[float]) -> float:
        """Compute the seconds of a round from those of its asks."""


@dataclass(frozen=True)
class SteadyClock:
    """A clock whose rounds all take equally long, however many clients take part."""

    seconds: float = 1.0

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Return the seconds of a round for each client (clients,); arguments are those of `DeviceClock.answers`."""
        return torch.full((len(ask.clients),), self.seconds, dtype=torch.float64)

    def round(self, asks: Sequence[float]) -> float:
        """Return the seconds of a round."""
        return self.seconds


def samples_of(ask: Ask, rows: Tensor, cost: ComputeCost) -> Tensor:
    """Return how many samples, forward and back, a question means for clients that hold so many rows (clients,)."""
    return cost(ask.question, rows) if ask.passes is None else rows * ask.passes / 3


@dataclass(frozen=True)
class DeviceClock:
    """A clock on which every client is a device with a speed and a line of its own.

    An answer takes `compute_i * cost + down / bandwidth_i + up / upload_i` seconds. Asks follow each other, so a
    round takes their sum and the overhead.

    Args:
        compute: (registered clients,) seconds that a row takes, forward and back.
        bandwidth: (registered clients,) bytes a second that a client receives.
        upload: (registered clients,) bytes a second that it sends.
        cost: how many rows a question means.
        overhead: seconds of the server in every round.

    >>> compute, down, up = torch.tensor([[0.1], [50.0], [25.0]], dtype=torch.float64)
    >>> clock = DeviceClock(compute, down, up, lambda question, rows: rows)
    >>> from fedtide.core.base import Moment
    >>> ask = Ask("train", "train", Moment(0, 1), torch.tensor([0]))
    >>> clock.answers(ask, torch.tensor([20]), 100, 100).tolist()
    [8.0]
    """

    compute: Tensor
    bandwidth: Tensor
    upload: Tensor
    cost: ComputeCost
    overhead: float = 0.0

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Compute the seconds until each client would have answered (clients,), in float64.

        Args:
            ask: the question and its clients.
            rows: (clients,) training rows of each client.
            down: bytes that each client receives.
            up: bytes that each client sends.
        """
        clients = ask.clients
        compute = self.compute[clients].double() * samples_of(ask, rows, self.cost)
        return compute + down / self.bandwidth[clients].double() + up / self.upload[clients].double()

    def round(self, asks: Sequence[float]) -> float:
        """Add up the asks one after the other, and the overhead of a round."""
        return sum(asks, 0.0) + self.overhead


__all__ = ["Devices", "LogNormal", "Steady", "Traces"]

KBIT = 125.0
"""Bytes in a kilobit."""

SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of all numbers that times are made of, so that their products stay finite."""

Moderate = Annotated[float, Field(strict=True, ge=SMALLEST, le=LARGEST)]
Spread = Annotated[float, Field(strict=True, ge=0, le=10)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=LARGEST)]
PartialWork = Annotated[Fraction, Field(description=(
    "probability that a client does only a part of its local work when it trains, in the same time. The part is any "
    "number of its epochs, or of its `local_steps`, except all and none. The update counts in full. The slow clients "
    "of a round are the same for every method."
))]  # fmt: skip
Upload = Annotated[Moderate, Field(description="how fast a client sends, as a part of how fast it receives.")]
Overhead = Annotated[Seconds, Field(description="seconds of the server in every round.")]

LATENCY = {"resnet": "ResNet Latency", "vit": "Vit Latency"}
"""Column of a file of latencies for each kind of network."""


@ingredient
class Steady:
    """Rounds that all take the same time, whatever clients take part and whatever is asked.

    Args:
        seconds: of a round.
    """

    seconds: Moderate = 1.0
    partial_work: PartialWork = 0.0
    kind: Literal["steady"] = "steady"

    def words(self) -> str:
        """Return no words: nothing sets clients apart."""
        return ""

    def clock(self, clients: int, seed: int, directory: Path | None, cost: ComputeCost) -> Clock:
        """Return the clock of a number of clients."""
        return SteadyClock(self.seconds)


@ingredient
class LogNormal:
    """A fleet that is drawn: the logarithms of speeds are normal, independent for computing and for the line.

    Args:
        compute: seconds that a row takes the median client to train on, forward and back.
        compute_spread: standard deviation of the logarithm, at most 10; 0 makes all alike.
        bandwidth: bytes a second that the median client receives.
        bandwidth_spread: standard deviation of the logarithm, at most 10.
    """

    compute: Moderate = 0.01
    compute_spread: Spread = 1.0
    bandwidth: Moderate = 500_000.0
    bandwidth_spread: Spread = 1.0
    upload: Upload = 1.0
    overhead: Overhead = 0.0
    partial_work: PartialWork = 0.0
    kind: Literal["log-normal"] = "log-normal"
    seconds: ClassVar[None] = None

    def words(self) -> str:
        """Say why some clients are slower than others."""
        return "Clients compute and send at different speeds, which are drawn, on a simulated clock. "

    def clock(self, clients: int, seed: int, directory: Path | None, cost: ComputeCost) -> Clock:
        """Return the clock of a number of clients."""
        key = Rng(seed).at("devices")
        compute = _log_normal(self.compute, self.compute_spread, clients, key.at("compute"))
        line = _log_normal(self.bandwidth, self.bandwidth_spread, clients, key.at("line"))
        return DeviceClock(compute, line, line * self.upload, cost, self.overhead)


@ingredient
class Traces:
    """Real devices: each client has a measured latency and a measured line, drawn with repetition.

    Args:
        latency: a JSON file, a list of objects with "ResNet Latency" and "Vit Latency"; below the data directory, or
            absolute. Those without a positive number are left out.
        network: which of the two is read, "resnet" or "vit".
        unit: seconds that a row takes to train on, forward and back, for a latency of 1. The published file does not
            say what its numbers are; the default reads them as milliseconds for a row.
        lines: a CSV file with a column `tcp_speed_kbps`, the speeds of one measurement separated by blanks, of which
            the mean is taken.
        case: only lines with this number in the column `case`; None takes all.
    """

    latency: DataFile = "device-traces/training_latency.json"
    network: Literal["resnet", "vit"] = "resnet"
    unit: Moderate = 0.001
    lines: DataFile = "device-traces/mobiperf_sampled_devices.csv"
    case: Count | None = None
    upload: Upload = 1.0
    overhead: Overhead = 0.0
    partial_work: PartialWork = 0.0
    kind: Literal["traces"] = "traces"
    seconds: ClassVar[None] = None

    def words(self) -> str:
        """Say why some clients are slower than others."""
        return "Clients compute and send at measured speeds of real devices and lines, on a simulated clock. "

    def clock(self, clients: int, seed: int, directory: Path | None, cost: ComputeCost) -> Clock:
        """Return the clock of a number of clients."""
        slow = latencies(find(self.latency, directory, "devices.latency"), LATENCY[self.network])
        fast = speeds(find(self.lines, directory, "devices.lines"), self.case)
        key = Rng(seed).at("devices")
        compute = slow[torch.from_numpy(key.at("compute").numpy().integers(len(slow), size=clients))] * self.unit
        line = fast[torch.from_numpy(key.at("line").numpy().integers(len(fast), size=clients))]
        return DeviceClock(compute, line, line * self.upload, cost, self.overhead)


Devices = Annotated[Steady | LogNormal | Traces, Field(discriminator="kind")]


def _log_normal(median: float, spread: float, clients: int, key: Rng) -> Tensor:
    return torch.from_numpy(median * np.exp(spread * key.numpy().standard_normal(clients)))


def latencies(path: Path, column: str) -> Tensor:
    """Read the positive numbers under `column` of a JSON list of objects (devices,), in its order.

    Raises:
        FedtideError: it is no such list, or has no such number.
    """
    with reading(f"devices.latency: {path}", "JSON"), open_file(path, "utf-8") as file:
        devices = json.load(file)
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise refused(f"devices.latency: {path}", devices, "a list of objects")
    numbers = [device.get(column) for device in devices]
    numbers = [number for number in numbers if isinstance(number, int | float) and not isinstance(number, bool)]
    values = [float(number) for number in numbers if SMALLEST <= number <= LARGEST]
    if not values:
        raise refused(f"devices.latency: {path}: positive numbers under '{column}'", 0, "one or more")
    return torch.tensor(values, dtype=torch.float64)


def speeds(path: Path, case: int | None) -> Tensor:
    """Read the mean speed of each measurement of a CSV file, in bytes a second (devices,), in its order.

    Raises:
        FedtideError: a column is missing, a speed is no positive number, or no line is of that case.
    """
    with reading(f"devices.lines: {path}", "a CSV file"), open_file(path, "utf-8", "") as file:
        table = list(csv.DictReader(file))
    needed = ["tcp_speed_kbps"] + (["case"] if case is not None else [])
    missing = next((name for name in needed if not table or name not in table[0]), None)
    if missing is not None:
        raise refused(f"devices.lines: {path}: columns", list(table[0]) if table else [], f"'{missing}' in each line")
    values = [
        _speed(path, number, line) for number, line in enumerate(table, 2) if case in (None, _whole(line.get("case")))
    ]
    if not values:
        allowed = ", ".join(sorted({line["case"] or "" for line in table} - {""}))
        raise refused("devices.case", case, f"{allowed}, as {path} has")
    return torch.tensor(values, dtype=torch.float64) * KBIT


def _whole(text: str | None) -> int | None:
    return int(text) if text and len(text) < 20 and text.strip().isdecimal() else None


def _speed(path: Path, number: int, line: dict[str, str]) -> float:
    try:
        series = [float(part) for part in (line["tcp_speed_kbps"] or "").split()]
    except ValueError:
        series = []
    mean = sum(series) / len(series) if series else 0.0
    if not SMALLEST <= mean <= LARGEST:
        where = f"devices.lines: {path}: line {number}"
        raise refused(where, line["tcp_speed_kbps"], "positive numbers separated by blanks")
    return mean
