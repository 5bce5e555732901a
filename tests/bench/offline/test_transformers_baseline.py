"""The second baseline: transformers' own generate, its tokens plain decoding's, counted as plain decoding is."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.bench.offline.external import TransformersBaseline
from eyas.bench.offline.runner import read_tasks, run_group
from eyas.errors import UsageError
from eyas.session import load
from eyas.types import SamplingParams

from ... import pairs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs.save_target(tmp_path_factory.mktemp("target"))


def rows(folder: Path) -> Path:
    texts = ["def add(a, b):", "Natalia sold 48 clips", "a + b"]
    chats = [{"turns": ["Natalia", "in May."]}]
    return pairs.write_rows(folder / "rows.jsonl", [*({"prompt": text, "raw": True} for text in texts), *chats])


@pytest.mark.every(2)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("stops", [(), tuple(range(50, 300, 9))])
def test_answers_and_counts_are_those_of_plain_decoding(
    model: Path, tmp_path: Path, batch: int, stops: tuple[int, ...]
) -> None:
    engine = load(model, dtype="float32", batch_size=batch)
    baseline = TransformersBaseline(model, engine)
    params = SamplingParams(max_tokens=20, stop_token_ids=stops)
    found = set()
    for group in read_tasks([rows(tmp_path)], batch)[0].groups:
        plain = run_group(engine, group, params)
        theirs = baseline.run_group(group, params)
        assert theirs.token_ids == plain.token_ids
        assert theirs.errors == []
        assert theirs.stats.tokens == plain.stats.tokens
        assert theirs.stats.target_passes == theirs.stats.decoded_tokens == plain.stats.decoded_tokens
        assert theirs.stats.accept_length in (0.0, 1.0)
        assert theirs.stats.prefill_seconds > 0
        assert theirs.stats.decode_seconds > 0
        found.update(map(len, plain.token_ids))
    assert len(found) > 1 if stops else found == {20}


def test_what_a_checkpoint_bans_or_penalizes_does_not_count(tmp_path: Path) -> None:
    model = pairs.save_target(tmp_path)
    settings = '{"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "do_sample": true}'
    (model / "generation_config.json").write_text(settings, encoding="utf-8")
    engine = load(model, dtype="float32")
    rows = pairs.write_rows(tmp_path / "rows.jsonl", [{"prompt": "aaa", "raw": True}])
    (group,) = read_tasks([rows], 1)[0].groups
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    theirs = TransformersBaseline(model, engine).run_group(group, params)
    assert theirs.token_ids == run_group(engine, group, params).token_ids
    assert len(set(theirs.token_ids[0])) < 30


def test_a_row_that_is_too_long_is_an_error_and_the_others_are_answered(model: Path, tmp_path: Path) -> None:
    engine = load(model, dtype="float32", batch_size=2)
    rows = pairs.write_rows(tmp_path / "rows.jsonl", [{"token_ids": [5] * 300}, {"token_ids": [5, 6]}])
    (group,) = read_tasks([rows], 2)[0].groups
    done = TransformersBaseline(model, engine).run_group(group, SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(tokens) for tokens in done.token_ids] == [3]
    assert "shorten the prompt" in done.errors[0]


def test_sampling_is_refused(model: Path) -> None:
    baseline = TransformersBaseline(model, load(model, dtype="float32"))
    for params in (SamplingParams(temperature=1.0), SamplingParams(presence_penalty=1.0)):
        with pytest.raises(UsageError, match="greedy answers only"):
            baseline.run_group([], params)
