"""Checkpoints that others quantized: their layers are left alone, what can't be run is refused by name."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from eyas.engine import Engine, Speculation
from eyas.errors import ModelError, UnsupportedModelError, UsageError
from eyas.hub import find_target
from eyas.targets import Target, load_target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.linears import PrepackedLinear, can_prepack, prepack_linears
from eyas.targets.loading import load_embedding_and_head, read_config, resolve_dtype
from eyas.targets.native.library import kernels
from eyas.targets.native.packed_linears import Int8Linear
from eyas.targets.quantization import dequantize_at_load, quantized_by, refuse_quantization
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from .. import quantized, tiny

CPU = torch.device("cpu")


class Int8Weight(Tensor):
    """A weight as torchao has them: a tensor of others, with few operations."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)  # type: ignore[attr-defined]

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.data8 = (weight / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"Int8Weight: {func}")


class QuantizedLinear(nn.Linear):
    """A layer as bitsandbytes has them."""


def layers() -> nn.ModuleDict:
    """A plain linear, and others that compute something else than one does."""
    with torch.no_grad():
        made = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("plain", "subclass", "scaled", "wrapped", "hooked")})
        made["another"] = QuantizedLinear(16, 16)
        made["subclass"].weight = nn.Parameter(Int8Weight(made["subclass"].weight), requires_grad=False)
        made["scaled"].register_buffer("scale", torch.ones(16))
        made["wrapped"].forward = lambda x: x
        made["hooked"].register_forward_hook(lambda _module, _args, output: output * 2)
        made["words"] = nn.Linear(16, 16)
        del made["words"].weight
        made["words"].register_parameter("weight_packed", nn.Parameter(torch.ones(16, 2), requires_grad=False))
        made["bf16"] = nn.Linear(16, 16, dtype=torch.bfloat16)
    return made.requires_grad_(False)


@pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this CPU has no prepacked kernels")
def test_only_plain_linears_are_prepacked() -> None:
    made = layers()
    assert prepack_linears(made, PrepackedLinear, torch.float32) == 1
    assert [name for name, layer in made.items() if isinstance(layer, PrepackedLinear)] == ["plain"]


def test_fingerprints_read_the_tensors_that_a_quantized_weight_consists_of() -> None:
    made = layers()
    before = fingerprint(made)
    made["subclass"].weight.data8[3, 3] += 1  # type: ignore[union-attr, index]
    assert fingerprint(made) != before


def test_fingerprints_read_scales_that_are_buffers() -> None:
    made = layers()
    before = fingerprint(made)
    made["scaled"].scale[3] += 1  # type: ignore[operator, index]
    assert fingerprint(made) == before  # a plain model's buffers may be caches
    made.is_quantized = True  # type: ignore[assignment]
    scaled = fingerprint(made)
    made["scaled"].scale[3] += 1  # type: ignore[operator, index]
    assert len({before, scaled, fingerprint(made)}) == 3


def save(folder: Path, method: str, **settings: Any) -> Path:
    """A bfloat16 checkpoint whose config says that it is quantized."""
    tiny.build_model("llama").to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_method_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    """transformers would warn and read the weights as plain ones."""
    with pytest.raises(UnsupportedModelError, match=r"by secret8, which this version of transformers can't read"):
        load_target(save(tmp_path, "secret8"), device="cpu")


def test_results_that_depend_on_the_pass_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LLM\.int8.* depends on all tokens of a pass"):
        load_target(save(tmp_path, "bitsandbytes", load_in_8bit=True), device="cpu")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"can't load the target .*bitsandbytes"):
        load_target(save(tmp_path, "bitsandbytes", load_in_4bit=True), device="cpu")


def test_quantized_weights_keep_their_dtype_and_are_not_quantized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, "torchao")
    monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda dtype: dtype == torch.float32)
    assert resolve_dtype("auto", folder, CPU) == torch.bfloat16
    monkeypatch.setattr("eyas.targets.loading.native_kernels", lambda: object())
    with pytest.raises(UsageError, match="is quantized by torchao already: leave quantize out"):
        load_target(folder, device="cpu", quantize="int8")


