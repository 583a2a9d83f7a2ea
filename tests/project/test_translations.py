"""The pages in Chinese have the commands, code, figures and links of the English ones."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ROOT / "docs" / "zh"
PAGES = {
    "README.md": ROOT / "README.md",
    **{name: ROOT / "docs" / name for name in ("tutorial.md", "five-tutorials.md")},
}
BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
HAN = re.compile(r"[\u4e00-\u9fff]")


def read(page):
    return page.read_text(encoding="utf-8")


def blocks_of(text):
    """Return the blocks of code; comments of commands are translated, so they are cut off."""
    return [
        "\n".join(line.split(" # ")[0].rstrip() for line in block.splitlines())
        if re.match(r"(?:git|python|torchrun|make|source)\b", block)
        else block
        for block in BLOCK.findall(text)
    ]


def links_of(page):
    """Return the files that a page refers to; a page in Chinese stands for the English one."""
    found = Counter()
    for groups in LINK.findall(read(page)):
        link = "".join(groups)
        if link.startswith("http"):
            found[link] += 1
            continue
        place = (page.parent / link).resolve()
        assert place.exists(), f"{page}: {link}"
        if place.parent == CHINESE:
            place = PAGES[place.name]
        found[place.relative_to(ROOT).as_posix()] += 1
    return found


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_code_are_equal(name):
    english, chinese = read(PAGES[name]), read(CHINESE / name)
    assert blocks_of(chinese) == blocks_of(english)
    rest = [BLOCK.sub("", text) for text in (chinese, english)]
    assert Counter(CODE.findall(rest[0])) == Counter(CODE.findall(rest[1]))


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_equal(name):
    """All numbers in digits, such as versions, seconds and counts."""
    texts = [LINK.sub("](", BLOCK.sub("", read(page))) for page in (CHINESE / name, PAGES[name])]
    chinese, english = (Counter(NUMBER.findall(text)) for text in texts)
    assert chinese == english


@pytest.mark.parametrize("name", PAGES)
def test_links_are_equal(name):
    chinese, english = links_of(CHINESE / name), links_of(PAGES[name])
    assert chinese == english


@pytest.mark.parametrize("name", PAGES)
def test_structure_is_equal(name):
    """As many headings, rows of tables and items of lists, in the same order."""

    def outline(text):
        lines = BLOCK.sub("```", text).splitlines()
        marks = (re.match(r"#+ |\||- |\d\. |```", line) for line in lines)
        return [mark[0] for mark in marks if mark]

    assert outline(read(CHINESE / name)) == outline(read(PAGES[name]))


@pytest.mark.parametrize("name", PAGES)
def test_every_paragraph_is_translated(name):
    text = BLOCK.sub("", read(CHINESE / name))
    for paragraph in re.split(r"\n\s*\n", text):
        prose = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|<[^>]*>", "", paragraph).strip("*#|-\n ")
        if len(re.findall(r"[A-Za-z]{3,}", prose)) > 3:
            assert HAN.search(prose), paragraph
