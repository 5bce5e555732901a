"""GGUF targets whose weights stay packed: the file's numbers, native passes, and the tokens of plain decoding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import eyas
from eyas.bench.offline.certificate import own_modules
from eyas.drafters.loading import drafter_layout
from eyas.drafters.weightless import METHODS as WEIGHTLESS
from eyas.engine import Engine, Speculation
from eyas.engine.controller.calibration import describe
from eyas.errors import ModelError
from eyas.hub import find_target
from eyas.targets import Target, load_target
from eyas.targets.fingerprint import fingerprint, weight_shapes
from eyas.targets.gguf_weights import model_by_transformers
from eyas.targets.linears import PrepackedLinear
from eyas.targets.loading import read_config, read_model
from eyas.targets.native import packed_linears
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed import GGML, WeightBlocks, fit_float16, panels_of_rows, product
from eyas.targets.native.packed_linears import Int4Linear, PackedEmbedding, PackedLinear
from eyas.targets.parameters import weight_formats
from eyas.tree import parse_tree

from .. import gguf_models, tiny

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512"),
]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny Llama's file in a format."""
    root = tmp_path_factory.mktemp("files")

    def written(kind: str) -> Path:
        path = root / f"{kind}.gguf"
        if not path.exists():
            gguf_models.write_llama(path, kind)
        return path

    return written


def test_passes_are_native_where_another_layout_of_bfloat16_is_faster(
    file_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: PrepackedLinear)  # as on CPUs with AMX
    target = load_target(file_of("Q4_0"), dtype="auto", device="cpu")
    assert target.native is not None
    monkeypatch.setattr("eyas.drafters.loading.best_layout", lambda *_: PrepackedLinear)
    assert drafter_layout(target) is Int4Linear


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", GGML)
def test_weights_are_those_of_the_file(kind: str, file_of: Callable[[str], Path]) -> None:
    target = load_target(file_of(kind), dtype="auto", device="cpu")
    assert target.native is not None
    assert weight_formats(target.model) == kind
    stock = model_by_transformers(file_of(kind), torch.float32)
    for name, part in target.model.named_modules():
        if isinstance(part, PackedLinear | PackedEmbedding):
            exact = part.exact() if isinstance(part, PackedLinear) else part.table.exact()
            assert torch.equal(exact, stock.get_parameter(f"{name}.weight"))
    plain = load_target(file_of(kind), dtype="bfloat16", device="cpu")
    assert weight_formats(plain.model) is None
    assert fingerprint(target.model) == fingerprint(plain.model)
    assert weight_shapes(target.model) == weight_shapes(plain.model)


@pytest.mark.parametrize("kind", ["Q2_K", "NVFP4", "BF16"])
def test_other_weights_are_dequantized_and_said_to_be(
    kind: str, file_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "eyas"):
        target = load_target(file_of(kind), dtype="auto", device="cpu")
    assert weight_formats(target.model) is None
    said = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert [f"the {kind} weights of " in text for text in said] == [True] * (kind != "BF16")
    stock = model_by_transformers(file_of(kind), torch.float32)
    for name, part in target.model.named_modules():
        if isinstance(part, PrepackedLinear):
            assert torch.equal(part.restored(), stock.get_parameter(f"{name}.weight").to(torch.bfloat16))


def mxfp4(powers: list[int], codes: int | None = None) -> np.ndarray:
    """A block for each exponent, with all codes or the same one."""
    made = np.empty((len(powers), 17), np.uint8)
    made[:, 0] = powers
    made[:, 1:] = np.arange(16) * 17 if codes is None else codes * 17
    return made


def test_mxfp4_is_packed_where_float16_has_its_scales() -> None:
    """Which are powers of two; zeros may have any."""
    powers = [*range(104, 144)]
    blocks = np.concatenate([mxfp4(powers), mxfp4([0, 1, 103, 144, 255], 8), mxfp4([0, 255, 7], 0)])
    assert fit_float16("MXFP4", blocks)
    rows = np.ascontiguousarray(blocks)
    addresses = rows.ctypes.data + torch.arange(len(rows)) * 17
    panels = panels_of_rows(39, GGML["MXFP4"], addresses, 1)
    found = WeightBlocks.of_panels(GGML["MXFP4"], panels, len(rows), 32).floats(32)
    zeros = np.where(found.numpy() == 0, 0.0, gguf.dequantize(rows, gguf.GGMLQuantizationType.MXFP4))
    assert np.array_equal(found.numpy(), zeros)
    assert torch.equal(found[:40].abs().amax(1), 12 * 2.0 ** torch.arange(-24, 16))
    assert not fit_float16("MXFP4", mxfp4([103]))
    assert not fit_float16("MXFP4", mxfp4([120, 144], 1))


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", GGML)
def test_speculation_gives_the_tokens_of_plain_decoding(kind: str, file_of: Callable[[str], Path]) -> None:
    """Alone and in batches, with chains and trees, greedily and seeded."""
    target = load_target(file_of(kind), dtype="auto", device="cpu")
    prompts = [tuple(text) for text in tiny.prompts(5, 9, 12, 3, 30, 7)]
    requests = [
        eyas.Request(prompt, eyas.SamplingParams(max_tokens=20, temperature=t % 2, seed=t, ignore_eos=True))
        for t, prompt in enumerate(prompts)
    ]
    assert weight_formats(target.model) == kind
    plain = None
    for method, tree, batch in ((None, None, 1), (None, None, 4), ("ngram", "chain:4", 1), ("suffix", "chain:6", 16)):
        speculation = None if method is None else Speculation(WEIGHTLESS[method](target), parse_tree(str(tree)))
        tokens = [done.token_ids for done in Engine(target, None, speculation, batch_size=batch).generate(requests)]
        plain = plain or tokens
        assert tokens == plain, (method, tree, batch)
    assert target.dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "down"), [("Q4_0", "Q8_0"), ("Q8_0", "F16")])
