"""The layers that get an adapter by default, here and in other trainers, and the tables of them."""

import pytest

from library.models.families import FAMILY_FACTS
from scripts.adapter_target_rules import PROGRAMS, REASONS, RULES, list_rules
from scripts.adapter_target_table import PAGE, find_targets, insert_tables

COMPARED = [name for name in FAMILY_FACTS if list_rules(name)]


def test_every_family_that_another_trainer_has_is_compared_with_it():
    named = {
        "ai-toolkit": {name for name, facts in FAMILY_FACTS.items() if facts.detection.trainer_names.ai_toolkit},
        "SimpleTuner": {name for name, facts in FAMILY_FACTS.items() if facts.detection.trainer_names.simpletuner},
    }
    assert {program: {*RULES[program]} for program in named} == named
    assert {*REASONS} <= {*COMPARED} and {*RULES} == {*PROGRAMS}
    # What follows a trainer is compared with it, but for variants that the trainer itself does not have.
    for name, facts in FAMILY_FACTS.items():
        if (program := facts.lora.targets_of) in PROGRAMS and name not in RULES[program]:
            assert any(FAMILY_FACTS[other].lora.targets == facts.lora.targets for other in RULES[program]), name


def test_the_layers_of_flux_are_counted_by_each_rule():
    """19 double blocks of 8 layers of attention, 4 of MLPs and 2 of modulation; 38 single ones of 3, 2 and 1."""
    targets = find_targets("flux")
    counts = {program: len(layers) for program, layers in targets.trained.items()}
    every = 19 * (8 + 4 + 2) + 38 * (3 + 2 + 1)
    assert counts == {"": every, "sd-scripts": every, "ai-toolkit": every, "SimpleTuner": 19 * 8 + 38 * 3}
    assert targets.list_equal_programs() == ["sd-scripts", "ai-toolkit"]
    assert targets.format_cell("SimpleTuner") == f"{19 * 8 + 38 * 3}: attention"


@pytest.mark.slow
def test_the_tables_in_the_documents_are_current():
    page = PAGE.read_text(encoding="utf-8")
    assert insert_tables(page) == page, "run: python -m scripts.adapter_target_table"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_choice_that_no_other_trainer_makes_has_a_reason(name):
    targets, followed = find_targets(name), FAMILY_FACTS[name].lora.targets_of
    equal = targets.list_equal_programs()
    assert all(targets.trained.values())
    if not equal or (followed in RULES and followed in targets.trained and followed not in equal):
        assert name in REASONS
