"""llama.cpp's files: written by hand and read; written by eyas and read by llama.cpp's own package."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.checkpoint import open_checkpoint, save_network
from eyas.drafters.network import Rotary
from eyas.errors import ExportError, EyasError, UsageError
from eyas.interop.export.drafter import ServedTarget
from eyas.interop.export.export import export, llama3_factors, tokenizer_keys

from ... import tiny
from ...pairs import tokenizer
from .. import restated as re

NAMES = {
    "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "embed_tokens.weight": "token_embd.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight", "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}  # fmt: skip
KEYS: dict[str, Any] = {
    "general.architecture": "eagle3", "general.file_type": 0, "eagle3.context_length": 512,
    "eagle3.embedding_length": re.H,
    "eagle3.block_count": 1, "eagle3.feed_forward_length": re.MLP, "eagle3.attention.head_count": re.N,
    "eagle3.attention.head_count_kv": re.KV, "eagle3.attention.key_length": re.D, "eagle3.attention.value_length": re.D,
    "eagle3.attention.layer_norm_rms_epsilon": 1e-5, "eagle3.rope.freq_base": 5000.0,
    "eagle3.rope.dimension_count": re.D,
    "eagle3.vocab_size": re.V, "eagle3.target_layers": [2, 16, 29], "eagle3.target_hidden_size": re.HT,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(re.V)],
}  # fmt: skip


def contents(
    reduced: bool = True, embedding: bool = True, before_fc: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(as a reader should end up with them, as the file has them): vectors are float32 there."""
    shapes = re.third(re.grouped(2 * re.H, "layers.0"), ht=re.HT, vd=re.VD if reduced else re.V)
    shapes |= {"embed_tokens.weight": (re.V, re.H)} if embedding else {}
    shapes |= {"input_norm.weight": (3 * re.HT,)} if before_fc else {}
    ours = re.numbers(shapes, dtype=dtype)
    theirs = {}
    for name, tensor in ours.items():
        heads = {"q": re.N, "k": re.KV}.get(name.split(".")[3][0] if "_attn." in name else "")
        expected = tensor if heads is None else re.interleaved(tensor, heads)
        theirs[NAMES[name]] = expected.float() if expected.ndim == 1 else expected
    if reduced:
        d2t, _ = re.offsets()
        ours["d2t"] = d2t
        theirs["d2t"] = d2t + torch.arange(re.VD)
    return ours, theirs


def write(path: Path, keys: dict[str, Any], tensors: dict[str, Tensor], **options: Any) -> Path:
    path.write_bytes(re.gguf_bytes({k: v for k, v in keys.items() if v is not ...}, tensors, **options))
    return path


@pytest.mark.parametrize(
    ("old", "reduced", "embedding", "before_fc", "before_residual"), list(product((True, False), repeat=5))
)
def test_both_generations_of_keys(
    old: bool, reduced: bool, embedding: bool, before_fc: bool, before_residual: bool, tmp_path: Path
) -> None:
    ours, theirs = contents(reduced, embedding, before_fc)
    keys = dict(KEYS)
    if old:
        keys["eagle3.extract_layers"] = keys.pop("eagle3.target_layers")
        del keys["eagle3.vocab_size"], keys["eagle3.attention.value_length"]
    keys |= {"eagle3.norm_before_fc": True} if before_fc else {}
    keys |= {"eagle3.norm_before_residual": True} if before_residual else {}
    checkpoint = open_checkpoint(write(tmp_path / "d.gguf", keys, theirs, version=2 if old else 3))
    config = checkpoint.config
    assert (config.taps, config.vocab_size, config.rms_norm_eps) == ((2, 16, 29), re.V, 1e-5)
    assert (config.norm_before_fc, config.norm_before_residual) == (before_fc, before_residual)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert checkpoint.report.convention.startswith("boundaries")
    assert checkpoint.report.ignored["tokenizer.ggml.tokens"] == "the target's tokenizer"
    assert ("norm_before_fc" in checkpoint.report.defaulted) == (not before_fc)
    found = checkpoint.raw.load() if not embedding else checkpoint.network().state_dict()
    assert config.embedding == ("own" if embedding else "shared")
    for name, tensor in ours.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_type_for_all_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Vectors are stored as float32: brought back to the matrices' type where that rounds nothing, else all widened."""
    ours, theirs = contents(dtype=dtype)
    network = open_checkpoint(write(tmp_path / "d.gguf", KEYS, theirs)).network()
    assert {p.dtype for p in network.parameters()} == {dtype}
    theirs["output_norm.weight"] = torch.full((re.H,), 1.0000001)
    network = open_checkpoint(write(tmp_path / "e.gguf", KEYS, theirs)).network()
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert torch.equal(network.fc.weight, ours["fc.weight"].float())