def test_experts_stay_packed(kind: str, down: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a part of them can't; gates and ups of a file are one stack."""
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: NativeLinear)
    path = tmp_path / "moe.gguf"
    gguf_models.write_moe(path, kind, down)
    target, plain = (load_target(path, dtype=dtype, device="cpu") for dtype in ("auto", "bfloat16"))
    assert target.native is not None
    files = find_target(path)
    stock = read_model(files, read_config(files), torch.float32)  # transformers overlooks the size of its experts
    stacks = {name: part for name, part in target.model.named_modules() if getattr(part, "stacked", None)}
    assert len(stacks) == 2 * tiny.LAYERS
    for name, part in stacks.items():
        weight = stock.get_parameter(name)
        assert isinstance(part, PackedLinear) == (down in GGML)
        assert torch.equal(part.exact().view(weight.shape), weight if down in GGML else weight.bfloat16())
    assert fingerprint(target.model) == fingerprint(plain.model)
    assert weight_shapes(target.model) == weight_shapes(plain.model)
    if down not in GGML:
        return
    requests = [
        eyas.Request(tuple(text), eyas.SamplingParams(max_tokens=12, ignore_eos=True))
        for text in tiny.prompts(5, 9, 12)
    ]
    answers = [
        [done.token_ids for done in eyas.load(path, method=method, batch_size=batch).generate(requests)]
        for method, batch in ((None, 1), ("ngram", 4))
    ]
    assert answers[0] == answers[1]


def test_parts_of_other_widths_that_add_up_are_refused(tmp_path: Path) -> None:
    """Rows are read where they lie: those of a part with fewer inputs end before the kernels stop reading."""
    path = tmp_path / "moe.gguf"
    gguf_models.write_moe(path, "Q8_0")
    data = bytearray(path.read_bytes())
    for name, inputs in ((b"blk.0.ffn_gate_exps.weight", 32), (b"blk.0.ffn_up_exps.weight", 96)):
        at = data.index(name) + len(name) + 4  # behind the number of dimensions, the innermost first
        assert int.from_bytes(data[at : at + 8], "little") == 64
        data[at : at + 8] = inputs.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_(gate|up)_exps"):
        load_target(path, dtype="auto", device="cpu")


def test_logits_are_those_of_the_same_arithmetic_in_float64(
    file_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own modules in float64 but for products, which are sums of codes in PyTorch."""
    path = file_of("Q4_1")
    monkeypatch.setattr("eyas.targets.loading._dtype_in_use", lambda *_: torch.float32)
    monkeypatch.setattr("eyas.targets.loading._half_may_be_native", lambda *_: False)
    target = load_target(path, dtype="auto", device="cpu")
    assert target.native is not None
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    found = logits_of(target, ids[0].tolist())

    def exact(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features).float()
        return product(self.blocks(), flat).view(*x.shape[:-1], -1).double()

    monkeypatch.setattr(PackedLinear, "forward", exact)
    monkeypatch.setattr(PackedEmbedding, "forward", lambda self, ids: self.weight[ids].double())
    for module in target.model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(weight.double(), False)
    expected = target.model(input_ids=ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def logits_of(target: Target, tokens: list[int]) -> torch.Tensor:
    cache = target.allocate(1)
    logits, _ = target.prefill_to_end(cache, range(1), [tokens], ())
    return logits.rows[0]


def test_files_of_other_formats_are_dequantized(file_of: Callable[[str], Path]) -> None:
    for kind in ("F16", "Q2_K"):
        assert weight_formats(load_target(file_of(kind), dtype="auto", device="cpu").model) is None


def test_sums_that_are_wrong_on_this_processor_are_not_used(
    file_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.targets.loading.sums_codes", lambda: False)
    assert weight_formats(load_target(file_of("Q4_0"), dtype="auto", device="cpu").model) is None
    assert packed_linears.sums_codes()


def test_costs_and_certificates_know_the_format(file_of: Callable[[str], Path]) -> None:
    drafter: Any = eyas.load(file_of("Q4_0"), method="ngram").speculation
    described = [
        describe(load_target(file_of(kind), dtype=dtype, device="cpu"), drafter.drafter)
        for kind, dtype in (("Q4_0", "auto"), ("Q8_0", "auto"), ("Q4_0", "bfloat16"))
    ]
    assert len(set(described)) == 3
    assert "in Q4_0 and bfloat16" in described[0]
    target = load_target(file_of("Q4_0"), dtype="auto", device="cpu")
    assert own_modules(str(file_of("Q4_0")), target).model is target.model


def test_drafters_share_the_packed_embedding(file_of: Callable[[str], Path]) -> None:
    target = load_target(file_of("Q8_0"), dtype="auto", device="cpu")
    network = tiny.network("eagle3", hidden_size=64, vocab_size=target.vocab_size, embedding="shared").to(
        torch.bfloat16
    )
    network.borrow(target)
    ids = torch.tensor([[1, 2], [5, 0]])
    assert isinstance(network.shared_parts().embedding, PackedLinear)
    assert torch.equal(network.embed(ids), target.model.get_input_embeddings()(ids))
