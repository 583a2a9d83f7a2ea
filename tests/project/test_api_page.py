"""docs/api.md is the output of make_api.py, and has every name that a task may import."""

import re

import make_api
from test_architecture import HOOKS, OWN_NAMES

import trainer


def test_page_is_current():
    page = make_api.PAGE.read_text(encoding="utf-8")
    assert page == make_api.make_page(), "run python scripts/generate/make_api.py"


def test_every_public_name_is_explained():
    page = make_api.make_page()
    heads = re.findall(r"^##+ (\w+)", page, re.MULTILINE)
    assert {*trainer.__all__} - {"Split"} <= {*heads}
    attributes = {"config", "options", "Options", "world", "_run"}
    assert (OWN_NAMES | HOOKS) - attributes <= {*heads}
    for name in sorted(attributes - {"_run"}):
        assert f"`self.{name}`" in page or f"`{name}`" in page, name
    for head, *words in re.findall(r"^### (\w+).*\n\n(.*)\n", page, re.MULTILINE):
        assert words and words[0].strip(), f"{head} has no words"
