"""Likelihoods of answers by hand, and continuations.

A network of three tokens looks at the last token alone. The next one is 0, 1 or 2 with these probabilities:

    after 0    1/4  1/2  1/4
    after 1    1/8  1/8  3/4
    after 2    1/2  1/4  1/4

After the prompt 2 1 the answer 2 has 3/4. The answer 2 0 1 has 3/4 * 1/2 * 1/2 = 3/16. The answer 1 1 1 has 1/8^3.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedtide.runs.language import continue_greedily, log_likelihoods
from fedtide.runs.trained import Mixture
from helpers.language import WORDS, predictor

TABLE = torch.tensor([[1 / 4, 1 / 2, 1 / 4], [1 / 8, 1 / 8, 3 / 4], [1 / 2, 1 / 4, 1 / 4]])


class Last(nn.Module):
    """Logits of the table, shifted: they are no log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(TABLE.log() + 3.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("padding", [0, 1])
def test_the_likelihood_of_an_answer_is_that_of_its_tokens_after_the_prompt(padding):
    told = log_likelihoods(Last(), [2, 1], [[2], [2, 0, 1], [1, 1, 1], []], padding)
    assert told[:3].tolist() == pytest.approx([math.log(p) for p in (3 / 4, 3 / 16, 1 / 512)], rel=1e-6)
    assert float(told[3]) == -math.inf


def test_a_continuation_takes_the_most_likely_token_up_to_the_end():
    """After 1 comes 2, then 0, then 1: a circle, which an end of 0 stops."""
    for end, ids in ((None, [2, 0, 1, 2, 0]), (0, [2, 0])):
        assert continue_greedily(Last(), [2, 1], 5, SimpleNamespace(eos_token_id=end)) == ids


def test_a_mixture_of_networks_is_continued_by_their_mean_probability():
    """The other network has the rows of 0 and 1 exchanged: after 1 the sums are 3/8, 5/8 and 1, so 2 comes."""
    other = Last()
    with torch.no_grad():
        other.table.copy_(TABLE[[1, 0, 2]].log())
    network = Mixture([Last(), other], [0.5, 0.5])
    expected = []
    last = 1
    for _ in range(4):
        expected.append(int((TABLE[last] + TABLE[[1, 0, 2]][last]).argmax()))
        last = expected[-1]
    assert expected[0] == 2
    assert continue_greedily(network, [1], 4, SimpleNamespace(eos_token_id=None)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_the_library_continues_as_a_loop_does(seed):
    pytest.importorskip("transformers")
    torch.manual_seed(seed)
    network = predictor().eval()
    with torch.no_grad():
        for param in network.parameters():
            param.mul_(20)  # far from even
    tokenizer = SimpleNamespace(eos_token_id=3, pad_token_id=0)
    for prompt in ([4], [5, 8, 9], [13, 2]):
        ids = continue_greedily(network, prompt, 3, tokenizer)
        assert ids == continue_greedily(Mixture([network], [1.0]), prompt, 3, tokenizer)
        assert 0 < len(ids) <= 3
        assert max(ids) < len(WORDS)