def test_quantized_weights_are_widened(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    wide = {name: t for name, t in contents()[1].items() if name != "output.weight"}
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "eagle3")
    for key, value in KEYS.items():
        if key.startswith("eagle3."):
            add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
            add(key, value)
    for name, tensor in wide.items():
        writer.add_tensor(name, tensor.numpy(), raw_dtype=None)
    head = torch.randn(re.VD, 32)
    blocks = gguf.quants.quantize(head.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    checkpoint = open_checkpoint(tmp_path / "q.gguf")
    (found,) = checkpoint.raw.load_some(["lm_head.weight"]).values()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, head, rtol=0, atol=float(head.abs().max()) / 127)
    assert not torch.equal(found, head)
    assert "quantized" in checkpoint.report.notes[0]


def factors(**rope: Any) -> Tensor:
    """llama3's, as transformers computes them."""
    values = {
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = tiny.network("eagle3", head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    made = tiny.network("eagle3", head_dim=32, rope_parameters={"rope_type": "llama3", **values, **rope})
    return plain.rotary.inv_freq / made.rotary.inv_freq


@pytest.mark.parametrize(
    "rope", [{}, {"factor": 32.0, "low_freq_factor": 2.0}, {"original_max_position_embeddings": 4096}]
)
def test_llama3_scaling_as_factors(rope: dict[str, Any], tmp_path: Path) -> None:
    expected = factors(**rope)
    made = tiny.network("eagle3", head_dim=32, rope_parameters={
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, **rope})  # fmt: skip
    assert len(expected.unique()) > 2
    torch.testing.assert_close(llama3_factors(made.config), expected)
    _, theirs = contents()
    stored = torch.tensor([1.0, 2.0, 8.0])
    checkpoint = open_checkpoint(write(tmp_path / "d.gguf", KEYS, {**theirs, "rope_freqs.weight": stored}))
    assert checkpoint.config.rope_parameters["rope_type"] == "longrope"
    rotary = Rotary(checkpoint.config)
    plain = 5000.0 ** (-torch.arange(0, re.D, 2) / re.D)
    for length in (10, 2000):  # neither before nor past the original context does anything else happen
        cos, _ = rotary(torch.zeros(1), torch.tensor([[length]]))
        torch.testing.assert_close(cos[0, 0, : re.D // 2], (length * plain / stored).cos(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("written", "kind"), [({"type": "none"}, "default"), ({"type": "linear", "factor": 2.0},
"linear"),
    ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, "yarn")])  # fmt: skip
