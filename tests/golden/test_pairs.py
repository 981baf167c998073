"""Pairs of a prompt and an answer, by hand: what is given has no loss, no bytes and no part in any measure.

The words are tokens of their own: sun 4, moon 5, day 6, is 8, up 9; the mark of the end [SEP] is 3, padding [PAD] is 0.

    prompt      answer     tokens                 given to the model      to be predicted
    sun is      up day     sun is up day SEP      sun is up  day SEP      -  up day SEP -
    moon        up         moon up SEP            moon up SEP PAD PAD     up SEP -  -   -

So 5 tokens count. Letters of `up`, `day` and `up` are 2 + 3 + 2 = 7 bytes, and the marks have none.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from fedtide.core.base import Prediction, Shard
from fedtide.core.errors import FedtideError
from fedtide.data import texts
from fedtide.evaluate.metrics import PERPLEXITY, bits_per_byte
from fedtide.fleets.scoring import Tally
from fedtide.learn.losses import CrossEntropy
from helpers.language import TOKENS, WORDS, save

pytest.importorskip("transformers")

PAD, UNK, CLS, SEP, SUN, MOON, DAY, NIGHT, IS, UP, GOOD, BYE, A, B = range(TOKENS)
SIZES = torch.tensor([0.0 if word.startswith("[") else float(len(word)) for word in WORDS])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save(tmp_path_factory.mktemp("model"), "llama"))


def pairs(model: str, prompts: list[str], answers: list[str], context: int):
    table = {"question": prompts, "answer": answers}
    return texts(table, tokenizer=model, prompt="question", text="answer", context=context)


def test_a_pair_is_a_row_whose_prompt_has_no_labels(model):
    rows = pairs(model, ["sun is", "moon"], ["up day", "up"], 5)
    assert rows.x.tolist() == [[SUN, IS, UP, DAY, SEP], [MOON, UP, SEP, PAD, PAD]]
    assert rows.padding == PAD
    assert rows.y.tolist() == [[PAD, UP, DAY, SEP, PAD], [UP, SEP, PAD, PAD, PAD]]
    assert rows.mask(rows.y).tolist() == [[False, True, True, True, False], [True, True, False, False, False]]
    assert (rows.classes, rows.cut) == (TOKENS, 0)


def test_measures_are_of_the_answer_alone(model):
    """Each label of an answer has 1/2, and no other token has as much; but the first mark has 1/4, and `up` has 3/4.

    So 4 of 5 are right. The loss is (4 ln 2 + ln 4) / 5 = 1.2 ln 2, so perplexity is 2^1.2; 6 bits over 7 bytes.
    Prompts and padding are guessed as badly as can be, with a probability of 0.
    """
    rows = pairs(model, ["sun is", "moon"], ["up day", "up"], 5)
    counted = rows.mask(rows.y)
    share = torch.zeros(2, 5, TOKENS)
    share[..., A] = share[..., B] = 0.25
    share.scatter_(-1, rows.y[..., None], 0.5)
    share[0, 3] = 0.0
    share[0, 3, SEP], share[0, 3, UP] = 0.25, 0.75
    share[..., PAD] = 0.0
    logp = share.log()
    tally = Tally(1, ("tokens",))
    tally.add(torch.zeros(2, dtype=torch.int64), Prediction(logp), rows.y, counted)
    scores = tally.scores(torch.zeros(1, dtype=torch.int64))
    assert float(scores.rows.sum()) == 5
    assert scores.accuracy == pytest.approx(4 / 5)
    assert PERPLEXITY.of(scores) == pytest.approx(2**1.2, rel=1e-6)
    assert bits_per_byte(SIZES).of(scores) == pytest.approx(6 / 7, rel=1e-6)
    loss = CrossEntropy()
    shard = Shard(rows.x, rows.y, torch.arange(2), mask=counted)
    finite = logp.clamp(min=-50).requires_grad_()
    value = loss.value(finite, rows.y, *loss.prepare(shard))
    assert float(value.detach()) == pytest.approx(1.2 * math.log(2), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, finite)
    assert not gradient[~counted].any()
    assert gradient[counted].any(-1).all()


def test_the_beginning_of_a_prompt_is_cut_first_and_then_the_end_of_an_answer(model):
    rows = pairs(model, ["sun is up day", "sun moon", "sun"], ["bye", "day night day bye", "bye"], 3)
    assert rows.x.tolist() == [[UP, DAY, BYE], [MOON, DAY, NIGHT], [SUN, BYE, SEP]]
    assert rows.y.tolist() == [[PAD, BYE, SEP], [DAY, NIGHT, DAY], [BYE, SEP, PAD]]
    assert rows.cut == 2


def test_the_mark_of_an_end_is_learned_though_it_is_the_padding(tmp_path):
    """Without a padding of its own the tokenizer pads with [SEP]; then another mark stands for what is given."""
    rows = pairs(changed(tmp_path, pad_token=None), ["sun is", "moon"], ["up day", "up"], 5)
    assert rows.x.tolist() == [[SUN, IS, UP, DAY, SEP], [MOON, UP, SEP, SEP, SEP]]
    assert rows.padding not in (SEP, UP, DAY)
    assert rows.y.masked_fill(~rows.mask(rows.y), -1).tolist() == [[-1, UP, DAY, SEP, -1], [UP, SEP, -1, -1, -1]]


def test_a_mark_of_the_beginning_is_there_if_the_tokenizer_has_one(tmp_path):
    """The tokenizer puts [CLS] before every text."""
    rows = pairs(changed(tmp_path, bos_token="[CLS]"), ["sun is", "moon"], ["up", "up"], 5)
    assert rows.x.tolist() == [[CLS, SUN, IS, UP, SEP], [CLS, MOON, UP, SEP, PAD]]
    assert rows.y.tolist() == [[PAD, PAD, UP, SEP, PAD], [PAD, UP, SEP, PAD, PAD]]


def changed(folder: Path, **marks: str | None) -> str:
    """A model whose tokenizer has other marks."""
    file = save(folder, "llama") / "tokenizer_config.json"
    content = json.loads(file.read_text()) | marks
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return str(folder)


def test_columns_and_mistakes(model, tmp_path):
    table = {"q": ["sun", "moon"], "a": ["up", "a b"], "who": ["ann", "bob"], "when": ["2024-01-02", "2024-01-01"]}
    keys = {"tokenizer": model, "prompt": "q", "text": "a", "context": 4}
    rows = texts(table, client="who", time="when", **keys)
    assert (rows.client.tolist(), rows.time.diff().tolist()) == ([0, 1], [-86_400.0])  # in the order of the table
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"q": "sun", "a": ["up", "up day"]}\n')  # several answers
    assert texts(str(file), **keys).x.tolist() == [[SUN, UP, SEP, PAD], [SUN, UP, DAY, SEP]]
    with pytest.raises(FedtideError, match="found prompt and label; allowed: one"):
        texts(table, label="who", **keys)
    with pytest.raises(FedtideError, match="table: row 1: q is empty"):
        texts(table | {"q": ["sun", " "]}, **keys)
