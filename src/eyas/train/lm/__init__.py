"""Pretraining of small language models, such as those that draft (`--method draft_model`)."""
