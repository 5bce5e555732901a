"""A small language model as drafter: any transformers decoder, drafting with its own slot cache."""

METHOD = "draft_model"
"""The method's name, as in vLLM."""
