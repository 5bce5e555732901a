"""Plain decoding in vLLM: a job from standard input, tokens/s as JSON into a file. Runs where vLLM is installed.

python vllm_rates.py OUTPUT < {"model", "batches", "prompt", "tokens", "repeats", "vocab"}

Weights are dummies that vLLM makes itself: a plain pass costs the same whatever they are.
"""

import json
import random
import statistics
import sys
import time


def main() -> None:
    """Every batch size in turn; the time of one token (prefill) is taken off."""
    import vllm

    job = json.load(sys.stdin)
    llm = vllm.LLM(
        job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["prompt"] + job["tokens"] + 8,
        max_num_seqs=max(job["batches"]),
        enable_prefix_caching=False,
    )
    draw = random.Random(0)
    rates = {}
    for batch in job["batches"]:
        rows = [[draw.randrange(5, job["vocab"]) for _ in range(job["prompt"])] for _ in range(batch)]
        prompts = [{"prompt_token_ids": row} for row in rows]
        found = []
        for _ in range(1 + job["repeats"]):
            seconds = [timed(vllm, llm, prompts, count) for count in (1, job["tokens"])]
            found.append((job["tokens"] - 1) * batch / (seconds[1] - seconds[0]))
        rates[batch] = {"median": statistics.median(found[1:]), "min": min(found[1:]), "max": max(found[1:])}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"version": vllm.__version__, "rates": rates}, file)


def timed(vllm, llm, prompts, count):
    """Seconds that `count` tokens a prompt take."""
    params = vllm.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
