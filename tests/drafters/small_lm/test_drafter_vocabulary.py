"""The intersection of two vocabularies: what is the same token, what the draft model reads, what it can draft."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.small_lm.drafter import SharedVocabulary, SmallLmDrafter, token_bytes
from eyas.engine import Engine, Speculation
from eyas.errors import DrafterMismatchError, UsageError
from eyas.session import load
from eyas.targets import Target, load_tokenizer
from eyas.train.lm.lm import train_tokenizer
from eyas.tree import parse_tree
from eyas.types import Limits, Request, SamplingParams

from ... import pairs, tiny

CPU = torch.device("cpu")
TEXT = "def add(a, b):\n    return a + b\n"


@cache
def other() -> Any:
    """A byte-level tokenizer with other merges than that of `pairs`, and so with other ids."""
    return train_tokenizer(["the return of the native: é\n" * 9], vocab_size=300, context=256)


@cache
def sentencepiece() -> Any:
    """A tokenizer that writes spaces and bytes as SentencePiece does, and names its special tokens otherwise."""
    bytes_ = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    words = {word: 259 + i for i, word in enumerate(("\u2581return", "\u2581", "a", "add", "def", "("))}
    model = models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **bytes_, **words}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def shared(own: Any, target: Any = None) -> SharedVocabulary:
    target = target or pairs.tokenizer()
    return SharedVocabulary(target, own, len(target), len(own), CPU)


@pytest.mark.parametrize("make", [other, sentencepiece])
def test_shared_tokens_stand_for_the_same_text(make: Any) -> None:
    own = make()
    target = pairs.tokenizer()
    found = shared(own)
    theirs = token_bytes(target)
    ours = token_bytes(own)
    same = {token for token, content in theirs.items() if content in set(ours.values())}
    same |= {target.eos_token_id}
    assert sorted(found.target_ids.tolist()) == sorted(same)
    for token, mine in zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True):
        assert ours[mine] == theirs[token] or (token, mine) == (target.eos_token_id, own.eos_token_id)
        assert found.own_ids[token] == mine
    assert len(same) > 20


@pytest.mark.parametrize("make", [other, sentencepiece])
def test_the_draft_model_reads_the_same_text(make: Any) -> None:
    own = make()
    target = pairs.tokenizer()
    found = shared(own)
    tokens = target.encode(TEXT, add_special_tokens=False)
    ours = [mine for token in tokens for mine in found.read(token)]
    contents = token_bytes(own)
    text = b"".join(content for mine in ours if isinstance(content := contents[mine], bytes))
    # SentencePiece begins what it encodes by itself with a space
    assert text.replace(b" ", b"") == TEXT.replace(" ", "").encode()
    marker = target.convert_tokens_to_ids("<|user|>")
    assert found.read(marker) == (() if make is sentencepiece else (own.convert_tokens_to_ids("<|user|>"),))


def test_shares() -> None:
    whole = shared(pairs.tokenizer())
    assert (whole.share, whole.share_of([TEXT])) == (1.0, 1.0)
    part = shared(other())
    drafted = set(part.target_ids.tolist())
    tokens = pairs.tokenizer().encode(TEXT, add_special_tokens=False)
    assert part.share_of([TEXT]) == sum(token in drafted for token in tokens) / len(tokens) < 1.0
    assert part.share == len(set(part.draft_ids.tolist())) / len(other()) < 1.0


@pytest.mark.parametrize(
    ("temperature", "tree", "batch"), [(0.0, "chain:3", 1), (1.0, "dynamic:3,3,6", 3), (0.7, "chain:3", 3)]
)
def test_output_is_that_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    vocab = len(pairs.tokenizer())
    target = Target(tiny.build_model("llama", vocab_size=vocab))
    model = Target(tiny.build_model("llama", vocab_size=len(other()), num_hidden_layers=1))
    drafter = SmallLmDrafter(model, shared(other()))
    texts = [TEXT, "Natalia sold", "x", TEXT * 4]
    requests = [
        Request(
            tuple(pairs.tokenizer().encode(text)),
            SamplingParams(max_tokens=16, temperature=temperature, seed=seed, ignore_eos=True),
        )
        for seed, text in enumerate(texts)
    ]
    plain = [one.token_ids for one in Engine(target, batch_size=8).generate(requests)]
    engine = Engine(
        target, None, Speculation(drafter, parse_tree(tree)), limits=Limits(max_running=batch, prefix_tokens=512)
    )
    for _ in range(2):  # the second time with prefixes from the cache
        done = engine.generate(requests)
        assert [one.token_ids for one in done] == plain
        engine.check_invariants()


def test_files_say_that_they_hold_a_language_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = pairs.save_target(tmp_path / "target")
    small = tmp_path / "small"
    pairs.save_target(small, num_hidden_layers=1)
    for method in (None, "draft_model"):
        engine = load(target, small, method=method, dtype="float32", tree="chain:3")
        assert engine.speculation is not None
        assert isinstance(engine.speculation.drafter, SmallLmDrafter)
        assert engine.speculation.drafter.shared is None
    assert not caplog.records
    load(target, target, dtype="float32", tree="chain:3")
    assert "drafting costs as much as decoding" in caplog.text


def test_another_tokenizer_is_mapped_and_its_share_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = Target(tiny.build_model("llama", vocab_size=len(pairs.tokenizer())))
    small = tmp_path / "small"
    tiny.build_model("llama", vocab_size=len(other()), num_hidden_layers=1).save_pretrained(small)
    other().save_pretrained(small)
    with caplog.at_level(logging.WARNING, "eyas"):
        drafter = make_drafter(DrafterOptions(small), loaded, tokenizer=pairs.tokenizer())
    assert isinstance(drafter, SmallLmDrafter)
    assert drafter.shared is not None
    assert drafter.max_fanout == len(drafter.shared.target_ids)
    assert f"{100 * drafter.shared.share:.1f}% of its tokens can be drafted" in caplog.text
    with pytest.raises(DrafterMismatchError, match="the target has none"):
        make_drafter(DrafterOptions(small), loaded)
    tokens_only = tmp_path / "bare"
    tiny.build_model("llama", vocab_size=90, num_hidden_layers=1).save_pretrained(tokens_only)
    with pytest.raises(DrafterMismatchError, match="the draft model has none"):
        make_drafter(DrafterOptions(tokens_only), loaded, tokenizer=pairs.tokenizer())


def test_methods_and_options_that_do_not_go_with_it(tmp_path: Path) -> None:
    loaded = Target(tiny.build_model("llama", vocab_size=len(pairs.tokenizer())))
    small = pairs.save_target(tmp_path / "small")
    drafter = pairs.save_drafter(tmp_path / "drafter")
    with pytest.raises(UsageError, match="is no language model"):
        make_drafter(DrafterOptions(drafter, method="draft_model"), loaded)
    with pytest.raises(UsageError, match="is a language model: leave out"):
        make_drafter(DrafterOptions(small, weights="model.safetensors"), loaded)
    assert load_tokenizer(small) is not None
