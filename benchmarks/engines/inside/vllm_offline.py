"""vLLM without a server: reads a job from stdin, writes its answers to a JSON file. Runs in vLLM's own environment.

python vllm_offline.py OUTPUT < {"model", "dtype", "speculation", "tokens", "prompts"}
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Answer one prompt after another, so that the counters can be read after each."""
    import vllm

    job = json.load(sys.stdin)
    llm = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculation"],
    )
    params = vllm.SamplingParams(max_tokens=job["tokens"], temperature=0)
    answers = []
    for prompt in job["prompts"]:
        (done,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answers.append({"tokens": list(done.outputs[0].token_ids), "counters": counters(llm)})
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"version": vllm.__version__, "answers": answers}, file)


def counters(llm: Any) -> dict[str, Any]:
    """Cumulative counters: a number each, or a number per position."""
    found = {metric.name.split(":")[1]: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    return {name: metric.values if hasattr(metric, "values") else metric.value for name, metric in found.items()}


if __name__ == "__main__":
    main()
