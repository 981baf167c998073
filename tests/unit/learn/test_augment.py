"""Augmentation: what is drawn, from which key, and who sees it."""

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedtem import fedtem
from fedtide.algorithms.scaffold import scaffold
from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.data.transforms import Normalize
from fedtide.learn.local import Flip, LocalTrainer, RandomCrop
from fedtide.learn.task import Task
from fedtide.mixtures.priors import Linear
from fedtide.runs.preflight import preflight
from helpers.studies import A
from helpers.toys import played

KEY, NOW = Rng(0).at(0, 3, "train"), Moment(0, 10)


def drawing(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(rows: int, depth: int = 2, height: int = 5, width: int = 4, kind=torch.float32) -> torch.Tensor:
    """Every pixel of every picture is another number."""
    return torch.arange(1, rows * depth * height * width + 1, dtype=kind).reshape(rows, depth, height, width)


# -- what is drawn -----------------------------------------------------------------------------------------------------


def cropped(picture: torch.Tensor, padding: int, high: int, wide: int, top: int, left: int) -> torch.Tensor:
    """A window, pixel by pixel; zero outside."""
    depth, height, width = picture.shape
    out = torch.zeros(depth, high, wide, dtype=picture.dtype)
    for c in range(depth):
        for i in range(high):
            for j in range(wide):
                row, column = top + i - padding, left + j - padding
                if 0 <= row < height and 0 <= column < width:
                    out[c, i, j] = picture[c, row, column]
    return out


def test_a_border_of_black_is_black_after_normalizing_too():
    """Normalised pictures with a border of (0 - mean)/std are what normalizing padded pictures gives."""
    change = Normalize(mean=(0.5, 0.4), std=(0.25, 0.2))
    x = torch.rand(5, 2, 6, 6, generator=drawing(1))
    found = RandomCrop(2, fill=(-2.0, -2.0))(change.apply(x), drawing())
    torch.testing.assert_close(found, change.apply(RandomCrop(2)(x, drawing())))


def test_a_border_may_repeat_the_edge():
    x = pictures(4)
    found = RandomCrop(2, fill="edge")(x, drawing())
    draw = drawing()
    top, left = (torch.randint(5, (4,), generator=draw).tolist() for _ in range(2))
    for picture, window, i, j in zip(x, found, top, left, strict=True):
        rows, columns = ([min(max(k + at - 2, 0), size - 1) for k in range(size)] for at, size in ((i, 5), (j, 4)))
        assert torch.equal(window, picture[:, rows][:, :, columns])


def test_a_fill_has_a_number_for_each_channel():
    with pytest.raises(FedtideError, match=r"fill: found \[0.0\], allowed: 2 numbers, one per channel"):
        RandomCrop(1, fill=(0.0,)).shape((2, 5, 4))


@pytest.mark.parametrize(("padding", "size"), [(2, None), (0, None), (1, 3), (3, 10), (0, 4), (4, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_crop_is_a_window_of_each_padded_picture_at_its_own_place(padding, size, layout):
    x = pictures(9).contiguous(memory_format=layout)
    found = RandomCrop(padding, size)(x, drawing())
    high, wide = (5, 4) if size is None else (size, size)
    draw = drawing()
    top = torch.randint(5 + 2 * padding - high + 1, (9,), generator=draw).tolist()
    left = torch.randint(4 + 2 * padding - wide + 1, (9,), generator=draw).tolist()
    expected = torch.stack([cropped(x[i], padding, high, wide, top[i], left[i]) for i in range(9)])
    assert torch.equal(found, expected)
    assert found.dtype == x.dtype


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_a_flip_mirrors_each_picture_on_its_own(p):
    x = pictures(400, depth=1, height=2, width=3)
    found = Flip(p)(x, drawing())
    mirrored = (found == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (found == x).flatten(1).all(1)).all())
    assert abs(int(mirrored.sum()) - 400 * p) <= 3 * (400 * p * (1 - p)) ** 0.5
    assert torch.equal(mirrored, torch.rand(400, generator=drawing()) < p)


# -- from which key ----------------------------------------------------------------------------------------------------

NET = Task(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)))
"""For pictures of 4 x 4."""


def shard(rows: int = 10, kind=torch.float32) -> Shard:
    x = torch.rand(rows, 1, 4, 4, generator=drawing(rows), dtype=kind)
    return Shard(x, torch.arange(rows) % 3, torch.arange(rows))


def trained(solver: LocalTrainer, held: Shard | None = None, key: Rng = KEY, task: Task = NET):
    """The weights after local training."""
    return detached(solver(task, task.loss, task.init(Rng(1)), held or shard(), NOW, key).weights)


def test_the_clients_key_alone_decides():
    solver = LocalTrainer(0.1, batch_size=4, epochs=2, augment=(RandomCrop(1), Flip()))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = trained(solver)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, trained(solver))
    for other in (Rng(0).at(0, 4, "train"), Rng(0).at(1, 3, "train"), Rng(1).at(0, 3, "train")):
        assert not same(first, trained(solver, key=other))


