"""The site of docs/: links of the pages, and every page in its navigation."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_links_lead_to_pages_of_the_site_or_to_the_repository():
    pytest.importorskip("mkdocs")
    from site_hooks import moved

    text = "[a](docs/start.md) [b](NOTICE) [c](#here) [d](https://e.org) [z](docs/zh/README.md)"
    assert moved(text, "", "R") == (
        "[a](start.md) [b](R/blob/main/NOTICE) [c](#here) [d](https://e.org) [z](zh/README.md)"
    )
    text = '[a](../README.md#prove-it) [b](tasks.md#data) [c](../conf) <img src="images/x.svg">'
    assert moved(text, "docs/", "R") == (
        '[a](index.md#prove-it) [b](tasks.md#data) [c](R/blob/main/conf) <img src="images/x.svg">'
    )
    text = '[a](../../README.md) [b](../start.md) <source srcset="../images/x.svg">'
    assert moved(text, "docs/zh", "R") == (
        '[a](../index.md) [b](../start.md) <source srcset="../images/x.svg">'
    )


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = str(yaml.safe_load(text)["nav"])
    pages = (ROOT / "docs").rglob("*.md")
    assert [p.name for p in pages if p.relative_to(ROOT / "docs").as_posix() not in nav] == []
