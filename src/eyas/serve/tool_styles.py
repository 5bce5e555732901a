"""How models write tool calls, told from their chat template.

| style | an answer with calls |
|---|---|
| `hermes` | text, then `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once a call (Hermes, Qwen) |
| `llama3` | nothing but `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>` |
| `mistral` | text, then `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` |
| `mistral_args` | text, then `[TOOL_CALLS]name[ARGS]{...}`, once a call (from Mistral's tokenizer 11 on) |
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolStyle:
    """One way of writing calls."""

    name: str
    marker: str
    """What announces a call. It may be a special token: decode answers with special tokens for the parser."""
    arguments: str
    """The key of the arguments, where a call is an object."""
    end: str = ""
    """What ends a call."""
    bare: bool = False
    """An answer that begins with an object is a call without a marker too; `;` may stand between calls."""
    listed: bool = False
    """All calls may stand in one list behind one marker."""
    named: bool = False
    """The name may stand before the object, which is the arguments then."""
    id_length: int = 0
    """Letters and digits of a call's id; 0 = OpenAI's form."""

    def new_id(self) -> str:
        """A call's id, random."""
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


HERMES = ToolStyle("hermes", "<tool_call>", "arguments", end="</tool_call>")
LLAMA3 = ToolStyle("llama3", "<|python_tag|>", "parameters", bare=True)
MISTRAL = ToolStyle("mistral", "[TOOL_CALLS]", "arguments", listed=True, id_length=9)
MISTRAL_ARGS = ToolStyle("mistral_args", "[TOOL_CALLS]", "arguments", listed=True, named=True, id_length=9)


def detect_tool_style(template: str | Mapping[str, str] | None) -> ToolStyle | None:
    """How the model of a chat template calls tools; None if the template knows no tools, or in a way not known here.

    Of several templates the one for tools counts.
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:  # the same mark with other contents: Qwen3-Coder, GLM
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "<|eot_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None
