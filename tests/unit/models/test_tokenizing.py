"""Tokenizers are read once from a folder, until its files change."""

import pytest

from fedtide.core.errors import FedtideError
from fedtide.models.tokenizing import TOKENIZER, bytes_of_tokens, encode, load_tokenizer, padding_of
from helpers.language import WORDS, save

pytest.importorskip("transformers")


def test_a_tokenizer_is_read_once_until_its_files_change(tmp_path):
    first = load_tokenizer(save(tmp_path), "x")
    assert load_tokenizer(tmp_path, "y") is first
    save(tmp_path, words=(*WORDS[:4], *reversed(WORDS[4:])))
    again = load_tokenizer(tmp_path, "x")
    assert [encode(words, ["sun"], None)[0][0] for words in (first, again)] == [[4], [13]]
    (tmp_path / TOKENIZER).write_text("{}")
    for key in ("x", "y"):  # errors are not kept
        with pytest.raises(FedtideError, match=f"^{key}: .*damaged or not a tokenizer"):
            load_tokenizer(tmp_path, key)


def test_nothing_that_is_done_with_a_tokenizer_changes_it(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path), "x")
    before = tokenizer.backend_tokenizer.to_str()
    cut = encode(tokenizer, ["a b a b"], 3)
    whole = encode(tokenizer, ["a b a b"], None)
    assert [len(row) for row, _ in (*cut, *whole)] == [3, 4]
    bytes_of_tokens(tokenizer), padding_of(tokenizer)
    assert encode(tokenizer, ["a b a b"], 3) == cut
    encode(tokenizer, ["a"], None)
    assert tokenizer.backend_tokenizer.to_str() == before
