"""Registries, and randomness as a function of seed, purpose and indices."""

import pickle

import pytest
from problem_lines import format_lines

from library.errors import ConfigError
from library.name_suggestions import suggest_name
from library.problems import Problem
from library.randomness import derive_rng, derive_seed
from library.registry import Registry

TABLE = Registry("thing", "library", {"size": ".config.types:Resolution", "gone": ".config.types:Gone"})


def test_a_name_is_imported_on_first_use():
    assert TABLE.get("size").__name__ == "Resolution"
    assert TABLE.list_names() == ["gone", "size"]


def test_users_can_give_a_module_of_their_own():
    assert TABLE.get("json:loads")("[1]") == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sise", "unknown thing 'sise'; did you mean size?"),
        ("other", "unknown thing 'other'; available: gone, size"),
        ("gone", "module .config.types has no 'Gone'"),
        ("nowhere:x", "No module named 'nowhere'"),
    ],
)
def test_an_unknown_name_is_a_config_error(name, message):
    with pytest.raises(ConfigError, match="thing") as caught:
        TABLE.get(name)

    assert message in str(caught.value)


def test_there_is_no_suggestion_without_a_close_name():
    assert suggest_name("zzz", ["network_dim"]) == ""
    assert suggest_name("adamw8bitt", ["Adam8bit", "AdamW8bit", "Adam"]) == "; did you mean AdamW8bit?"
    assert suggest_name("LEARNING_RATES", ["learning_rate"], "--") == "; did you mean --learning_rate?"


def test_derived_seeds_never_change():
    """Other values would change every run that is repeated or resumed."""
    assert derive_seed(42, "noise", 0, 0) == 9021838629864829297
    assert derive_seed(0, "lora/conv", 7) == 7839284545616139800


def test_every_argument_of_a_seed_matters():
    seeds = {
        derive_seed(*arguments)
        for arguments in [
            (1, "noise", 2, 3),
            (2, "noise", 2, 3),
            (1, "vae", 2, 3),
            (1, "noise", 3, 2),
            (1, "noise", 23),
            (1, "noise"),
        ]
    }

    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_of_different_indices_are_independent():
    first = [derive_rng(1, "caption", 2).random() for _ in range(2)]

    assert first[0] == first[1] != derive_rng(1, "caption", 3).random()


def test_config_errors_can_be_pickled():
    assert format_lines(pickle.loads(pickle.dumps(ConfigError([Problem("", "one"), Problem("", "two")]))).problems) == [
        "one",
        "two",
    ]
