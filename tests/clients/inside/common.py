"""Shared by the cases of every client: the server's address, requests, and answers over plain HTTP.

The cases run in a client's own environment without eyas, so only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

URL = os.environ["EYAS_URL"]
"""The server, without `/v1`."""
TOKENIZER = os.environ["EYAS_TOKENIZER"]
"""The target's folder, for clients that count tokens themselves."""
MODEL, KEY = "demo", "none"
NAMES = [MODEL, "llama-server"]
"""All names of the model."""
QUESTION = "How many legs have three spiders?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CITIES = ("Bern", "Basel")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "days": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA},
}


def post(path: str, **body: Any) -> Any:
    """The server's answer to a greedy request, as JSON."""
    data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def chat(tokens: int, **body: Any) -> str:
    """The greedy answer to the question, of at most `tokens` tokens."""
    content: str = post("/v1/chat/completions", messages=MESSAGES, max_tokens=tokens, **body)["choices"][0]["message"][
        "content"
    ]
    assert content.strip()
    return content


def fits(arguments: Any) -> bool:
    """Whether these arguments match the tool's schema."""
    return set(arguments) == {"city", "days"} and arguments["city"] in CITIES and arguments["days"] in (1, 2, 3)
