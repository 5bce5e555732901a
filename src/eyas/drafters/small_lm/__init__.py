"""A small language model as drafter: any transformers decoder, drafting with its own slot cache."""

METHOD = "draft_model"
"""The method's name, as in vLLM."""
OTHER_NAME = "small-lm"
"""Another name for it, which says what it is."""
