"""Plain decoding against `transformers.generate`: same weights, same dtype, same prompts, taking turns in one process.

`--quantize` adds the quantized target, `--draft-model` adds trees of automatic size for each target. Prompts are random
tokens, or the first of `--prompt-file`. MODEL is any target (transformers reads and dequantizes a GGUF file itself), or
a random model: a mixture of experts (`random-moe`, `random-gpt-oss`, `random-deepseek`), a model of the size of
Pythia-410M (`random-neox`) or GPT-2 medium (`random-gpt2`), or a hybrid (`random-delta`, `random-mamba`,
`random-conv`).

    python -m benchmarks.plain_decoding MODEL [--dtype bfloat16 float32] [--tokens 64] [--repeats 5] [--batch 1]
        [--quantize int8] [--draft-model DRAFTER --prompt-file EVAL/gsm8k.jsonl]
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

import eyas
from benchmarks.harness import Output, interleave, paired, report, script
from eyas.bench.offline.external import TransformersBaseline

_SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_DENSE: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
_HYBRID = {key: size for key, size in _SIZES.items() if key != "head_dim"} | {"num_hidden_layers": 24}
RANDOM: dict[str, Any] = {
    "random-moe": Qwen3MoeConfig(
        **_SIZES, moe_intermediate_size=384, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True
    ),
    "random-gpt-oss": GptOssConfig(**_SIZES, intermediate_size=768, num_local_experts=32, num_experts_per_tok=4),
    "random-deepseek": DeepseekV3Config(
        **_SIZES | {"num_key_value_heads": 16},
        intermediate_size=3072,
        moe_intermediate_size=384,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
    ),
    "random-neox": GPTNeoXConfig(
        **_DENSE, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        vocab_size=50304,
    ),
    "random-gpt2": GPT2Config(**_DENSE, n_embd=1024, n_layer=24, n_head=16),
    "random-delta": Qwen3_5TextConfig(
        **_HYBRID, intermediate_size=2560, head_dim=128, linear_num_key_heads=16, linear_num_value_heads=16
    ),
    "random-mamba": BambaConfig(
        **_HYBRID, intermediate_size=3072, attn_layer_indices=list(range(3, 24, 4)), mamba_n_heads=32, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1,
    ),
    "random-conv": Lfm2Config(
        **_HYBRID, intermediate_size=4096, block_auto_adjust_ff_dim=False,
        layer_types=(["conv"] * 3 + ["full_attention"]) * 6,
    ),
}  # fmt: skip
"""Configs by the name given as MODEL: mixtures of experts (about 950M parameters), older dense models, and hybrids of
about 0.4B parameters with attention in every fourth layer."""


def random_model(name: str, folder: str) -> str:
    """Save the random model of a name in a folder; returns the folder.

    Routers are scaled to separate experts as trained ones do: otherwise any rounding would change the choice.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(RANDOM[name], dtype=torch.bfloat16)
    for name, router in model.named_modules():
        if name.endswith((".router", "mlp.gate")):  # with 50, the sigmoids of scores would all be 1
            router.weight.data *= 5.0 if hasattr(router, "e_score_correction_bias") else 50.0
    model.save_pretrained(folder)
    return folder


def transformers_rate(model: Any, prompts: torch.Tensor, tokens: int) -> float:
    """Tokens per second of decoding: the time of one token (prefill) is subtracted from the time of `tokens`."""
    seconds = []
    for count in (1, tokens):
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - began)
    return (tokens - 1) * len(prompts) / (seconds[1] - seconds[0])


def eyas_rate(engine: eyas.Engine, prompts: torch.Tensor, tokens: int) -> float:
    """Tokens per second of decoding, by the engine's counters."""
    params = eyas.SamplingParams(max_tokens=tokens, ignore_eos=True)
    done = engine.generate([eyas.Request(tuple(row), params) for row in prompts.tolist()])
    return sum(c.stats.tokens for c in done) / max(c.stats.decode_seconds for c in done)


def prompts_of(engine: eyas.Engine, path: Path | None, count: int) -> torch.Tensor:
    """Prompts of equal length [count, n]: random tokens, or the first prompts of a file, cut to the shortest."""
    if path is None:
        torch.manual_seed(0)
        return torch.randint(5, engine.target.vocab_size, (count, 64))
    rows = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    texts = [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": row}], add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    ids = [engine.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return torch.tensor([row[-min(map(len, ids)) :] for row in ids])


def engines_of(
    model: str, dtype: str, batch: int, quantize: str | None, draft_model: str | None
) -> dict[str, eyas.Engine]:
    """Engines of eyas: the plain one first, then, if requested, those with quantized weights and with a drafter."""
    return {
        " ".join(["eyas", *([weights] if weights else []), *(["auto"] if drafter else [])]): eyas.load(
            model, drafter, tree="auto" if drafter else None, dtype=dtype, batch_size=batch, quantize=weights
        )
        for weights in dict.fromkeys((None, quantize))
        for drafter in dict.fromkeys((None, draft_model))
    }


@script
def main(
    model: str,
    *,
    dtype: Sequence[str] = ("bfloat16",),
    tokens: int = 64,
    repeats: int = 5,
    batch: int = 1,
    quantize: Literal["int8", "int4"] | None = None,
    draft_model: str | None = None,
    prompt_file: Path | None = None,
    output: Output = None,
) -> None:
    measured = {}
    with TemporaryDirectory() as folder:
        source = random_model(model, folder) if model in RANDOM else model
        for precision in dtype:
            engines = engines_of(source, precision, batch, quantize, draft_model)
            stock = TransformersBaseline(source, engines["eyas"]).model
            prompts = prompts_of(engines["eyas"], prompt_file, batch)
            sides = {"transformers": partial(transformers_rate, stock, prompts, tokens)}
            sides |= {name: partial(eyas_rate, engine, prompts, tokens) for name, engine in engines.items()}
            measured[precision] = ratios(interleave(sides, repeats))
    parameters = sum(parameter.numel() for parameter in stock.parameters())
    report({"model": model, "parameters": parameters, "batch": batch, "dtype": measured}, output)


def ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The sides' tokens per second and their ratios, for one dtype."""
    others = [name for name in rates if name not in ("transformers", "eyas")]
    return {
        "tokens_per_second": {name: round(median(values), 2) for name, values in rates.items()},
        "eyas_over_transformers": paired(rates["eyas"], rates["transformers"]),
        "over_eyas": {name: paired(rates[name], rates["eyas"]) for name in others},
    }


if __name__ == "__main__":
    raise SystemExit(main())
