"""`eyas data regenerate`: the target answers chats itself, in this process, at an endpoint, or through batch files."""

from __future__ import annotations

from eyas.data.regenerate.endpoint import BatchAnswerer, BatchFile, CompletionSettings, Connection, EndpointAnswerer
from eyas.data.regenerate.journal import Answer, Answerer, Question, Reply, Unanswered
from eyas.data.regenerate.rewrite import RewriteRule
from eyas.data.regenerate.run import RegenerationProgress, RegenerationSummary, regenerate, write_requests

__all__ = [
    "Answer",
    "Answerer",
    "BatchAnswerer",
    "BatchFile",
    "CompletionSettings",
    "Connection",
    "EndpointAnswerer",
    "Question",
    "RegenerationProgress",
    "RegenerationSummary",
    "Reply",
    "RewriteRule",
    "Unanswered",
    "regenerate",
    "write_requests",
]
