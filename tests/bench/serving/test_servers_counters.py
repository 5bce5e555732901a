"""Engines' own counters, read from pages such as theirs."""

from __future__ import annotations

import sys

import pytest

from eyas.bench.serving.servers import SpeculationCounts, read_metrics, read_server_info
from eyas.errors import UsageError

VLLM = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 19.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 6e1
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.79e+09
vllm:num_requests_running{engine="0"} 3.0
"""


@pytest.mark.parametrize("prefix", ["vllm", "eyas", "llamacpp"])
def test_counters_by_name_over_all_labels(prefix: str) -> None:
    found = read_metrics(VLLM.replace("vllm:", f"{prefix}:"))
    assert found == SpeculationCounts(20.0, 60.0, 30.0, (15.0, 10.0))
    assert (found.accept_length, found.rates) == (2.5, [0.75, 0.5])


def test_sglangs_gauge_and_page() -> None:
    page = 'sglang:spec_accept_length{tp_rank="0"} 2.0\nsglang:spec_accept_length{tp_rank="1"} 3.0\n'
    found = read_metrics(page + 'sglang:spec_accept_length{tp_rank="2"} 0.0\n')  # a rank that had nothing to do
    assert found is not None
    assert (found.accept_length, found.rates) == (2.5, [])
    info = read_server_info({"internal_states": [{"avg_spec_accept_length": 3.1}, {"avg_spec_accept_length": None}]})
    assert info is not None
    assert info.accept_length == 3.1


def test_pages_without_counters() -> None:
    assert read_metrics("llamacpp:prompt_tokens_total 3\n") is None
    for page in ("", "<html>no metrics here</html>", "eyas:spec_decode_num_drafts_total many\n"):
        assert read_metrics(page) is None
    for info in ({}, [], {"internal_states": None}, {"internal_states": [{"last_gen_throughput": 1.0}, 3]}):
        assert read_server_info(info) is None
    assert SpeculationCounts().accept_length is None


def test_label_values_may_hold_anything() -> None:
    labels = 'model_name="a, \\"b\\" {c} position=\\"9\\"",position="0"'
    page = f"vllm:spec_decode_num_drafts_total 2\nvllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} 1\n"
    found = read_metrics(page)
    assert found is not None
    assert found.by_position == (1.0,)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with pytest.raises(UsageError, match=r"pip install 'eyas\[serve\]'"):
        read_metrics("")


def test_a_while_is_a_difference() -> None:
    before = SpeculationCounts(1.0, 3.0, 2.0, (1.0,), 4.0)
    after = SpeculationCounts(3.0, 9.0, 4.0, (2.0, 1.0), 5.0)
    assert after - before == SpeculationCounts(2.0, 6.0, 2.0, (1.0, 1.0), 5.0)  # the latest mean, not a difference
    assert before + after == SpeculationCounts(4.0, 12.0, 6.0, (3.0, 1.0), 5.0)
    assert sum([before, SpeculationCounts()], SpeculationCounts()) == before
