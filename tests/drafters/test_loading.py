"""From a directory to a drafter that fits its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eyas
from eyas import Request, SamplingParams
from eyas.drafters.checkpoint import save_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import load_drafter, local_directory, make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.small_lm.drafter import SmallLmDrafter
from eyas.errors import DrafterMismatchError, MissingModelError, UsageError
from eyas.targets import Target, load_target
from eyas.targets.fingerprint import fingerprint
from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed_linears import Int4Linear, Int8Linear
from eyas.targets.parameters import weight_formats

from .. import pairs, tiny


def saved(path: Path, **settings: Any) -> Path:
    save_network(tiny.eagle3_module(**settings), path)
    return path


def test_it_loads_for_its_target(tmp_path: Path) -> None:
    drafter = load_drafter(saved(tmp_path, taps=[1, 2, 3]), tiny.target())
    assert drafter.taps == (1, 2, 3)
    assert drafter.network.embed_tokens.weight.dtype == torch.float32


def test_without_named_taps_it_reads_eagle3s(tmp_path: Path) -> None:
    assert load_drafter(saved(tmp_path), tiny.target()).taps == (1, 3, 4)


def test_it_takes_the_target_s_dtype(tmp_path: Path) -> None:
    target = Target(tiny.build_model("llama").to(torch.bfloat16))
    assert load_drafter(saved(tmp_path), target).network.norm.weight.dtype == torch.bfloat16


def test_it_borrows_the_target_s_embedding_and_head(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(kept, tmp_path / "model.safetensors")
    target = tiny.target()
    network = load_drafter(tmp_path, target).network
    tokens = torch.arange(9)
    states = torch.randn(3, tiny.HIDDEN)
    assert torch.equal(network.embed(tokens), target.model.model.embed_tokens.weight[:9])
    torch.testing.assert_close(network.logits(states), target.head(states)[:, network.target_ids])


def test_a_copy_of_the_target_s_embedding_is_dropped(tmp_path: Path) -> None:
    """Published drafters carry one, which takes up to a gigabyte; an embedding that differs in one value is kept."""
    target = tiny.target()
    whole = tiny.eagle3_module()
    states = torch.randn(3, tiny.HIDDEN)
    tokens = torch.arange(9)
    for change in (0.0, 1.0):
        whole.embed_tokens.weight.data.copy_(target.model.model.embed_tokens.weight)
        whole.embed_tokens.weight.data[-1, -1] += change
        save_network(whole, tmp_path)
        network = load_drafter(tmp_path, target, quantize="off").network
        assert network.config == whole.config
        assert ("embed_tokens.weight" in network.state_dict()) == bool(change)
        assert torch.equal(network.embed(tokens), whole.embed(tokens))
        torch.testing.assert_close(network.logits(states), whole.logits(states))


def test_weights_of_another_target_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny.target()
    own = {"target_fingerprint": fingerprint(target.model)}
    for recorded, said in (({}, 0), (own, 0), ({"target_fingerprint": "0"}, 1)):
        caplog.clear()
        save_network(tiny.eagle3_module(), tmp_path, recorded)
        assert load_drafter(tmp_path, target)
        assert len(caplog.records) == said
    assert "trained for other weights" in caplog.text
    assert str(tmp_path) in caplog.text


def test_a_kind_may_be_insisted_on(tmp_path: Path) -> None:
    assert load_drafter(saved(tmp_path), tiny.target(), method="eagle3")
    with pytest.raises(UsageError, match="is of the kind eagle3, not mlp"):
        load_drafter(tmp_path, tiny.target(), method="mlp")


def test_a_mismatch_names_every_reason(tmp_path: Path) -> None:
    wrong = {"target_hidden_size": 48, "vocab_size": 101, "num_aux_hidden_states": 4, "taps": [1, 1, 9]}
    with pytest.raises(DrafterMismatchError) as caught:
        load_drafter(saved(tmp_path, **wrong), tiny.target())
    message = str(caught.value)
    for reason in (
        "reads states 48 wide, the target's are 32",
        "vocabulary has 101 tokens, the target's 97",
        "reads 4 taps, but 3 are named: [1, 1, 9]",
        "outside the target's boundaries 0..5",
        "not distinct",
        str(tmp_path),
    ):
        assert reason in message


@pytest.mark.parametrize("source", ["no/such/place", "not a name at all", "/no/such/directory"])
def test_what_is_no_directory_and_no_hub_model(source: str) -> None:
    with pytest.raises(MissingModelError, match="there is no "):
        local_directory(source)


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
class TestQuantizedDrafters:
    """Weights of a drafter's linears in 4 or 8 bits."""

    @pytest.mark.parametrize("quantize", [None, "int8", "int4", "off"])
    @pytest.mark.parametrize("fastest", [NativeLinear, PrepackedLinear, None])
    def test_which_drafters_have_them(
        self,
        tmp_path: Path,
        quantize: str | None,
        fastest: type[PrepackedLinear] | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """By default in 4 bits, where our kernels are the fastest."""
        monkeypatch.setattr("eyas.drafters.loading.best_layout", lambda *_: fastest)
        network = load_drafter(saved(tmp_path), tiny.target(), quantize=quantize).network
        expected = quantize or ("int4" if fastest is NativeLinear else "off")
        assert (weight_formats(network) or "off") == expected
        layers = [module for module in network.modules() if isinstance(module, PrepackedLinear)]
        kind = {"int4": Int4Linear, "int8": Int8Linear, "off": fastest}[expected]
        assert {type(layer) for layer in layers} == ({kind} if kind else set())

    def test_guesses_are_nearly_the_same(self, tmp_path: Path) -> None:
        made = [load_drafter(saved(tmp_path), tiny.target(), quantize=how).network for how in ("off", "int8")]
        states = torch.randn(50, tiny.HIDDEN)
        exact, rounded = (network.logits(states) for network in made)
        assert 0.0 < (exact - rounded).abs().max() < 0.02 * exact.abs().max()

    def test_what_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        saved(tmp_path)
        with pytest.raises(UsageError, match="unknown quantization 'int2' of a drafter: write int8, int4 or off"):
            load_drafter(tmp_path, tiny.target(), quantize="int2")
        with pytest.raises(UsageError, match="`draft_quantize=` is for drafters with weights, and ngram has none"):
            make_drafter(DrafterOptions(method="ngram", quantize="int8"), tiny.target())
        with pytest.raises(UsageError, match="`draft_quantize=` is for drafters with weights, and ngram has none"):
            make_drafter(DrafterOptions(method="ngram", quantize="off"), tiny.target())
        monkeypatch.setattr("eyas.drafters.loading.kernels", lambda: None)
        with pytest.raises(UsageError, match="on a CPU with eyas's own kernels only"):
            load_drafter(tmp_path, tiny.target(), quantize="int8")

    def test_language_models_have_them_if_asked(self, tmp_path: Path) -> None:
        target = pairs.save_target(tmp_path / "target")
        small = pairs.save_target(tmp_path / "small", num_hidden_layers=1)
        for quantize, expected in ((None, None), ("off", None), ("int8", "int8"), ("int4", "int4, int8")):
            drafter = make_drafter(DrafterOptions(small, quantize=quantize), load_target(target, dtype="float32"))
            assert isinstance(drafter, SmallLmDrafter)
            assert weight_formats(drafter.model.model) == expected

    def test_answers_are_the_target_s_own(self, tmp_path: Path) -> None:
        target = pairs.save_target(tmp_path / "target")
        drafter = pairs.save_drafter(tmp_path / "drafter")
        requests = [Request((1, 2, 3 + i), SamplingParams(max_tokens=24, temperature=i % 2)) for i in range(6)]
        plain = eyas.load(target, dtype="float32").generate(requests)
        for quantize in ("int8", "int4", "off"):
            engine = eyas.load(target, drafter, tree="dynamic:4,3,9", dtype="float32", draft_quantize=quantize)
            assert engine.speculation is not None
            assert isinstance(engine.speculation.drafter, NetworkDrafter)
            assert weight_formats(engine.speculation.drafter.network) == (None if quantize == "off" else quantize)
            assert [done.token_ids for done in engine.generate(requests)] == [done.token_ids for done in plain]
