"""Feature stores: the states that a target computed once, in shards on disk, and their readers."""

from eyas.data.store.layout import RowTotals, ShardLayout, classic_bytes, size_of
from eyas.data.store.manifest import Manifest
from eyas.data.store.reader import FeatureStore, HybridSource, StoreSource

__all__ = [
    "FeatureStore",
    "HybridSource",
    "Manifest",
    "RowTotals",
    "ShardLayout",
    "StoreSource",
    "classic_bytes",
    "size_of",
]
