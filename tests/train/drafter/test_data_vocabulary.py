"""The draft vocabulary: most frequent answer tokens, end tokens always, any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.drafters.network import set_vocabulary
from eyas.errors import ConfigError
from eyas.targets.tokenizers import eos_token_ids, turn_end_ids
from eyas.train.drafter.data import KNOWN, DraftVocabulary, choose_draft_vocabulary, count_answer_tokens

from ... import tiny


def test_only_answer_tokens_count() -> None:
    row = TokenRow(np.array([1, 1, 5, 5, 3]), np.array([False, True, True, True, False]))
    assert count_answer_tokens([row, row], 7).tolist() == [0, 2, 0, 0, 0, 4, 0]


def test_most_frequent_sorted_by_id_with_end_tokens() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0, 2])
    assert choose_draft_vocabulary(counts, 3, []).tolist() == [0, 2, 4]
    assert choose_draft_vocabulary(counts, 3, [5]).tolist() == [2, 4, 5]
    assert choose_draft_vocabulary(torch.tensor([1, 1, 1, 1]), 2, []).tolist() == [0, 1]


def test_more_than_the_distinct_tokens_fills_with_the_lowest_unused() -> None:
    assert choose_draft_vocabulary(torch.tensor([0, 0, 0, 0, 3, 1]), 4, [4]).tolist() == [0, 1, 4, 5]
    assert choose_draft_vocabulary(torch.zeros(6, dtype=torch.int64), 6, []).tolist() == list(range(6))


@pytest.mark.parametrize("size", [0, 1, 8])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        choose_draft_vocabulary(torch.zeros(7, dtype=torch.int64), size, [1, 2])


def test_maps_agree() -> None:
    module = Eagle3Network(
        Eagle3Config(
            hidden_size=4,
            intermediate_size=4,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=4,
            vocab_size=9,
            draft_vocab_size=3,
            target_hidden_size=4,
        )
    )
    set_vocabulary(module, torch.tensor([2, 5, 8]))
    assert module.d2t.tolist() == [2, 4, 6]
    assert module.target_ids.tolist() == [2, 5, 8]
    assert module.t2d.nonzero().flatten().tolist() == [2, 5, 8]


def test_a_run_keeps_tokens_of_its_start_unless_others_are_clearly_more_frequent(tokenizer: Any) -> None:
    target = tiny.target("llama")
    ends = {*eos_token_ids(target.model), *turn_end_ids(tokenizer)}
    answer = np.repeat(np.array([10, 11, 12]), [KNOWN + 1, KNOWN - 1, 1])
    rows = [TokenRow(answer, np.ones(len(answer), dtype=np.bool_))]
    size = len(ends) + 2
    fresh, going_on = (
        set(DraftVocabulary.chosen(rows, size, target, tokenizer, known).ids.tolist()) - ends
        for known in (None, torch.tensor([12, 13]))
    )
    assert fresh == {10, 11}
    assert going_on == {10, 12}
