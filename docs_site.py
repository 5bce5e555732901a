"""Hooks of mkdocs (`mkdocs.yml`): the site is docs/, the README as its home, and the other files that they link to.

Links are relative to files of the repository, so that they work there. Here each is looked up, and rewritten for where
its file is in the site: `docs/X` at `X`, the README at `index.md`, others at `repository/PATH`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A link to a file: no address, no bare anchor."""


def in_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def in_repository(uri: str) -> str:
    """The file of the repository that is at this place of the site."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def linked(path: str, link: str) -> str:
    """The file of the repository that a link of the page `path` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def on_files(files: Files, config: Any) -> Files:
    """Add the README, the changelog, all files that pages link to, and those that these link to."""
    new = ["README.md", "CHANGELOG.md"]
    pages = [in_repository(file.src_uri) for file in files.documentation_pages()]
    while pages or new:
        for path in new:
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
        pages += [path for path in new if path.endswith(".md")]
        links = {linked(page, link[2]) for page in pages for link in LINK.finditer((ROOT / page).read_text("utf-8"))}
        new = sorted(path for path in links if (ROOT / path).is_file() and not files.get_file_from_path(in_site(path)))
        pages = []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, all but those in its code."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        to = posixpath.relpath(in_site(linked(in_repository(here), link[2])), posixpath.dirname(here) or ".")
        return f"{link[1]}{to}{link[3]}"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
