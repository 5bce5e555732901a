"""Tool calls and structured output: grammars for answers, parsers for calls."""
