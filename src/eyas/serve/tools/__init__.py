"""Tool calls and structured output: grammars that answers must satisfy, and the parser of calls."""
