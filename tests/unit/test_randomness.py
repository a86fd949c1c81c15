"""Names that are imported on demand, and randomness as a function."""

import pickle

import pytest

from library.errors import ConfigError
from library.randomness import derive_rng, derive_seed
from library.registry import Registry, suggest_name

TABLE = Registry("thing", "library", {"size": ".config.types:Resolution", "gone": ".config.types:Gone"})


def test_a_name_is_imported_when_it_is_asked_for():
    assert TABLE.get("size").__name__ == "Resolution"
    assert TABLE.list_names() == ["gone", "size"]


def test_the_user_may_name_a_module_of_their_own():
    assert TABLE.get("json:loads")("[1]") == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sise", "unknown thing 'sise'; did you mean size?"),
        ("other", "unknown thing 'other'; there are: gone, size"),
        ("gone", "module .config.types has no 'Gone'"),
        ("nowhere:x", "No module named 'nowhere'"),
    ],
)
def test_a_wrong_name_is_a_mistake_of_the_user(name, message):
    with pytest.raises(ConfigError, match="thing") as caught:
        TABLE.get(name)

    assert message in str(caught.value)


def test_what_is_far_from_every_name_gets_no_suggestion():
    assert suggest_name("zzz", ["network_dim"]) == ""


def test_seeds_are_fixed_for_all_time():
    """Other numbers here would change every run that anybody ever repeats."""
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


def test_a_generator_is_its_own():
    first = [derive_rng(1, "caption", 2).random() for _ in range(2)]

    assert first[0] == first[1] != derive_rng(1, "caption", 3).random()


def test_problems_survive_the_way_to_another_process():
    assert pickle.loads(pickle.dumps(ConfigError(["one", "two"]))).problems == ["one", "two"]
