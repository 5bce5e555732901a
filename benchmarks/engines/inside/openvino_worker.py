"""OpenVINO GenAI in its own process: reads JSON lines with a prompt's tokens, writes one with the answer and its times.

python openvino_worker.py TARGET DRAFTER K [PROPERTY=VALUE ...], with K = 0 for plain decoding. Run by
`benchmarks/openvino.py` for its times and by `benchmarks/engines` for its counts.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main(target: str, drafter: str, chain: int, **properties: str) -> None:
    draft = {"draft_model": openvino_genai.draft_model(drafter, "CPU")} if chain else {}
    pipeline = openvino_genai.LLMPipeline(target, "CPU", **draft, **properties)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = openvino_genai.GenerationConfig(
            max_new_tokens=asked["tokens"],
            ignore_eos=asked.get("ignore_eos", True),
            do_sample=False,
            apply_chat_template=False,
        )
        if chain:
            config.num_assistant_tokens = chain
        ids = np.array([asked["prompt"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        done = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - began
        answer = {"tokens": [int(token) for token in done.tokens[0]], "seconds": seconds}
        if chain:
            counted = done.extended_perf_metrics
            answer["emitted"] = list(counted.main_model_metrics.raw_metrics.m_batch_sizes)  # tokens of each target pass
            answer["drafted"] = counted.get_num_draft_tokens()
        print(json.dumps({**answer, "first": done.perf_metrics.get_ttft().mean / 1e3}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), **dict(word.split("=") for word in sys.argv[4:]))
