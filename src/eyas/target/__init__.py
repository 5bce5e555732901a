"""The target: any transformers decoder LM behind prefill, verify and commit."""

from eyas.target.loading import load_target, load_tokenizer
from eyas.target.slots import KVShape, SlotCache
from eyas.target.target import PrefillChunk, Target, Trace, Verified

__all__ = [
    "KVShape", "PrefillChunk", "SlotCache", "Target", "Trace", "Verified", "load_target", "load_tokenizer",
]  # fmt: skip