def test_other_scalings(written: dict[str, Any], kind: str, tmp_path: Path) -> None:
    keys = KEYS | {f"eagle3.rope.scaling.{key}": value for key, value in written.items()}
    rope = open_checkpoint(write(tmp_path / "d.gguf", keys, contents()[1])).config.rope_parameters
    assert (rope["rope_type"], rope.get("factor")) == (kind, written.get("factor"))
    assert rope.get("original_max_position_embeddings") == written.get("original_context_length")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": ({"general.architecture": "llama"}, "architecture 'llama'"),
    "no architecture": ({"general.architecture": ...}, "architecture None"),
    "unknown key": ({"eagle3.swirl": 1}, "unknown keys swirl"),
    "no layers": ({"eagle3.target_layers": ...}, "three boundaries"),
    "two layers": ({"eagle3.target_layers": [1, 2]}, "three boundaries"),
    "contradicting layers": ({"eagle3.extract_layers": [1, 15, 28]}, "contradict each other"),
    "unknown scaling": ({"eagle3.rope.scaling.type": "longrope"}, "rope.scaling.type"),
    "head sizes": ({"eagle3.attention.value_length": 8}, "head sizes"),
    "two blocks": ({"eagle3.block_count": 2}, "missing: layers.1"),
    "a part": ({"split.count": 3}, "several parts"),
    "no heads": ({"eagle3.attention.head_count": 0}, "num_attention_heads"),
    "a missing size": ({"eagle3.embedding_length": ...}, "hidden_size"),
    "a size that is text": ({"eagle3.embedding_length": "wide"}, "hidden_size"),
    "heads that are text": ({"eagle3.attention.head_count": "many"}, "num_attention_heads"),
    "a number that is text": ({"eagle3.attention.head_count": "4"}, "num_attention_heads"),
    "huge": ({"eagle3.embedding_length": 2**31}, "hidden_size"),
    "tampered provenance": ({"eyas.provenance": "{"}, "not valid JSON"),
    "tampered rope": ({"eyas.rope_parameters": '{"rope_theta": 1.0}'}, "contradicts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_keys_are_named(name: str, tmp_path: Path) -> None:
    change, reason = BAD[name]
    with pytest.raises(EyasError, match=reason):
        open_checkpoint(write(tmp_path / "d.gguf", KEYS | change, contents()[1])).network()


def test_bad_tensors_are_named(tmp_path: Path) -> None:
    _, good = contents()
    for change, reason in (
        ({"blk.0.attn_qkv.weight": torch.ones(3, 4)}, "no EAGLE-3 network has"),
        ({"fc.weight": torch.ones(re.H, 5)}, r"fc\.weight is \[16, 5\]"),
        ({"fc.weight": torch.full((re.H, 3 * re.HT), float("nan"))}, "fc.weight holds NaN"),
        ({"d2t": torch.arange(re.VD) * 100}, "beyond the vocabulary|60"),
        ({"d2t": torch.zeros(re.VD, dtype=torch.int64)}, "20 different tokens"),
    ):
        with pytest.raises(EyasError, match=reason):
            open_checkpoint(write(tmp_path / "d.gguf", KEYS, {**good, **change})).network()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = re.gguf_bytes(KEYS, contents()[1])
    for length in (0, 3, 4, 8, 23, 24, 40, 200, 700, len(whole) // 2, len(whole) - 1):
        (tmp_path / "d.gguf").write_bytes(whole[:length])
        with pytest.raises(EyasError, match=r"d\.gguf"):
            open_checkpoint(tmp_path / "d.gguf")


def test_counts_beyond_the_file_are_refused_at_once(tmp_path: Path) -> None:
    """Nothing of the size that a damaged file claims is allocated or looped over."""
    whole = bytearray(re.gguf_bytes(KEYS, contents()[1]))
    for offset in (8, 16, 24):  # tensors, keys, the first key's length
        damaged = whole.copy()
        damaged[offset : offset + 8] = (2**62).to_bytes(8, "little")
        (tmp_path / "d.gguf").write_bytes(damaged)
        with pytest.raises(EyasError, match="is it complete"):
            open_checkpoint(tmp_path / "d.gguf")
    huge = re.gguf_bytes({**KEYS, "zz": [1, 2]}, {})
    at = huge.index(b"zz") + 2 + 8
    (tmp_path / "d.gguf").write_bytes(huge[:at] + (2**31).to_bytes(8, "little") + huge[at + 8 :])
    with pytest.raises(EyasError, match="is it complete"):
        open_checkpoint(tmp_path / "d.gguf")


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    """Any byte of the header may be anything: the file loads or is refused with a reason."""
    whole = re.gguf_bytes(KEYS, contents()[1])
    head = whole.index(b"blk.0.ffn_down.weight") + 60
    draw = torch.Generator().manual_seed(0)
    loaded = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[int(torch.randint(head, (), generator=draw))] = int(torch.randint(256, (), generator=draw))
        (tmp_path / "d.gguf").write_bytes(damaged)
        with suppress(EyasError):
            open_checkpoint(tmp_path / "d.gguf").network()
            loaded += 1
    assert 0 < loaded < 300  # bytes of both sorts were met


def test_what_eyas_writes_is_what_llama_cpp_expects(tmp_path: Path, served_target: ServedTarget) -> None:
    gguf = pytest.importorskip("gguf")
    vocab = len(tokenizer())
    made = tiny.network(
        "eagle3",
        vocab_size=vocab,
        draft_vocab_size=120,
        taps=[2, 4, 5],
        norm_before_fc=True,
        # as a target says it that was stored in float32
        rms_norm_eps=9.999999747378752e-06,
    )
    save_network(made, tmp_path / "d", {"note": "here"})
    export(tmp_path / "d", "gguf", tmp_path / "out", served_target)
    reader = gguf.GGUFReader(tmp_path / "out" / "drafter.gguf")
    assert reader.fields["general.architecture"].contents() == "eagle3"
    value = {
        key.removeprefix("eagle3."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("eagle3.")
    }
    assert value["target_layers"] == [2, 4, 5]
    assert (value["norm_before_fc"], value["norm_before_residual"]) == (True, False)
    assert (value["target_hidden_size"], value["vocab_size"], value["block_count"]) == (32, vocab, 1)
    assert (value["attention.key_length"], value["rope.dimension_count"], value["context_length"]) == (8, 8, 2048)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {*NAMES.values(), "d2t"}
    assert tensors["d2t"].tensor_type == gguf.GGMLQuantizationType.I64
    assert torch.equal(torch.from_numpy(tensors["d2t"].data.copy()), made.target_ids)
    state = made.state_dict()
    for part, heads in (("q", 4), ("k", 2)):
        rows = torch.from_numpy(tensors[f"blk.0.attn_{part}.weight"].data.copy())
        assert torch.equal(rows, re.interleaved(state[f"layers.0.self_attn.{part}_proj.weight"], heads))
    assert reader.fields["tokenizer.ggml.model"].contents() == "gpt2"
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert [tokenizer().convert_tokens_to_ids(token) for token in tokens[:vocab]] == list(range(vocab))


def test_only_byte_level_tokenizers_are_written() -> None:
    keys = tokenizer_keys(tokenizer(), len(tokenizer()) + 3)
    assert keys.tokens[-3:] == [f"[PAD{len(tokenizer()) + i}]" for i in range(3)]
    assert keys.types[-3:] == [5, 5, 5]
    assert 3 in keys.types  # its special tokens
    assert {len(merge.split(" ")) for merge in keys.merges} == {2}
    with pytest.raises(ExportError, match="byte-level BPE"):
        tokenizer_keys(object(), 10)


def test_a_name_in_capitals(tmp_path: Path) -> None:
    write(tmp_path / "A.GGUF", KEYS, contents()[1])
    assert open_checkpoint(tmp_path).config == open_checkpoint(tmp_path / "A.GGUF").config


def test_several_files_in_a_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, KEYS, contents()[1])
    with pytest.raises(UsageError, match=r"2 GGUF files: name one, such as .*a\.gguf"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "a.gguf").config == open_checkpoint(tmp_path / "b.gguf").config


def test_plain_files_need_no_package_and_others_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    _, theirs = contents()
    assert open_checkpoint(write(tmp_path / "d.gguf", KEYS, theirs)).network()
    raw = re.gguf_bytes(KEYS, {"output.weight": theirs["output.weight"]})
    at = raw.index(b"output.weight") + len(b"output.weight") + 4 + 16
    (tmp_path / "q.gguf").write_bytes(raw[:at] + (8).to_bytes(4, "little") + raw[at + 4 :])  # Q8_0
    with pytest.raises(UsageError, match=r"pip install 'eyas\[gguf\]'"):
        open_checkpoint(tmp_path / "q.gguf")
