"""`python -m library models` lists every family, and the page with the table is up to date."""

import json

import pytest

from library.errors import UserError
from library.models.families import FAMILIES
from library.tools.models import run_models
from scripts.model_table import PAGE, insert_table


def test_every_family_is_listed_with_its_size_sources_and_strategies():
    models = json.loads(run_models(["--json"])[0])
    assert [model["name"] for model in models] == list(FAMILIES.entries)
    for model in models:
        assert model["kind"] in ("image", "edit", "video") and model["parameters"] > 5e8
        assert {"folder", "hub", "random"} <= {*model["sources"]} and {"ddp", "fsdp"} <= {*model["strategies"]}
        assert model["title"] in run_models([])[0]


def test_the_table_in_the_docs_is_the_present_one():
    """If not: python -m scripts.model_table"""
    page = PAGE.read_text(encoding="utf-8")
    assert insert_table(page) == page


def test_an_unknown_option_is_refused():
    with pytest.raises(UserError, match="--jsn: unknown option; did you mean --json"):
        run_models(["--jsn"])
