"""Random hybrids (Qwen3-Next, Granite 4, LFM2) in vLLM on the CPU: greedy answers compared with ours.

    python -m benchmarks.engines.hybrids VENV/bin/python [--prompts 8] [--tokens 32] [--output FILE.json]

vLLM's gated delta rule supports only bfloat16 on a CPU; its error in float32 is reported. In bfloat16, engines round
differently and diverge at near-ties, so each token of both sides is judged by the model's logits in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteMoeHybridConfig, Lfm2Config, Qwen3NextConfig

import eyas
from benchmarks.engines.vllm import Job, offline
from benchmarks.harness import Output, report, script
from eyas.bench.offline.certificate import first_difference
from eyas.errors import EndpointError
from eyas.targets import load_target

TOY = Path(__file__).parents[2] / "tests" / "toy" / "target"


_SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "qwen3_next": Qwen3NextConfig(
        **_SIZES, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **_SIZES, layer_types=[*["linear_attention"] * 3, "full_attention"], mamba_n_heads=8, mamba_d_head=64,
        mamba_d_state=16, mamba_n_groups=1, num_local_experts=0, shared_intermediate_size=512,
    ),
    "lfm2": Lfm2Config(
        **_SIZES, layer_types=[*["conv"] * 3, "full_attention"], block_auto_adjust_ff_dim=False,
        conv_dim=256, block_dim=256, block_ff_dim=512,  # vLLM reads these
    ),
}  # fmt: skip
"""Four layers each, one of them attention."""


def save_model(config: Any, folder: Path) -> None:
    """Save a random model with the toy target's tokenizer; weights are scaled up so that it doesn't repeat itself."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "A_log" not in name:
                weight.mul_(4.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOY).save_pretrained(folder)


def deficits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """How far the logit of each token of an answer is below the best logit at its position."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    found: list[float] = (logits.amax(-1) - logits[torch.arange(len(answer)), torch.tensor(answer)]).tolist()
    return found


def judged(model: Any, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far answers' tokens are below the best, by the model's float32 logits."""
    found = [deficit for pair in zip(prompts, answers, strict=True) for deficit in deficits(model, *pair)]
    best = sum(deficit == 0 for deficit in found)
    return {"tokens": len(found), "best": best, "largest_deficit": round(max(found), 3)}


def compared(
    model: Any, prompts: Sequence[tuple[int, ...]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Number of equal answers, positions of first differences, and both sides judged."""
    firsts = [first_difference(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    return {
        "equal": firsts.count(None), "first_differences": [at for at in firsts if at is not None],
        "eyas": judged(model, prompts, ours), "vllm": judged(model, prompts, theirs),
    }  # fmt: skip


def run(
    python: Path, name: str, dtypes: Sequence[str], asked: Sequence[tuple[int, ...]], tokens: int
) -> dict[str, Any]:
    """The findings for a model, by dtype."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save_model(MODELS[name], folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for dtype in dtypes:
            engine = eyas.Engine(load_target(folder, device="cpu", dtype=dtype))
            params = eyas.SamplingParams(max_tokens=tokens)
            ours = [one.token_ids for one in engine.generate([eyas.Request(prompt, params) for prompt in asked])]
            try:
                version, answers = offline(python.absolute(), Job(folder, folder, 0, tokens, asked, dtype=dtype))
            except EndpointError as error:
                found[dtype] = {"error": str(error), "eyas": judged(model, asked, ours)}
            else:
                found |= {"version": version, dtype: compared(model, asked, ours, [a.tokens for a in answers])}
    return found


@script
def main(python: Path, *, prompts: int = 8, tokens: int = 32, output: Output = None) -> None:
    draw = torch.Generator().manual_seed(0)
    asked = [tuple(torch.randint(8, 4096, (9 + 7 * i,), generator=draw).tolist()) for i in range(prompts)]
    found = {}
    for name in MODELS:
        dtypes = ("float32", "bfloat16") if name == "qwen3_next" else ("float32",)
        found[name] = run(python, name, dtypes, asked, tokens)
        report({"engine": "vLLM", "prompts": prompts, "tokens": tokens, **found}, output)


if __name__ == "__main__":
    raise SystemExit(main())