def test_none_changes_no_bit_and_no_shuffle():
    plain = trained(LocalTrainer(0.1, batch_size=4, epochs=2))
    assert same(plain, trained(LocalTrainer(0.1, batch_size=4, epochs=2, augment=())))
    assert same(plain, trained(LocalTrainer(0.1, batch_size=4, epochs=2, augment=(RandomCrop(0), Flip(0.0)))))
    assert not same(plain, trained(LocalTrainer(0.1, batch_size=4, epochs=2, augment=(Flip(),))))


# -- who sees it -------------------------------------------------------------------------------------------------------


class Watching(nn.Module):
    """Keeps what it is given, in training and in evaluation; with a head, so that it can have branches."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Linear(16, 3)
        self.seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[self.training].append(x.detach().clone())
        return self.head(self.flatten(x))


def watched(algorithm, task: Task, watching: list[Watching]):
    """What the module saw in two rounds with evaluations, in training and in evaluation, and all pictures there are."""
    x = torch.rand(60, 1, 4, 4, generator=drawing(1)) + 1.0
    domain = torch.arange(60) % 2
    people = ft.population(
        x, torch.arange(60) % 3, ft.data.IID(clients=4), domain=domain,
        groups=ft.data.ByDomain(), split=ft.data.Split(val=0.2),
        shift=ft.Shift(who=ft.shift.Periodic(period=4)),
    )  # fmt: skip
    ft.simulate(algorithm(task), people, rounds=2, eval_every=1)
    seen = {phase: torch.cat([s for w in watching for s in w.seen[phase] if len(s)]) for phase in (True, False)}
    return seen[True], seen[False], x


def known(pictures: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Which pictures are in `x` as they are."""
    return (pictures.flatten(1)[:, None] == x.flatten(1)[None]).all(2).any(1)


@pytest.mark.parametrize("method", ["fedavg", "q-fedavg", "fedtem", "scaffold", "scaffold-I"])
def test_only_local_training_sees_it(method):
    watching: list[Watching] = []
    task = Task(lambda: watching.append(Watching()) or watching[-1], example=torch.zeros(1, 1, 4, 4))
    local, cohort = LocalTrainer(0.1, batch_size=5, augment=(Flip(1.0),)), ft.cohorts.Arrivals(2)
    made = {
        "fedavg": lambda task: ft.algorithms.fedavg(task, local, cohort=cohort),
        "q-fedavg": lambda task: ft.algorithms.q_fedavg(task, local, q=1.0, cohort=cohort),
        "fedtem": lambda task: fedtem(task, local, prior=Linear(4), cohort=cohort),
        "scaffold": lambda task: scaffold(task, local, cohort=cohort),
        "scaffold-I": lambda task: scaffold(task, local, variant="I", cohort=cohort),
    }[method]
    training, evaluated, x = watched(made, task, watching)
    as_they_are = known(evaluated, x)
    blank = (evaluated == 0).flatten(1).all(1)  # the example row of methods with features
    assert bool((as_they_are | blank).all())
    plain = known(training, x)
    assert bool((plain | known(training, x.flip(-1))).all())
    # The extra pass of option I takes the gradient of the rows as they are; steps never do.
    assert bool(plain.any()) == (method == "scaffold-I")
    assert not bool(plain.all())


