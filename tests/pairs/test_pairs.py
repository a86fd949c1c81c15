"""Every pair of settings is in some run, each compared with one plain process; rows of a covering array.

``make test-pairs`` runs today's slice of the rows, ``python -m pytest tests/pairs -m pairs --slice 3/8`` another one, and
``--slice all`` all of them.
"""

import itertools
from datetime import date

import pytest
from pair_factors import list_factors
from pair_runs import Case, Workspace, build_array, find_problem, load_array, run_case, select_slice, start_warm_server

from library.parallel.strategy_registry import STRATEGIES

DAILY_SLICES = 48
"""Slices of the rows, of which ``today`` is one after the other."""
FACTORS = tuple(list_factors())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("pairs"))


def pytest_generate_tests(metafunc):
    if "row" not in metafunc.fixturenames:
        return
    rows = []
    if metafunc.config.option.markexpr == "pairs":  # the rows take a minute to generate
        start_warm_server()
        rows = list(enumerate(load_array().rows))
        name = metafunc.config.option.slice
        number = date.today().toordinal() % DAILY_SLICES + 1
        rows = select_slice(rows, f"{number}/{DAILY_SLICES}" if name == "today" else name)
    metafunc.parametrize("row", [row for _, row in rows], ids=[str(number) for number, _ in rows])


@pytest.mark.slow
@pytest.mark.pairs
def test_a_row_trains_the_adapter_of_one_plain_process(row, workspace):
    case = Case(FACTORS, row)
    outcome = run_case(case, workspace)
    assert not outcome.failures, f"{case.name}: {outcome.failures}"


def build_case(**settings):
    """Build a case from the names of values; other factors have their defaults."""
    names = [factor.name.replace(" ", "_") for factor in FACTORS]
    assert settings.keys() <= set(names)
    values = ([value.name for value in factor.values] for factor in FACTORS)
    return Case(
        FACTORS, tuple(each.index(settings.get(name, each[0])) for name, each in zip(names, values, strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(family="qwen_image21", dropout="network", model_parallel="pp, 1f1b", accumulation="two"),
        dict(family="ernie_image", dropout="network", data_parallel="DDP", latents="cached"),
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_a_sample_trains_the_adapter_of_one_plain_process(settings, workspace):
    case = build_case(**settings)
    assert find_problem(case, workspace) == ""
    assert run_case(case, workspace).failures == []


def test_a_refused_combination_is_told_from_an_allowed_one(workspace):
    assert find_problem(build_case(), workspace) == ""
    refused = build_case(data_parallel="ZeRO 3", quantized_base="nf4")
    assert "not available with ZeRO 3" in find_problem(refused, workspace)
    refused = build_case(family="wan22_t2v", data_parallel="ZeRO 2")
    assert "DeepSpeed: a step trains one of the two experts" in find_problem(refused, workspace)
    idle = build_case(family="krea2", layers="convolutions")
    assert "no effect" in find_problem(idle, workspace)


def test_every_strategy_that_runs_on_a_cpu_is_in_some_row():
    flags = {word for factor in FACTORS for value in factor.values for word in value.flags}
    known = {"fsdp": "--fsdp", "deepspeed": "--deepspeed", "pipeline": "--pp_size", "device_mesh": "--tp_size"}
    known |= {"ddp": "--pretrained_model_name_or_path"}  # several processes without an option
    assert {*STRATEGIES.list_names()} - {"device_map"} == known.keys(), "add the strategy to pair_factors.py"
    assert {*known.values()} <= flags


@pytest.mark.slow
@pytest.mark.pairs
def test_every_pair_that_is_not_refused_is_in_some_row(workspace):
    array, _ = build_array(workspace)
    stored = load_array()
    covered = {frozenset(pair) for row in stored.rows for pair in itertools.combinations(enumerate(row), 2)}
    assert array.pairs - covered == stored.refused_pairs | stored.unreached
    assert not covered & stored.refused_pairs
    settings = {(factor, value) for factor, size in enumerate(array.sizes) for value in range(size)}
    assert settings == {setting for row in stored.rows for setting in enumerate(row)}, "a value is never allowed"
