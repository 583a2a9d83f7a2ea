"""docs/settings.md is the output of make_settings.py and explains every setting."""

import re

import make_settings

from trainer import load_config


def test_page_is_current():
    page = make_settings.PAGE.read_text(encoding="utf-8")
    assert page == make_settings.make_page(), "run python scripts/generate/make_settings.py"


def test_every_setting_of_the_schema_is_explained():
    rows = re.findall(
        r"^\|`([\w.]+)`\|(.+)\|(.+)\|(run|layout)\|(.*)\|$",
        make_settings.make_page(),
        re.MULTILINE,
    )
    explained = {name for name, *_, meaning in rows if meaning}
    known = set(load_config(["task=text"]).flat())
    free = ("optim.", "schedule.", "task.options.")
    assert {name for name in known if not name.startswith(free)} == explained - {"task.options"}
    assert {owner for _, _, _, owner, _ in rows} == {"run", "layout"}