# -- in a file ---------------------------------------------------------------------------------------------------------


def experiment(augment, source="day-night-characters", model="small-cnn", **local):
    if source == "day-night-characters":
        data = {"source": source, "partition": {"kind": "resample", "clients": 4, "samples": 12}}
    else:
        data = {"source": source, "partition": {"kind": "iid", "clients": 4}}
    method = {**A, "cohort": 2, "local": {"lr": 0.1, "batch_size": 4, "augment": augment, **local}}
    return from_dict({"data": data, "model": model, "rounds": 2, "method": [method]})


def test_it_is_spelled_as_words_or_tables():
    made = experiment(["flip", {"kind": "random-crop", "padding": 2}])
    assert made.method[0].settings()["local"].augment == (Flip(), RandomCrop(2))
    preflight(made)
    run, again = played(made), played(made)
    assert same(run.state, again.state)
    assert not same(run.state, played(experiment([])).state)


@pytest.mark.parametrize(
    ("augment", "line"),
    [
        (["flop"], "local.augment[0]: found 'flop', did you mean 'flip'? Allowed: random-crop, flip"),
        (
            [{"kind": "flip", "q": 1}],
            "local.augment[0].q: unknown key; did you mean 'q' in [[method]] or [defaults]? Allowed: p, kind",
        ),
        ([{"kind": "flip", "p": 1.5}], "local.augment[0].p: found 1.5, allowed: 1.0 or less"),
        ([{"kind": "random-crop", "padding": -1}], "local.augment[0].padding: found -1, allowed: 0 or more"),
        ("flip", "local.augment: found 'flip', allowed: a list of values"),
    ],
)
def test_a_mistake_in_it_is_one_clear_line(augment, line):
    with pytest.raises(FedtideError) as raised:
        experiment(augment)
    assert line in str(raised.value)


def test_rows_that_are_no_pictures_are_refused_before_anything_runs():
    toy = {"kind": "gaussians", "samples": 40, "dims": 4}
    for kind in ("flip", "random-crop"):
        with pytest.raises(FedtideError) as raised:
            preflight(experiment([kind], toy, "linear"))
        line = f"method 'A'.local.augment: '{kind}': shape of rows: found (4,), allowed: (channels, height, width)"
        assert str(raised.value).startswith(line)
    held = Shard(torch.zeros(2, 3), torch.arange(2), torch.arange(2))
    with pytest.raises(FedtideError, match=r"^local.augment: 'flip': shape of rows: found"):
        LocalTrainer(augment=(Flip(),))(NET, NET.loss, NET.init(Rng(0)), held, NOW, KEY)


def test_a_window_larger_than_the_padded_picture_is_refused():
    with pytest.raises(FedtideError) as raised:
        preflight(experiment([{"kind": "random-crop", "padding": 1, "size": 31}]))
    line = "size: found 31, allowed: at most 30, the smaller side of pictures of 28 x 28 with the padding of 1"
    assert line in str(raised.value)
    with pytest.raises(FedtideError, match="at most 12, the smaller side of pictures of 10 x 10 with"):
        preflight(experiment([{"kind": "random-crop", "size": 10}, {"kind": "random-crop", "padding": 1, "size": 13}]))


def test_a_window_that_the_model_cannot_take_is_refused():
    with pytest.raises(FedtideError, match=r"^model: it does not fit rows of shape \(1, 24, 24\)"):
        preflight(experiment([{"kind": "random-crop", "padding": 0, "size": 24}]))
    small = {"kind": "resnet8", "width": 2}
    preflight(experiment([{"kind": "random-crop", "padding": 0, "size": 24}], model=small))
