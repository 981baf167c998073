"""The next-word network: its size, one bias, padding, and branches in the middle of a sequence model."""

import pytest
import torch
from torch import nn

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.models import LSTM, branched
from fedtide.models.branched import mean_over_steps
from fedtide.models.networks import OneBiasLSTM
from helpers.networks import parameters

WORDS, STEPS = 11, 6
TINY = LSTM(embedding=3, hidden=5)
TOKENS = torch.tensor([[1, 4, 2, 10, 3, 1], [5, 6, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0]])
MASK = TOKENS != 0


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return TINY.build((STEPS,), WORDS).double()


# -- size (ALGORITHMS 8.6) ---------------------------------------------------------------------------------------------


def test_the_layers_of_the_next_word_network():
    with torch.device("meta"):
        made = LSTM().build((20,), 10_004)
    sizes = {name: parameters(layer) for name, layer in made.named_children()}
    assert sizes == {"embedding": 960_384, "lstm": 2_055_560, "projection": 64_416, "vocabulary": 970_388}
    assert parameters(made) == 4_050_748
    assert parameters(branched(made, "projection", 2)) == 4_115_164


def test_one_bias_is_torchs_lstm_with_the_second_bias_at_zero():
    torch.manual_seed(0)
    own, theirs = OneBiasLSTM(3, 5).double(), nn.LSTM(3, 5, batch_first=True).double()
    weights = own.cell.weight_ih_l0.detach()
    state = {"weight_ih_l0": weights[:, :3], "bias_ih_l0": weights[:, 3], "bias_hh_l0": torch.zeros(20)}
    theirs.load_state_dict(state | {"weight_hh_l0": own.cell.weight_hh_l0.detach()})
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(own(x), theirs(x)[0])


# -- tokens in, logits out ---------------------------------------------------------------------------------------------


def test_a_step_sees_what_came_before_it_and_nothing_else():
    changed = TOKENS.clone()
    changed[:, 3] = 7
    before, after = tiny()(TOKENS), tiny()(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(-1).any()


def test_padding_at_the_end_changes_nothing_before_it():
    made = tiny()
    torch.testing.assert_close(made(TOKENS)[1, :2], made(TOKENS[1:2, :2])[0])
    assert torch.equal(made.counted(TOKENS), MASK)


@pytest.mark.parametrize("shape", [(1, 28, 28), (), (20, 3)])
def test_rows_that_are_no_sequences_are_one_clear_line(shape):
    with pytest.raises(FedtideError, match=r"^model.kind: 'lstm': shape of rows: found"):
        LSTM().build(shape, 10)


def test_numbers_that_are_no_tokens_are_one_clear_line():
    with pytest.raises(FedtideError, match=r"^model.kind: 'lstm': type of rows: found torch.float32, allowed"):
        TINY.build((STEPS,), WORDS)(torch.rand(2, STEPS))


# -- branches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("feature", ["shared", "branches"])
def test_branches_of_a_sequence_model(count, feature):
    made = branched(tiny(), "projection", count, feature)
    assert parameters(made) == parameters(tiny()) + (count - 1) * (5 * 3 + 3)
    logits, features = made(TOKENS)
    assert logits.shape == (count, 3, STEPS, WORDS)
    assert features.shape == (3, 5 if feature == "shared" else count * 3)
    assert torch.equal(made.features(TOKENS), features)


def test_features_are_the_mean_output_of_the_lstm_over_the_words_of_a_row():
    made = branched(tiny(), "projection", 2)
    _, features = made(TOKENS)
    h = made.model.lstm(made.model.embedding(TOKENS))
    expected = torch.stack([h[0].mean(0), h[1, :2].mean(0), h[2, 0]])
    torch.testing.assert_close(features, expected)


def test_features_of_the_branches_are_their_mean_projections_side_by_side():
    """The authors' code: d = 2 * 96."""
    made = branched(tiny(), "projection", 2, feature="branches")
    _, features = made(TOKENS)
    h = made.model.lstm(made.model.embedding(TOKENS))
    first, second = (layer(h) for layer in made.model.projection.copies)
    expected = torch.cat([mean_over_steps(first, MASK), mean_over_steps(second, MASK)], 1)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(features[1], torch.cat([first[1, :2].mean(0), second[1, :2].mean(0)]))


# -- training ----------------------------------------------------------------------------------------------------------


def sentences(rows: int = 8) -> Shard:
    """Words that follow a rule: the next one is one larger."""
    start = torch.arange(rows)[:, None] % (WORDS - STEPS - 1) + 1
    x = (start + torch.arange(STEPS)).clamp(max=WORDS - 1)
    mask = torch.ones(rows, STEPS, dtype=torch.bool)
    x[::2, 4:], mask[::2, 4:] = 0, False
    return Shard(x, (x + 1).clamp(max=WORDS - 1), torch.arange(rows), mask=mask)


@pytest.mark.parametrize("channels_last", [False, True])
def test_it_learns_and_padding_is_never_learnt(channels_last):
    task = Task(lambda: TINY.build((STEPS,), WORDS), channels_last=channels_last)
    weights, shard = task.init(Rng(0)), sentences()
    solver = LocalTrainer(lr=0.05, optimizer="adam", batch_size=4, epochs=60)
    trained = [detached(solver(task, task.loss, weights, shard, Moment(0, 1), Rng(0)).weights) for _ in range(2)]
    assert same(*trained)
    assert task.objective(trained[0], shard) < 0.5 * task.objective(weights, shard)
    table = "embedding.weight"
    assert torch.equal(trained[0].params[table][0], weights.params[table][0])
    assert not torch.equal(trained[0].params[table][1], weights.params[table][1])
