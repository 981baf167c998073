"""Perplexity and bits per byte of guesses that are made by hand."""

import math

import pytest
import torch

from fedtide.core.base import Prediction
from fedtide.evaluate.metrics import PERPLEXITY, bits_per_byte
from fedtide.fleets.scoring import Tally
from fedtide.models.tokenizing import bytes_of_tokens, load_tokenizer
from helpers.language import TOKENS, WORDS, save

PAD, UNK, CLS, SEP, SUN, MOON, DAY, NIGHT, IS, UP, GOOD, BYE, A, B = range(TOKENS)


def test_padding_does_not_count_and_marks_have_no_bytes():
    """Of a guess that is even over 14 tokens each of 4 has log2 14 bits; they have 3 + 2 + 0 + 4 = 9 bytes."""
    y = torch.tensor([[SUN, IS, SEP, PAD], [MOON, PAD, PAD, PAD]])
    logp = torch.full((2, 4, TOKENS), -math.log(14))
    logp[y == PAD] = -math.inf  # a loss there would be infinite
    tally = Tally(1, ("tokens",))
    for row in (slice(0, 1), slice(1, 2)):  # sums of two blocks
        tally.add(torch.zeros(1, dtype=torch.int64), Prediction(logp[row]), y[row], y[row] != PAD)
    scores = tally.scores(torch.zeros(1, dtype=torch.int64))
    sizes = torch.tensor([float(0 if word.startswith("[") else len(word)) for word in WORDS])
    assert float(scores.rows.sum()) == 4
    assert PERPLEXITY.of(scores) == pytest.approx(14, rel=1e-6)
    assert bits_per_byte(sizes).of(scores) == pytest.approx(4 * math.log2(14) / 9, rel=1e-6)


def test_marks_alone_have_no_bits_per_byte():
    y = torch.tensor([[SEP]])
    tally = Tally(1, ("tokens",))
    tally.add(torch.zeros(1, dtype=torch.int64), Prediction(torch.full((1, 1, 14), -1.0)), y, y != PAD)
    assert math.isnan(bits_per_byte(torch.zeros(14)).of(tally.scores(torch.zeros(1, dtype=torch.int64))))


def test_bytes_of_words_and_of_pieces_of_letters(tmp_path):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = load_tokenizer(save(tmp_path), "x")
    # the toy does not say of [CLS] that it is a mark
    assert bytes_of_tokens(words).tolist() == [0, 0, 6, 0, *(len(word) + 1 for word in WORDS[4:])]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {"<end>": 0, **{letter: number for number, letter in enumerate(letters, 1)}}
    plain = Tokenizer(models.BPE(known, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pieces = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    text = "na\u00efve day \u2014"
    ids = pieces(text)["input_ids"]
    sizes = bytes_of_tokens(pieces)
    assert sizes[0] == 0
    assert float(sizes[ids].sum()) == len(text.encode())
