"""Generate an answer with a drafter and without, and compare them.

python examples/generate.py [--model MODEL] [--drafter DRAFTER] [--prompt TEXT]
"""

from __future__ import annotations

import argparse

import eyas


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2", help="a folder, a GGUF file or a Hub id")
    options.add_argument("--drafter", default="smollm2", help="a folder, a GGUF file or a Hub id")
    options.add_argument("--prompt", default="Why is the sky blue?")
    options.add_argument("--tokens", type=int, default=64, help="longest answer")
    given = options.parse_args()

    plain = eyas.load(given.model)
    speculative = eyas.load(given.model, given.drafter)
    prompt = tuple(plain.tokenizer(given.prompt).input_ids)
    # the seed decides what is sampled; the drafter doesn't
    request = eyas.Request(prompt, eyas.SamplingParams(max_tokens=given.tokens, temperature=0.7, seed=1))

    (expected,) = plain.generate([request])
    (answer,) = speculative.generate([request])
    print(answer.text)
    print(f"\nthe same tokens as without a drafter: {answer.token_ids == expected.token_ids}")
    for name, stats in (("plain", expected.stats), ("speculative", answer.stats)):
        print(f"{name}: {stats.target_passes} passes, {stats.tokens_per_second:.1f} tokens/s")
    print(f"accept length {answer.stats.accept_length:.2f}")


if __name__ == "__main__":
    main()
