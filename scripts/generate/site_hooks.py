"""Hooks of mkdocs: README as the first page, and links to files outside docs/ to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"""(\]\(|(?:src|srcset)=")([^)"#\s]*)((?:#[^)"\s]*)?[)"])""")
PAGES = {"README.md": "index.md"}  # that are elsewhere on the site


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=moved(text, "", config.repo_url)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri == "index.md":
        return markdown
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    return moved(markdown, folder, config.repo_url)


def moved(text: str, folder: str, repository: str) -> str:
    """Return a page of `folder` with its links as they are on the site.

    A page of docs/ is found from its place in docs/, README from there; others are files of the
    repository.
    """
    here = posixpath.relpath(folder or "docs", "docs")

    def move(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        if not link or "://" in link:
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, link))
        place = f"docs/{PAGES[place]}" if place in PAGES else place
        if not place.startswith("docs/") or place.endswith(".json"):
            return f"{before}{repository}/blob/main/{place}{after}"
        return f"{before}{posixpath.relpath(place[5:], here)}{after}"

    return LINK.sub(move, text)
