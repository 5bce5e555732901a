"""How BPE tokenizers of GGUF files split text: as llama.cpp's own code does."""

from __future__ import annotations

import pytest

from eyas.gguf_splits import RULES, pre_tokenizer

TEXT = "It'S 12345  aBc=\n\n 我们 Ok,x.  "
GOLDEN = {
    "It¦'¦S¦ 12345¦ ¦ aBc¦=¦\n\n¦ 我们¦ Ok¦,¦x¦.¦  ": (
        "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en jina-v2-code "
        "jina-v2-de jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion"
    ),
    "It¦'S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc¦=\n\n¦ 我们¦ Ok¦,x¦.¦  ": (
        "bailingmoe bailingmoe2 deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo llada-moe megrez qwen2 qwen35 "
        "solar-open stablelm2 ufakzeka"
    ),
    "It'S¦ 12345¦ ¦ aBc=¦\n\n¦ 我们¦ Ok¦,¦x¦.  ": "bloom gpt3-finnish poro-chat",
    "It¦'¦S¦ ¦1¦2¦3¦4¦5¦  ¦aBc¦=¦\n¦\n¦ 我们¦ Ok¦,¦x¦.¦  ": "chameleon",
    "It¦'S¦ ¦123¦45¦ ¦ aBc¦=\n\n¦ 我们¦ Ok¦,x¦.¦  ": (
        "chatglm-bpe dbrx falcon-h1 falcon3 glm4 glm5 jais-2 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 "
        "midm-2.0 minicpm5 pixtral smaug-bpe"
    ),
    "It¦'¦S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc¦=¦\n\n¦ 我们¦ Ok¦,¦x¦.¦  ": (
        "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder"
    ),
    "It'S¦ ¦12¦345¦ ¦ a¦Bc¦=\n\n¦ 我们¦ Ok¦,x¦.¦  ": "cohere2moe tiny_aya",
    "It¦'¦S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc¦=¦\n¦\n¦ ¦我们¦ Ok¦,¦x¦.¦  ": "deepseek-coder",
    "It¦'¦S¦ ¦12345¦ ¦ aBc¦=¦\n¦\n¦ ¦我们¦ Ok¦,¦x¦.¦  ": "deepseek-llm",
    "It¦'S¦ ¦123¦45¦ ¦ aBc¦=\n\n¦ ¦我们¦ Ok¦,x¦.¦  ": "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    "It¦'¦S¦ ¦123¦45¦ ¦ aBc¦=¦\n\n¦ 我们¦ Ok¦,¦x¦.¦  ": "default falcon",
    "It¦'S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc¦=\n¦\n¦ 我们 Ok¦,x¦.¦  ": "exaone-moe",
    "It'S¦ ¦123¦45¦ ¦ a¦Bc¦=\n\n¦ 我们¦ Ok¦,x¦.¦  ": "gpt-4o kanana2 llama4 minimax-m2 talkie",
    "It¦'S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc¦=¦\n\n¦ 我们¦ Ok¦,x¦.¦  ": "laguna seed-coder",
    "It¦'S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc¦=¦\n¦\n¦ ¦我们¦ Ok¦,x¦.¦  ": "spark2_5",
    "It'S 12345  aBc=¦\n\n¦ 我们 Ok,x.  ": "gemma4 granite-embed-multi-311m sarvam-moe",
    "It'S ¦12¦345¦  aBc=\n\n 我们 Ok,x.  ": "superbpe",
    "It¦'S¦ ¦1¦2¦3¦4¦5¦ ¦ a¦Bc¦=\n\n¦ 我们¦ Ok¦,x¦.¦  ": "tekken",
    "It'S¦ ¦1¦2¦3¦4¦5¦ ¦ aBc=¦\n\n¦ 我们¦ Ok¦,¦x¦.  ": "viking",
    "It'S¦ ¦1¦2¦3¦4¦5¦ ¦ a¦Bc¦=\n\n¦ ¦我们¦ Ok¦,x¦.¦  ": "youtu",
}
"""What `unicode_regex_split` of llama.cpp makes of the text, less its empty pieces, by which rules.

But for `cohere2moe`, `tiny_aya` and `youtu`: it takes every letter there for a small and a capital one.
"""


def test_every_rule_is_tried() -> None:
    assert set(" ".join(GOLDEN.values()).split()) == set(RULES)


@pytest.mark.parametrize("pieces", GOLDEN)
def test_rules_split_as_llama_cpp_does(pieces: str) -> None:
    for rule in GOLDEN[pieces].split():
        spans = [span for _, span in pre_tokenizer(RULES[rule]).pre_tokenize_str(TEXT)]
        assert "¦".join(TEXT[first:stop] for first, stop in spans) == pieces, rule
