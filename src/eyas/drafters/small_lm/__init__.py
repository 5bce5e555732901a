"""A small language model as drafter: any transformers decoder, drafting with its own slot cache."""

METHOD = "draft_model"
"""What this method is called, as in vLLM."""
