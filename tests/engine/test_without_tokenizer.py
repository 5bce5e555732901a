"""Directories without tokenizer files: token ids in and out, and answers end where `transformers.generate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from eyas.engine import Engine, Speculation
from eyas.errors import RequestError
from eyas.session import load
from eyas.targets.tokenizers import load_tokenizer
from eyas.text.template import encode_chat, encode_text
from eyas.tree import parse_tree
from eyas.types import GrammarSpec, Request, SamplingParams

from .. import pairs, tiny

TOKENS = 16
LENGTHS = (13, 5, 9)
END = 3
INVENTED = {"cohere": 6}
"""The model's own end token, and the one of the tokenizer that transformers would invent: 0, but for Cohere's."""

_SIZES: dict[str, Any] = tiny._COMMON | {"tie_word_embeddings": False, "eos_token_id": END}
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FEW: dict[str, dict[str, Any]] = {
    "cohere": {}, "gpt2": {"n_positions": 256}, "qwen2": {}, "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8}, "llama": {}, "deepseek_v3": {**_EXPERTS, **_LATENT},
}  # fmt: skip
MANY: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 8}, "mixtral": {**_EXPERTS, "head_dim": 8}, "olmo": {}, "olmo2": {}, "olmo3": {},
    "olmoe": _EXPERTS, "phi": {}, "phi3": {}, "phimoe": _EXPERTS, "gpt_oss": {**_EXPERTS, "head_dim": 8},
    "glm": {"head_dim": 8}, "glm4": {"head_dim": 8}, "glm4_moe": {**_EXPERTS, "head_dim": 8, "n_routed_experts": 4},
    "granite": {}, "granitemoe": _EXPERTS, "smollm3": {}, "stablelm": {}, "starcoder2": {}, "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8}, "gpt_neox": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4}, "gpt_bigcode": {"n_positions": 256}, "nemotron": {}, "persimmon": {}, "exaone4": {},
    "ernie4_5": {"head_dim": 8}, "seed_oss": {"head_dim": 8}, "arcee": {}, "cohere2": {}, "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "dots1": {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8},
    "qwen2_moe": _EXPERTS,
    "deepseek_v2": {**_EXPERTS, **_LATENT}, "biogpt": {}, "xglm": {"d_model": 32, "ffn_dim": 48, "attention_heads": 4},
    "falcon": {"alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True},
}  # fmt: skip
ALL = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)]


def build(name: str) -> Any:
    """A random model whose tokens are numbered so that the invented end token, and later its own, are generated."""
    torch.manual_seed(0)
    settings = FEW | MANY
    model = tf.AutoModelForCausalLM.from_config(tf.CONFIG_MAPPING[name](**{**_SIZES, **settings[name]})).eval()
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(14.0)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    said = tiny.continuation(model, tiny.prompts(*LENGTHS)[0], TOKENS, eos_token_id=None)
    told = list(dict.fromkeys(said))
    for number, token in zip((INVENTED.get(name, 0), END), (told[0], told[len(told) // 2]), strict=True):
        swap(model, number, token)
    return model


def swap(model: Any, one: int, other: int) -> None:
    """Renumber two tokens."""
    parts = {id(part): part for part in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    bias = getattr(model.get_output_embeddings(), "bias", None)
    for part in (*parts.values(), *([] if bias is None else [bias])):
        part[[one, other]] = part[[other, one]].clone()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ALL)
def test_answers_end_where_transformers_ends_them(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    engine = load(tmp_path, dtype="float32", device="cpu", batch_size=2)
    assert engine.tokenizer is None
    assert engine.eos_ids == (END,)
    prompts = tiny.prompts(*LENGTHS)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = [tiny.continuation(model, prompt, TOKENS) for prompt in prompts]
    requests = [Request(tuple(prompt), SamplingParams(max_tokens=TOKENS)) for prompt in prompts]
    plain = engine.generate(requests)
    assert [done.token_ids for done in plain] == expected
    assert {done.text for done in plain} == {""}
    oracle = tiny.OracleDrafter(
        [p + e for p, e in zip(prompts, expected, strict=True)], (0, 2), device=torch.device("cpu")
    )
    drafting = Engine(engine.target, None, Speculation(oracle, parse_tree("chain:3")), batch_size=2)
    done = drafting.generate(requests)
    assert [each.token_ids for each in done] == expected
    assert sum(each.stats.walked for each in done) > 0


@pytest.mark.parametrize("name", FEW)
def test_the_end_token_that_would_be_invented_is_generated(name: str) -> None:
    """Else the test above would prove nothing; it goes on behind it, up to the model's own."""
    said = tiny.continuation(build(name), tiny.prompts(*LENGTHS)[0], TOKENS)
    assert INVENTED.get(name, 0) in said[:-1]


def test_text_in_says_what_is_missing(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None
    engine = load(tmp_path, device="cpu")
    for encode in (lambda: encode_text(None, "x"), lambda: encode_chat(None, [])):
        with pytest.raises(RequestError, match=r"no tokenizer files \(tokenizer.json, tokenizer_config.json\)"):
            encode()
    with pytest.raises(RequestError, match="a grammar needs a tokenizer"):
        engine.check(Request((5,), grammar=GrammarSpec("regex", "a+")))


def test_the_tokenizer_s_end_token_counts_in_chats_only(tmp_path: Path) -> None:
    """The fixture's template ends turns with it, and the generation config doesn't name it."""
    engine = load(pairs.save_target(tmp_path, eos_token_id=[END]), dtype="float32", device="cpu")
    end = pairs.tokenizer().eos_token_id
    prompt = tuple(tiny.prompts(9)[0])
    params = SamplingParams(max_tokens=6, logit_bias={end: 1e4})
    (raw,), (chat,) = (engine.generate([Request(prompt, params, chat=chat)]) for chat in (False, True))
    assert (raw.token_ids, raw.finish_reason) == ([end] * 6, "length")
    assert (chat.token_ids, chat.finish_reason) == ([end], "stop")
