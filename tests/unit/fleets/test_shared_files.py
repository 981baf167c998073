"""Trees in files: what is read is what was written last, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtide.core.base import Weights
from fedtide.core.trees import same
from fedtide.fleets.pool import read_shared, write_shared
from helpers.examples import examples

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def made(dtype: torch.dtype, shape: list[int], seed: int, layout: str) -> torch.Tensor:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    return tensor[..., ::2] if layout == "strided" and tensor.dim() else tensor


tensors = st.builds(
    made, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 9),
    st.sampled_from(["plain", "transposed", "strided"]),
)  # fmt: skip
leaves = tensors | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
trees = st.recursive(
    leaves,
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(st.text(min_size=1, max_size=3) | st.integers(0, 3), below, max_size=3)
        | st.builds(Weights, st.dictionaries(st.sampled_from("abc"), tensors, max_size=2))
    ),
    max_leaves=6,
)


@settings(examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(trees, min_size=1, max_size=4))
def test_what_is_read_is_what_was_written_last(tmp_path_factory, series):
    """Larger and smaller trees one after the other, over each other."""
    path = tmp_path_factory.mktemp("shared") / "file"
    for tree in series:
        write_shared(path, tree)
        assert same(read_shared(path), tree)
        assert same(read_shared(path), tree)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2)[::2],
        torch.zeros(4, 4)[1:2, ::4],
        torch.zeros(0, 3)[:, ::2],
        torch.ones(()),
        torch.ones(3).expand(2, 3),
        torch.ones(2, 2, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_any_layout_survives(tmp_path, tensor):
    write_shared(tmp_path / "file", {"x": tensor})
    back = read_shared(tmp_path / "file")["x"]
    assert back.tolist() == tensor.tolist()
    assert back.is_contiguous()
