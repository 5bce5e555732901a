"""What the doctor asks: short tasks of many sorts, written for it; none is part of an evaluation set."""

from __future__ import annotations

from typing import Any

from eyas.bench.demo_prompts import PROMPTS as DEMO
from eyas.data.chats import Message
from eyas.data.prompts import encode_chat, encode_text
from eyas.errors import RequestError

PROMPTS: tuple[str, ...] = (
    *(text for _, text in DEMO),
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils away. How many are left?",
    "Write a short story about a lighthouse.",
    "Write a Python function that returns the prime numbers below n.",
    "What does `os.path.join` do?",
    "A train travels 60 miles in 1.5 hours. How far does it travel in 4 hours?",
    "List three ways to save water at home.",
    "Complete the code I provided.\n\ndef merge(first, second):\n"
    '    """Merge two sorted lists into one sorted list.\n    """\n',
    "Explain in two sentences why the sky is blue.",
    "Sara bakes 5 trays of 8 cookies and sells each cookie for $2. How much does she earn?",
    "What is the capital of France, and what is it known for?",
    "Explain what a hash table is to someone who has never programmed.",
    "A shop sells apples at $3 a kilo. How much do 4 kilos and a bag for $1 cost?",
    "Describe a walk through a market in the early morning.",
    "What does `json.dumps` do?",
    "Complete the code I provided.\n\ndef flatten(items):\n"
    '    """Return one list with the elements of a list of lists.\n    """\n',
    "Write a polite email that asks for a meeting next week.",
    "Anna reads 18 pages a day. How many pages does she read in two weeks?",
    "Translate 'good morning' into French, Spanish and German.",
    "Give me a simple recipe for pancakes.",
)


def encode_prompts(tokenizer: Any, longest: int | None) -> list[tuple[int, ...]]:
    """Every prompt shorter than `longest` tokens: as a chat where the tokenizer has a template, else as plain text.

    Raises RequestError if none is.
    """
    encoded = [_encode(tokenizer, text) for text in PROMPTS]
    fitting = [prompt for prompt in encoded if longest is None or len(prompt) < longest]
    if not fitting:
        raise RequestError(f"the target's context holds {longest} tokens: too few for any of the doctor's prompts")
    return fitting


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, [Message(role="user", content=text)])
    return encode_text(tokenizer, text)
