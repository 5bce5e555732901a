"""Gemma 4's assistants guess what transformers' own classes do, in chains and trees, and change no token."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.generation import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import eyas
from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.files import read_headers
from eyas.drafters.kinds.gemma4_assistant import AssistantLevels, AssistantNetwork
from eyas.drafters.loading import load_drafter, make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine, Speculation
from eyas.errors import EyasError, InvariantError, UnsupportedModelError
from eyas.hub import find_target
from eyas.interop.inspect.report import report_drafter, report_target
from eyas.plan.costs import model_size
from eyas.targets import Target, load_target
from eyas.targets.loading import described, read_config
from eyas.targets.slots import SlotCache
from eyas.train.drafter.shape import DrafterShape
from eyas.tree import parse_tree
from eyas.tree.draft_tree import Frontier
from eyas.types import Limits, Request, SamplingParams

from ... import gemma4, tiny
from ..in_target.equality import equal_to_plain

HEADS = {"all": False, "centroids": True}


class Pair(NamedTuple):
    """A target and an assistant, with transformers' models of both."""

    target: Target
    drafter: NetworkDrafter
    model: Any
    theirs: Any
    folder: Path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    gemma4.target().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(model_folder: Path) -> Target:
    return load_target(model_folder, dtype="float32")


@pytest.fixture(scope="module")
def pair(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the pair with each kind of head once."""

    def made(head: str) -> Pair:
        folder = tmp_path_factory.mktemp(head)
        theirs = gemma4.assistant(HEADS[head])
        theirs.save_pretrained(folder)
        drafter = make_drafter(DrafterOptions(folder, quantize="off"), target)
        assert isinstance(drafter, NetworkDrafter)
        return Pair(target, drafter, gemma4.target(), theirs, folder)

    return cache(made)


class Context(NamedTuple):
    """What transformers' assistant reads: the target's pass over all tokens but the last, its root."""

    states: dict[str, tuple[Tensor, Tensor]]
    final: Tensor
    root: Tensor


def context(model: Any, tokens: list[int]) -> Context:
    given = torch.tensor([tokens])
    with torch.no_grad():
        out = model(given[:, :-1], use_cache=True, output_hidden_states=True, return_shared_kv_states=True)
    return Context(dict(out.shared_kv_states), out.hidden_states[-1], given)


def along(made: Pair, at: Context, path: list[int]) -> Tensor:
    """The logits [V] that transformers' assistant has after the tokens of a path below the root."""
    token, hidden = at.root[:, -1:], at.final[:, -1:]
    position = torch.tensor([[at.root.shape[1] - 1]])
    for following in [*path, None]:
        embedded = made.model.get_input_embeddings()(token)
        with torch.no_grad():
            out = made.theirs(
                inputs_embeds=torch.cat((embedded, hidden), dim=-1),
                position_ids=position,
                shared_kv_states=dict(at.states),
                use_cache=False,
            )
        hidden = out.last_hidden_state
        token = torch.tensor([[following or 0]])
    return out.logits[0, 0]  # type: ignore[no-any-return]


def observed(made: Pair, rows: list[list[int]]) -> tuple[NetworkDrafter, SlotCache]:
    """The drafter after it has observed rows of tokens, of which the last is the root, beside the target's cache."""
    drafter = made.drafter.fresh()
    cache_ = made.target.allocate(len(rows))
    drafter.pairs.attach(cache_)
    drafter.pairs.resize(len(rows))
    for chunk in made.target.prefill(cache_, range(len(rows)), rows, drafter.taps, 8):
        drafter.observe(range(len(rows)), chunk.next_tokens, chunk.taps, chunk.counts)
    return drafter, cache_


@pytest.mark.parametrize("head", HEADS)
def test_logits_in_a_tree_are_those_of_transformers_along_each_path(pair: Any, head: str) -> None:
    """Rows shorter and longer than the window, in one batch; each node's guesses depend on its path alone."""
    made = pair(head)
    rows = tiny.prompts(2, 9, 20)
    drafter, _ = observed(made, rows)
    draw = torch.Generator().manual_seed(4)
    with torch.inference_mode():
        levels = drafter.proposer.levels(drafter.pairs, range(3), 3)
        paths: list[list[list[int]]] = [[[]] for _ in rows]
        logits = levels.first()
        for width in (3, 4, 0):
            for row, tokens in enumerate(rows):
                at = context(made.model, tokens)
                for node, path in enumerate(paths[row]):
                    torch.testing.assert_close(logits[row, node], along(made, at, path), rtol=1e-5, atol=1e-5)
            if width:
                parents = torch.randint(logits.shape[1], (3, width), generator=draw)
                chosen = torch.randint(gemma4.VOCAB, (3, width), generator=draw)
                logits = levels.add(Frontier(chosen, parents))
                paths = [
                    [
                        [*paths[row][parent], token]
                        for parent, token in zip(parents[row].tolist(), chosen[row].tolist(), strict=True)
                    ]
                    for row in range(3)
                ]


@pytest.mark.parametrize("head", HEADS)
def test_chains_in_the_engine_are_transformers_candidates(
    pair: Any, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round's draft, after accepted and after rejected guesses, and once rows are longer than the window."""
    made = pair(head)
    prompt = tiny.prompts(4)[0]
    engine = Engine(made.target, None, Speculation(made.drafter, parse_tree("chain:4")), batch_size=1)
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    drafted = []
    draft = drafter.draft

    def recorded(*args: Any, **options: Any) -> Any:
        tree = draft(*args, **options)
        drafted.append((drafter.pairs.length(0), tree.tokens[0].tolist()))
        return tree

    monkeypatch.setattr(drafter, "draft", recorded)
    answer = engine.generate([Request(prompt, SamplingParams(max_tokens=12))])[0].token_ids
    assert len(drafted) > 3
    config = GenerationConfig(max_length=200)
    made.theirs.generation_config.num_assistant_tokens = 4
    for length, tokens in drafted:
        at = context(made.model, [*prompt, *answer][: length + 1])
        theirs = SinglePositionMultiTokenCandidateGenerator(made.theirs, made.model.get_input_embeddings(), config)

        class Outputs:
            hidden_states = (at.final,)
            shared_kv_states = at.states

        found, _ = theirs.get_candidates(at.root, {}, Outputs(), False, 0)  # type: ignore[arg-type]
        assert found[0, length + 1 :].tolist()[: len(tokens)] == tokens


@pytest.mark.parametrize(
    ("head", "temperature", "tree"),
    [
        ("centroids", 0.0, "dynamic:3,3,7"),
        ("all", 1.0, "chain:3"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in product(HEADS, (0.0, 1.0), ("chain:3", "dynamic:3,3,7", "shared:3,3,7"))
        ),
    ],
)
def test_output_is_that_of_plain_decoding(pair: Any, head: str, temperature: float, tree: str) -> None:
    """With one row or four, and cached prefixes."""
    made = pair(head)
    equal_to_plain(made.target, made.drafter, temperature, tree)


def test_preempted_rows_draft_on_from_what_is_read_again(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair("all")
    requests = [
        Request(prompt, SamplingParams(max_tokens=14, temperature=0.8, seed=seed))
        for seed, prompt in enumerate(tiny.prompts(5, 12, 9, 7))
    ]
    plain = [one.token_ids for one in Engine(made.target, batch_size=4).generate(requests)]
    commit = SlotCache.commit
    calls = list[Any]()

    def interrupted(cache_: SlotCache, *args: Any) -> None:
        calls.append(args)
        if len(calls) in (9, 17):
            raise KeyboardInterrupt
        commit(cache_, *args)

    limits = Limits(max_running=3, prefill_chunk=5, prefix_tokens=1000)
    speculation = Speculation(made.drafter, parse_tree("dynamic:3,3,8"))
    engine = Engine(made.target, None, speculation, limits=limits, prefill_chunk=3)
    monkeypatch.setattr(SlotCache, "commit", interrupted)
    for request in requests:
        engine.submit(request)
    done: dict[int, list[int]] = {}
    while not engine.idle:
        with suppress(KeyboardInterrupt):
            done |= {chunk.index: chunk.completion.token_ids for chunk in engine.step() if chunk.completion}
        engine.check_invariants()
    assert [done[index] for index in range(4)] == plain
    assert engine.state().preempted_total > 2


@pytest.mark.parametrize("method", [None, pytest.param("+suffix", marks=pytest.mark.slow)])
def test_by_default_in_bfloat16_with_a_tree_that_auto_sizes(model_folder: Path, pair: Any, method: str | None) -> None:
    made = eyas.load(
        model_folder, draft_model=pair("centroids").folder, method=method, tree="auto", dtype="bfloat16", batch_size=2
    )
    plain = eyas.load(model_folder, dtype="bfloat16", batch_size=2)
    requests = [Request(prompt, SamplingParams(max_tokens=8)) for prompt in tiny.prompts(3, 10)]
    assert [one.token_ids for one in made.generate(requests)] == [one.token_ids for one in plain.generate(requests)]


def test_an_8_bit_cache_is_refused_by_name(model_folder: Path, pair: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="int8 cache needs native passes, but Gemma4ForCausalLM"):
        eyas.load(model_folder, draft_model=pair("all").folder, kv_cache_dtype="int8")


@pytest.mark.parametrize("in_codes", [False, True])
def test_columns_are_what_a_pass_over_them_reads(target: Target, in_codes: bool) -> None:
    cache_ = SlotCache(target.kv_shapes, 3, torch.float32, target.device, in_codes=in_codes)
    keys = torch.randn(2, 1, 5, 16)
    values = torch.randn(2, 1, 5, 16)
    rows = range(1, 3)
    written = cache_.write(1, keys, values, cache_.staging(rows, 5))
    for found, expected in zip(cache_.columns(1, rows, 2, 4), written, strict=True):
        assert torch.equal(found, expected[:, :, 2:4])


def test_without_the_target_s_cache_nothing_is_drafted(pair: Any) -> None:
    made = pair("all")
    drafter = made.drafter.fresh()
    drafter.pairs.resize(1)
    with pytest.raises(InvariantError, match="given none"):
        AssistantLevels(drafter.network, drafter.pairs, range(1))


# --- files ---


@pytest.mark.parametrize("head", HEADS)
def test_what_is_saved_loads_back_also_in_transformers(pair: Any, head: str, tmp_path: Path) -> None:
    made = pair(head)
    network = load_network(made.folder, made.target)
    save_network(network, tmp_path)
    again = load_network(tmp_path, made.target)
    assert again.config == network.config
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name])
    theirs = type(made.theirs).from_pretrained(tmp_path)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, made.theirs.state_dict()[name])


