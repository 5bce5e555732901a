"""The table of keys of GGUF files, as the page on them shows it."""

from __future__ import annotations

from pathlib import Path

from eyas.gguf_keys import table

PAGE = Path(__file__).parent.parent / "docs" / "gguf.md"


def test_the_page_has_the_table_of_all_keys() -> None:
    wanted = [f"| `{key}` | {names} | {told} |" for key, names, told in table()]
    found = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert found == wanted, "docs/gguf.md should have these rows:\n" + "\n".join(wanted)