def decoded_losslessly(target: Target, own: Any = None) -> None:
    """Check plain decoding against transformers, if it has an `own` model, and speculation against plain decoding."""
    prompts = tiny.prompts(9, 5, 12, 7)
    for sampling in ({}, {"temperature": 0.8, "seed": 5}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        requests = [Request(tuple(prompt), params) for prompt in prompts]
        plain = [Engine(target).generate([one])[0].token_ids for one in requests]
        if own is not None and not sampling:
            assert [list(said) for said in plain] == [tiny.continuation(own, prompt, 12) for prompt in prompts]
        truth = [[*prompt, *said] for prompt, said in zip(prompts, plain, strict=True)]
        for size, tree in ((1, "dynamic:4,4,12"), (4, "chain:3"), (4, "dynamic:4,4,12")):
            drafter = tiny.OracleDrafter(truth, (0, 2, 4), strict=False)
            engine = Engine(target, speculation=Speculation(drafter, parse_tree(tree)))
            done = [one for at in range(0, 4, size) for one in engine.generate(requests[at : at + size])]
            assert [one.token_ids for one in done] == plain
            assert sum(one.stats.target_passes for one in done) < sum(one.stats.tokens for one in done)


DEQUANTIZED = ["fp8-blocks", "mxfp4", "compressed-fp8", "compressed-fp8-dynamic", "compressed-int4", "awq"]


def write(folder: Path, name: str) -> Any:
    """Write a checkpoint in a format, if the library that reads it is there; returns the model that it stands for."""
    if name not in quantized.INTEGERS:
        pytest.importorskip("accelerate", reason="accelerate isn't installed")
    if name.startswith("compressed-fp8"):
        pytest.importorskip("compressed_tensors", reason="compressed-tensors isn't installed")
    return quantized.write_mxfp4(folder) if name == "mxfp4" else quantized.write(folder, name)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", DEQUANTIZED)
def test_what_no_kernel_here_multiplies_by_is_dequantized(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is then a plain one: of the weights that were meant, in any dtype, with native passes."""
    meant = write(tmp_path, name)
    target = load_target(tmp_path, device="cpu")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "eyas" and "weights" in record.msg]
    assert f"weights of {tmp_path} are dequantized" in line
    assert not [module for module in target.model.modules() if type(module) is nn.Linear]
    if (
        name != "mxfp4"
    ):  # of GPT-OSS: whether its experts are laid out as native passes take them depends on transformers
        assert (target.native is None) == (kernels() is None)
    decoded_losslessly(target, meant)

    half = load_target(tmp_path, device="cpu", dtype="bfloat16")
    assert fingerprint(half.model) == fingerprint(target.model)
    short = load_embedding_and_head(tmp_path, device="cpu", dtype="bfloat16")
    assert len({embedding_head_fingerprint(one.model, one.layers) for one in (target, half, short)}) == 1


@pytest.mark.skipif(kernels() is None, reason="this machine has no native kernels")
def test_dequantized_weights_can_take_8_bits(tmp_path: Path) -> None:
    write(tmp_path, "fp8-blocks")
    target = load_target(tmp_path, device="cpu", quantize="int8")
    found = [module for module in target.model.modules() if isinstance(module, Int8Linear)]
    assert len(found) == 7 * tiny.LAYERS + 1  # the head, too
    decoded_losslessly(target)


def test_dequantized_weights_have_a_dtype_that_the_cpu_computes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized.write(tmp_path, "fp8-blocks")
    monkeypatch.setattr("eyas.targets.loading.cpu_computes_in", lambda dtype: dtype == torch.float32)
    assert resolve_dtype("auto", tmp_path, CPU) == torch.float32
    assert resolve_dtype("auto", tmp_path, torch.device("cuda")) == torch.bfloat16


def test_gpus_run_fp8_as_it_is(tmp_path: Path) -> None:
    quantized.write(tmp_path, "fp8-blocks")
    config = read_config(find_target(tmp_path))
    assert dequantize_at_load(config, torch.device("cuda")) is None
    assert quantized_by(config) == "fp8"
    assert dequantize_at_load(config, CPU) == "fp8"
    assert quantized_by(config) is None


@pytest.mark.parametrize("width", [112, 144])
def test_incomplete_blocks_are_refused(tmp_path: Path, width: int) -> None:
    """Of four blocks in 112 rows transformers makes blocks of 28; of five in 144 it makes none."""
    quantized.write(tmp_path, "fp8-blocks", intermediate_size=width)
    with pytest.raises(UnsupportedModelError, match=r"mlp.* no multiple of its FP8 blocks of 32 x 32"):
        load_target(tmp_path, device="cpu")
    config = read_config(find_target(tmp_path))
    refuse_quantization(tf.LlamaForCausalLM, config)  # as GPUs run it
    dequantize_at_load(config, CPU)
    config.quantization_config["modules_to_not_convert"] += [f"model.layers.{i}.mlp" for i in range(tiny.LAYERS)]
    refuse_quantization(tf.LlamaForCausalLM, config)


def test_weights_of_several_schemes_stay_compressed(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors isn't installed")
    meant = quantized.write(tmp_path, "compressed-fp8", mlp="compressed-fp8-dynamic")
    target = load_target(tmp_path, device="cpu")
    assert target.native is None
    decoded_losslessly(target, meant)


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_both_libraries_of_gptq_are_named(tmp_path: Path) -> None:
    """Of layouts that eyas doesn't read itself."""
    with pytest.raises(ModelError, match="quantized by gptq: install gptqmodel and optimum"):
        load_target(save(tmp_path, "gptq", bits=3), device="cpu")


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_the_library_of_awq_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't load the target .* requires gptqmodel"):
        load_target(save(tmp_path, "awq", bits=4, version="gemv"), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
@pytest.mark.filterwarnings("ignore")  # torchao's
def test_torchao_checkpoints_are_decoded_losslessly(tmp_path: Path, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao isn't installed")
    tiny.build_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "float")
    groups = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(16)} if name.startswith("Intx") else {}
    config = tf.TorchAoConfig(getattr(quantization, name)(**groups))
    quantized = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=config, dtype=torch.bfloat16
    )
    quantized.save_pretrained(tmp_path / "quantized")
    target = load_target(tmp_path / "quantized", device="cpu", dtype="auto")
    assert target.dtype == torch.bfloat16
    assert len({fingerprint(one) for one in (target.model, quantized, load_target(tmp_path / "float").model)}) == 2
    own = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.bfloat16)
    tokens = tiny.prompts(9)[0]
    gap = tiny.full_forward(target.model, tokens).logits - tiny.full_forward(own, tokens).logits
    assert gap.abs().max() <= 0.05 * tiny.full_forward(own, tokens).logits.abs().max()

    requests = [Request(tuple(p), SamplingParams(max_tokens=12, ignore_eos=True)) for p in tiny.prompts(9, 5, 12)]
    plain = [Engine(target).generate([one])[0].token_ids for one in requests]
    drafter = tiny.OracleDrafter(
        [[*one.prompt, *said] for one, said in zip(requests, plain, strict=True)], (0, 2, 4), strict=False
    )
    engine = Engine(target, speculation=Speculation(drafter, parse_tree("chain:3")))
    done = engine.generate(requests)
    assert [one.token_ids for one in done] == plain
    assert sum(one.stats.tokens for one in done) > sum(len(p) for p in plain) / 2
