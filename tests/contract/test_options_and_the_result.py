"""What options say about the result is what resuming, the comparison of ranks and trackers do."""

import json

import pytest
from option_cases import OPTIONS, choose_value

from library.config.options import build_config, flatten_config
from library.config.schema import RunConfig
from library.distributed.config_agreement import collect_agreed_settings
from library.errors import ConfigError
from library.trackers import collect_shareable_settings
from library.training.preflight import check_setting_changes
from library.training.resume import (
    COMPARED_METADATA,
    SettingChange,
    find_changes,
    judge_first_step,
    serialize_settings,
)


def build_metadata(**values) -> dict:
    """What a checkpoint records, as it is read from its file."""
    config = build_config(RunConfig, values)
    facts = dict.fromkeys(COMPARED_METADATA, "equal")
    return json.loads(json.dumps({"settings": serialize_settings(config), **facts}))


def parse_value(name: str):
    value = choose_value(OPTIONS[name])
    return OPTIONS[name].parse_toml_value(value)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_resumes_with_another_value_only_if_the_option_cannot_change_the_result(name):
    saved, current = build_metadata(), build_metadata(**{name: parse_value(name)})

    changes = list(find_changes(saved, current))

    option = OPTIONS[name]
    assert [change.name for change in changes] == ([] if option.group == "state" else [name])
    refused = [change for change in changes if change.changes_result]
    if option.changes_result and not option.is_compared_by_content:
        with pytest.raises(ConfigError, match=f"--resume: {name}: .* add --force_resume"):
            check_setting_changes(refused, force_resume=False)
        check_setting_changes(refused, force_resume=True)
    else:
        check_setting_changes(refused, force_resume=False)


@pytest.mark.parametrize("key", COMPARED_METADATA)
def test_what_is_compared_by_content_is_refused_where_the_content_differs(key):
    changes = [change for change in find_changes(build_metadata(), {**build_metadata(), key: "other"})]
    with pytest.raises(ConfigError, match="add --force_resume"):
        check_setting_changes([change for change in changes if change.changes_result], force_resume=False)


@pytest.mark.parametrize(
    ("old", "new", "first_step", "is_accepted"),
    [(None, 8, 8, True), (None, 9, 9, False), (4, None, 0, True), (4, 8, 8, True), (4, 6, 6, False)],
)
def test_a_run_that_resumes_may_name_the_step_of_its_checkpoint_or_none(old, new, first_step, is_accepted):
    values = (("initial_step", old, new), ("learning_rate", 1e-4, 1e-3))
    changes = [SettingChange(name, before, after, changes_result=True) for name, before, after in values]
    start, rate = judge_first_step(changes, checkpoint_step=8, first_step=first_step)
    assert start.changes_result is not is_accepted and rate.changes_result
    reason = f", which leaves out {first_step} steps; the checkpoint is of step 8"
    assert str(start).endswith(reason) is not is_accepted


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_compare_every_value_but_paths_and_what_is_of_a_machine(name):
    option, ours = OPTIONS[name], collect_agreed_settings(flatten_config(RunConfig()))
    config = build_config(RunConfig, {name: parse_value(name)})
    theirs = collect_agreed_settings(flatten_config(config))

    assert (ours != theirs) == (not option.is_per_machine and (not option.is_path or option.default in (None, ())))
    if option.is_path and option.value_type is str:
        other = ("./elsewhere",) if option.is_list else "./elsewhere"
        assert collect_agreed_settings(flatten_config(build_config(RunConfig, {name: other}))) == theirs


@pytest.mark.parametrize("name", OPTIONS)
def test_trackers_get_no_text_that_may_be_private(name):
    option, config = OPTIONS[name], build_config(RunConfig, {name: parse_value(name)})
    settings = collect_shareable_settings(flatten_config(config))
    assert (name in settings) == (option.value_type is not str or option.is_public)
    assert not (option.is_public and option.is_path)
