"""The links of docs/tour.md lead to the lines that define what they name."""

import make_tour
import pytest


def test_each_link_leads_to_the_definition_of_its_name():
    page = make_tour.PAGE.read_text(encoding="utf-8")
    assert page == make_tour.make_page(), "run python scripts/generate/make_tour.py"


def test_a_name_that_is_gone_is_an_error(monkeypatch, tmp_path):
    gone = tmp_path / "tour.md"
    gone.write_text("[train_for_ever](../trainer/train.py#L1)")
    monkeypatch.setattr(make_tour, "PAGE", gone)
    with pytest.raises(KeyError, match="train_for_ever"):
        make_tour.make_page()
