"""Targets: any transformers decoder LM, loaded and given prefill, verify and commit."""

from eyas.targets.loading import load_target
from eyas.targets.passes import PrefillChunk, VerifyOutput
from eyas.targets.slots import KVShape, SlotCache
from eyas.targets.target import Target, Trace
from eyas.targets.tokenizers import load_tokenizer

__all__ = ["KVShape", "PrefillChunk", "SlotCache", "Target", "Trace", "VerifyOutput", "load_target", "load_tokenizer"]
