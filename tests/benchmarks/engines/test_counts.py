"""Counts of chains: ours under an engine's rules, differences, and what an engine's metrics page says."""

from __future__ import annotations

import pytest

from benchmarks.engines.counts import Counts, Round, fitting_chains, full_chains, overshooting_chains
from benchmarks.engines.llama import read_log
from eyas.types import Stats

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 24.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="demo"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 72.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 39.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="0"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="1"} 13.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="2"} 9.0
vllm:generation_tokens_total{engine="0",model_name="demo"} 64.0
"""
LLAMA = """\
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 64
llamacpp:spec_decode_num_draft_tokens_total 70
llamacpp:spec_decode_num_accepted_tokens_total 38
llamacpp:spec_decode_num_drafts_total 24
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 17
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 13
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 8
"""


def test_our_counter_by_position() -> None:
    stats = Stats()
    for accepted in (3, 0, 1, 3):
        stats.record(accepted, 3, 9)
    assert Counts.of(stats, 3) == Counts(4, 12, (3, 2, 2))
    assert Counts.of(stats, 3).accept_length == pytest.approx(1 + 7 / 4)


def test_engines_that_draft_to_the_end_count_before_cutting() -> None:
    rounds = [Round(3, 9), Round(2, 5), Round(3, 2)]
    assert full_chains(rounds, 3) == Counts(3, 9, (3, 3, 2))


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        (Round(3, 4), Counts(1, 3, (1, 1, 1))),
        (Round(3, 3), Counts(1, 2, (1, 1, 0))),
        (Round(3, 2), Counts(1, 1, (1, 0, 0))),
        (Round(3, 1), Counts(0, 0, (0, 0, 0))),
        (Round(0, 2), Counts(1, 1, (0, 0, 0))),
        (Round(3, 9, 0), Counts(1, 3, (0, 0, 0))),
        (Round(3, 9, 1), Counts(1, 3, (1, 0, 0))),
        (Round(3, 9, 2), Counts(1, 3, (1, 1, 1))),
        (Round(3, 3, 1), Counts(1, 2, (1, 1, 0))),
    ],
)
def test_engines_that_leave_no_token_unused_draft_what_fits(last: Round, counts: Counts) -> None:
    before = fitting_chains([Round(2, 64)], 3)
    assert fitting_chains([Round(2, 64), last], 3) == before + counts


def _always_three(_: int) -> int:
    return 3


@pytest.mark.parametrize(
    ("limit", "end", "counts"),
    [
        (8, None, Counts(3, 9, (3, 3, 3))),  # 3 of 3, 3 of 3, and 3 although none fits
        (7, None, Counts(3, 8, (3, 3, 2))),  # 3 of 3, 2 of 2, and 3
        (6, None, Counts(3, 7, (3, 2, 2))),
        (5, None, Counts(2, 6, (2, 2, 2))),  # 3 of 3, and 3 as only the bonus token fits
        (99, 5, Counts(2, 6, (2, 1, 1))),  # the end mark isn't accepted
        (99, 6, Counts(2, 6, (2, 2, 2))),  # but as the last of the draft
        (99, 7, Counts(2, 6, (2, 2, 2))),  # the bonus token
    ],
)
def test_the_example_program_drafts_full_chains_again_at_the_end(limit: int, end: int | None, counts: Counts) -> None:
    assert overshooting_chains(_always_three, 3, limit, end) == counts


def test_the_largest_difference_counts() -> None:
    ours = Counts(100, 300, (200, 100, 50))
    assert ours.difference(ours) == 0
    assert ours.difference(Counts(100, 300, (200, 101, 50))) == pytest.approx(0.01)
    assert ours.difference(Counts(100, 300, (200, 100, 48))) == pytest.approx(0.04)
    assert Counts(1, 3, (0, 0, 0)).difference(Counts(1, 3, (1, 0, 0))) == float("inf")


@pytest.mark.parametrize(
    ("page", "counts"), [(VLLM, Counts(24, 72, (17, 13, 9))), (LLAMA, Counts(24, 70, (17, 13, 8)))]
)
def test_both_engines_pages_are_read(page: str, counts: Counts) -> None:
    assert Counts.of_page(page, 3) == counts
    assert Counts.of_page("", 3) == Counts.none(3)
    with pytest.raises(ValueError, match="chains of 2"):
        Counts.of_page(page, 2)


def test_pages_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="chains of 3"):
        Counts.of_page(VLLM.replace("39.0", "40.0"), 3)


def test_the_example_programs_log_is_read_round_by_round() -> None:
    log = """\
0.1 D spec  - seq_id 0, draft candidate   0, pos   0:     11 (   0.900) 'a'
0.1 D spec  - seq_id 0, draft candidate   1, pos   0:     99 (   0.100) '
'
0.1 D spec  - seq_id 0, draft candidate   0, pos   1:     12 (   0.800) '('
0.1 D accepted 1/2 draft tokens, the last target token is: (13)
0.1 D accepted 0/0 draft tokens, the last target token is: (14)
0.1 D spec  - seq_id 0, draft candidate   0, pos   0:      1 (   0.800) ''
0.1 D accepted 1/1 draft tokens, the last target token is: (1)
"""
    assert read_log(log, 2, end=1) == ([11, 13, 14, 1], Counts(2, 3, (2, 0)))
    assert read_log(log, 2, end=0)[0] == [11, 13, 14, 1, 1]