def test_the_unified_assistants_are_the_same_network(pair: Any, tmp_path: Path) -> None:
    made = pair("all")
    (tmp_path / "model.safetensors").write_bytes((made.folder / "model.safetensors").read_bytes())
    config = json.loads((made.folder / "config.json").read_text())
    config |= {"model_type": "gemma4_unified_assistant", "architectures": ["Gemma4UnifiedAssistantForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_network(tmp_path, made.target).config == made.drafter.network.config


def damaged(made: Pair, path: Path, text: dict[str, Any], tensors: dict[str, Tensor | None], **keys: Any) -> Path:
    """A copy of an assistant with other keys in its text config and beside it, and with other tensors."""
    config = json.loads((made.folder / "config.json").read_text())
    config["text_config"] |= text
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | keys))
    held: dict[str, Any] = {**load_file(made.folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path / "model.safetensors")
    return path


ORDER = "masked_embedding.token_ordering"
FLAT = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("text", "tensors", "keys", "reason"),
    [
        ({}, {"pre_projection.weight": None}, {}, "missing: pre_projection.weight"),
        ({}, {"model.layers.1.self_attn.k_proj.weight": torch.zeros(16, 16)}, {}, "extra: .*k_proj"),
        ({}, {"post_projection.weight": torch.zeros(32, 15)}, {}, r"post_projection.weight is \[32, 15\]"),
        ({}, {"model.norm.weight": torch.full((16,), float("nan"))}, {}, "model.norm|norm.weight holds NaN"),
        ({}, {ORDER: torch.zeros(98, dtype=torch.int64)}, {}, "token_ordering doesn't name every token once"),
        ({}, {ORDER: torch.arange(98.0)}, {}, "token_ordering holds no whole numbers"),
        ({}, {}, {"num_centroids": 13}, "13 centroids can't share 98 tokens"),
        ({}, {}, {"centroid_intermediate_top_k": 15}, "fewer than 15"),
        ({}, {}, {"num_centroids": None}, "there is no num_centroids"),
        ({}, {}, {"use_ordered_embeddings": False}, "extra: masked_embedding"),
        ({}, {}, {"backbone_hidden_size": 64}, "it reads states 64 wide, the target's are 32"),
        ({}, {}, {"tie_word_embeddings": False}, "tie_word_embeddings is false"),
        ({}, {}, {"taps": [1]}, "taps: an assistant reads"),
        ({}, {}, {"secret": 1}, "unknown key secret"),
        ({"num_hidden_layers": 4}, {}, {}, "3 layer_types for 4 layers|all of its 4 layers"),
        ({"num_kv_shared_layers": 1}, {}, {}, "num_kv_shared_layers 1: all of its 3 layers"),
        ({"hidden_size_per_layer_input": 8}, {}, {}, "hidden_size_per_layer_input isn't 0"),
        ({"enable_moe_block": True}, {}, {}, "enable_moe_block isn't False"),
        ({"use_bidirectional_attention": "all"}, {}, {}, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention", "linear_attention", "full_attention"]}, {}, {}, "layer_types"),
        ({"per_layer_config": {"2": {"hidden_size": 4}}}, {}, {}, "more than head sizes for layer 2"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, {}, {}, "different heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, {}, {}, "rope_type 'yarn' of full_attention"),
        ({"rope_parameters": {"full_attention": 3}}, {}, {}, "rope_parameters of full_attention is no object"),
        ({"rope_parameters": {"full_attention": FLAT | {"factor": 2}}}, {}, {}, "unknown key factor"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": -1}}}, {}, {}, "rope_theta of sliding_attention"),
        ({"sliding_window": 0}, {}, {}, "sliding_window"),
        ({"layer_types": 3}, {}, {}, "layer_types is 3, not a list"),
        ({"layer_types": [["full_attention"]] * 3}, {}, {}, "layer_types must name"),
        ({"per_layer_config": {"2": {"head_dim": [16]}}}, {}, {}, "global_head_dim"),
        ({"num_attention_heads": 3}, {}, {}, "3 heads can't share 2"),
        ({"sliding_window": 7}, {}, {}, "of another model: it attends to a window of 7, the target to one of 6"),
        ({"num_key_value_heads": 4}, {}, {}, "it reads 4 heads of 8 in sliding_attention, the target has 2 of 8"),
        (
            {"per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 2}}},
            {},
            {},
            "reads 2 heads of 16 in full",
        ),
        ({"rope_parameters": {"full_attention": FLAT}}, {}, {}, "RoPE in full_attention has theta 10000.0"),
    ],
)
def test_files_that_are_wrong_or_of_another_model_are_refused(
    pair: Any,
    tmp_path: Path,
    text: dict[str, Any],
    tensors: dict[str, Tensor | None],
    keys: dict[str, Any],
    reason: str,
) -> None:
    made = pair("centroids")
    with pytest.raises(EyasError, match=reason):
        load_drafter(damaged(made, tmp_path, text, tensors, **keys), made.target)


def test_assistants_of_other_models_are_refused_by_their_sizes(pair: Any, tmp_path: Path) -> None:
    made = pair("all")
    gemma4.assistant(False, vocab_size=84).save_pretrained(tmp_path / "tokens")
    with pytest.raises(EyasError, match="its vocabulary has 84 tokens, the target's 98"):
        load_drafter(tmp_path / "tokens", made.target)
    gemma4.assistant(False, global_head_dim=32).save_pretrained(tmp_path / "heads")
    with pytest.raises(EyasError, match="it reads 1 heads of 32 in full_attention, the target has 1 of 16"):
        load_drafter(tmp_path / "heads", made.target)
    llama = Target(tiny.build_model("llama", vocab_size=gemma4.VOCAB))
    with pytest.raises(EyasError, match="it reads the keys of a sliding_attention layer, and the target has none"):
        load_drafter(made.folder, llama)


def test_it_is_not_trained() -> None:
    with pytest.raises(ValueError, match="comes with its target and isn't trained"):
        DrafterShape(kind="gemma4_assistant")


def test_auto_and_inspect_know_the_published_assistant(
    pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eyas.loading")
    made = pair("centroids")
    model, drafter = tmp_path / "gemma-4-E2B-it", tmp_path / "gemma-4-E2B-it-assistant"
    made.model.save_pretrained(model)
    drafter.symlink_to(made.folder)
    found = make_drafter(DrafterOptions("auto", quantize="off"), made.target, model=model)
    assert isinstance(found, NetworkDrafter)
    assert isinstance(found.network, AssistantNetwork)
    assert "published for google/gemma-4-E2B-it (gemma4_assistant)" in caplog.text
    report = report_drafter(drafter, report_target(model, read_headers(model)).profile)
    assert not report.problems
    assert (report.own_embedding, report.own_head) == (False, True)


def test_sizes_of_a_target_whose_layers_differ_are_known_without_its_weights(model_folder: Path) -> None:
    assert described(model_folder).num_layers == 6
    size = model_size(read_config(find_target(model_folder)))
    assert (size.query, size.key) == (4 * 8, 2 * 8)


# --- GGUF ---


def test_a_gguf_file_has_the_same_network_and_drafts(pair: Any, tmp_path: Path) -> None:
    made = pair("all")
    file = gemma4.write_gguf(tmp_path / "mtp-tiny.gguf", made.theirs)
    network = load_network(file, made.target)
    twin = load_network(made.folder, made.target)
    assert network.config == twin.config
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name])
    drafter = make_drafter(DrafterOptions(file, method="gemma4_assistant", quantize="off"), made.target)
    assert isinstance(drafter, NetworkDrafter)
    firsts = []
    for one in (made, made._replace(drafter=drafter)):
        beside, _ = observed(one, tiny.prompts(4, 11))
        with torch.inference_mode():
            firsts.append(beside.proposer.levels(beside.pairs, range(2), 1).first())
    assert torch.equal(*firsts)


def test_a_gguf_file_s_centroids_are_left_out_as_in_llama_cpp(pair: Any, tmp_path: Path) -> None:
    made = pair("centroids")
    more = {
        "masked_embd_centroids.weight": made.theirs.masked_embedding.centroids.weight,
        "masked_embd_ordering": made.theirs.masked_embedding.token_ordering.int(),
    }
    network = load_network(gemma4.write_gguf(tmp_path / "mtp-tiny.gguf", made.theirs, tensors=more), made.target)
    assert isinstance(network, AssistantNetwork)
    assert network.masked_embedding is None
    states = torch.randn(2, 16)
    assert torch.equal(network.logits(states), states @ made.theirs.lm_head.weight.T)


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({}, {"nextn.pre_projection.weight": None}, "missing: pre_projection.weight"),
        ({}, {"blk.1.attn_k.weight": torch.zeros(16, 16)}, "no assistant network has: blk.1.attn_k.weight"),
        ({}, {"output.weight": torch.zeros(98, 16)}, "no assistant network has: output.weight"),
        ({}, {"rope_freqs.weight": None}, "has no rope_freqs.weight"),
        ({}, {"rope_freqs.weight": torch.tensor([1.0, 2.0] + [1e30] * 6)}, "scales frequencies"),
        ({}, {"blk.0.attn_q.weight": torch.zeros(16, 16)}, "q_proj.weight is"),
        ({"nextn_predict_layers": 1}, {}, "nextn_predict_layers 1: it has 3 layers"),
        ({"block_count": 2}, {}, "must say for each of 2 layers"),
        ({"attention.sliding_window_pattern": None}, {}, "sliding_window_pattern must say"),
        ({"attention.head_count_kv": [2, 1, 1]}, {}, "layers of one type must have as many heads"),
        ({"attention.head_count_kv": [2, 2]}, {}, "must be one whole number"),
        ({"attention.value_length": 8}, {}, "head sizes"),
        ({"attention.key_length_swa": 4}, {}, "head sizes"),
        ({"attention.shared_kv_layers": 2}, {}, "num_kv_shared_layers 2"),
        ({"embedding_length_out": 16}, {}, "it reads states 16 wide"),
        ({"rope.freq_base_swa": [1, 2]}, {}, r"rope.freq_base_swa is \[1, 2\], not a number"),
        ({}, {"rope_freqs.weight": torch.ones(4)}, "rope_freqs.weight has 4 numbers"),
        ({"embedding_length_per_layer_input": 8}, {}, "hidden_size_per_layer_input"),
        ({"rope.scaling.factor": 2.0}, {}, "scaled RoPE"),
        ({"expert_count": 4}, {}, "unknown keys expert_count"),
        ({"rope.freq_base": 5e5}, {}, "RoPE in full_attention has theta 500000.0, the target's 1000000.0"),
    ],
)
def test_gguf_files_that_are_wrong_are_refused(
    pair: Any, tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Tensor | None], reason: str
) -> None:
    made = pair("all")
    file = gemma4.write_gguf(tmp_path / "mtp-tiny.gguf", made.theirs, keys, tensors)
    with pytest.raises(EyasError, match=reason):
        load_drafter(file, made.target)
