"""A problem carries its option, its place, the cause and the fix to the command line, the page, JSON and other ranks."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from problem_lines import format_lines
from web_pages import open_page

from library.cli import main
from library.config import parse_config
from library.dataloader.prepare import prepare_data
from library.distributed.config_agreement import RankReport, find_report_problems
from library.errors import ConfigError, FileError, UserError
from library.problems import (
    Place,
    Problem,
    dedupe_problems,
    load_problem,
    locate_problems,
    report_argument,
    report_file,
)
from library.tools.validate_arguments import check_doctor_arguments, check_tags_arguments
from library.training.preflight import find_settings_problems, load_settings

RUN = Place("run.toml", 3, key="network_dim")
KINDS = {
    "an option in a flag": (
        Problem("network_dim", "must be at least 1, got 0", place=Place(flag="--network_dim")),
        "--network_dim: must be at least 1, got 0",
    ),
    "an option in a run file": (
        Problem("network_dim", "must be at least 1, got 0", place=RUN),
        "run.toml:3: network_dim: must be at least 1, got 0",
    ),
    "an option of which only the name is known": (
        Problem("output_name", "a.safetensors exists", "add --overwrite"),
        "--output_name: a.safetensors exists; add --overwrite",
    ),
    "a value": (Problem("tp_size", "not supported", value="2"), "--tp_size 2: not supported"),
    "options that contradict each other": (
        Problem("resume", "cannot be combined with auto_resume", "remove one of them", others=("auto_resume",)),
        "--resume: cannot be combined with auto_resume; remove one of them",
    ),
    "a key of a dataset in JSON": (
        Problem("weight", "missing here", place=Place("set.json", part="datasets[0]", key="weight")),
        "set.json: datasets[0]: weight: missing here",
    ),
    "an image": (report_file("images/a.png", "is truncated"), "images/a.png: is truncated"),
    "an argument of a tool": (
        report_argument("--jsn", "unexpected argument", "usage: ..."),
        "--jsn: unexpected argument; usage: ...",
    ),
    "some ranks": (Problem("fsdp", "needs CUDA", scope="rank 1 (on b)"), "rank 1 (on b): --fsdp: needs CUDA"),
    "a value that was adjusted": (
        Problem("resolution", "32 is too small for a bucket", note="run.toml:5: bucket_reso_steps: 8 is finer"),
        "--resolution: 32 is too small for a bucket (run.toml:5: bucket_reso_steps: 8 is finer)",
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A run file and a dataset file with a mistake of each kind."""
    (tmp_path / "images").mkdir()
    (tmp_path / "set.toml").write_text(
        "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\nnum_repeats = 0\n"
    )
    (tmp_path / "prompts.txt").write_text("a cat\na dog --w 33\n")
    (tmp_path / "run.toml").write_text(
        "[network]\nnetwork_dim = 0\nresume = 'latest'\nauto_resume = true\nsample_prompts = 'prompts.txt'\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


ARGV = ["--config_file", "run.toml", "--dataset_config", "set.toml"]
ARGV += ["--min_timestep", "500", "--max_timestep", "400"]
FOUND = [
    ("network_dim", (), Place("run.toml", 2, key="network_dim")),
    ("min_timestep", ("max_timestep",), Place(flag="--min_timestep")),
    ("resume", ("auto_resume",), Place("run.toml", 3, key="resume")),
    ("num_repeats", (), Place("set.toml", 5, key="num_repeats")),
    ("sample_prompts", (), Place("prompts.txt", 2, key="--w")),
]


@pytest.mark.parametrize("problem, line", KINDS.values(), ids=KINDS)
def test_a_problem_of_every_kind_reads_as_one_line_and_survives_json_and_pickle(problem, line):
    assert str(problem) == line
    assert load_problem(json.loads(json.dumps(problem.export_json()))) == problem
    for error in (ConfigError([problem]), FileError([problem, replace(problem, text="other")]), UserError(problem)):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and copy.problems == error.problems and str(copy) == str(error)
        assert str(error).splitlines()[0] == line


def test_an_error_of_text_has_a_problem_without_option_and_place():
    error = pickle.loads(pickle.dumps(UserError("the disk is full")))

    assert (str(error), error.problems) == ("the disk is full", [Problem("", "the disk is full")])


def test_equal_problems_are_reported_once_and_keep_their_order():
    one, two = Problem("seed", "one"), Problem("seed", "two")

    assert dedupe_problems([two, one, two]) == [two, one] == ConfigError([two, one, two]).problems


def test_options_dataset_keys_and_prompts_are_found_with_their_places(folder):
    problems = find_settings_problems(load_settings(ARGV))

    assert [(each.option, each.others, each.place) for each in problems] == FOUND


def test_the_command_line_shows_each_of_them_in_its_line(folder, capsys):
    assert main(ARGV) == 2

    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"train_lora: stopped. {len(FOUND)} problems:"
    places = [str(place) if place else f"--{option}" for option, _, place in FOUND]
    assert len(lines) == len(FOUND) + 1
    assert all(line.startswith(f"  {place}: ") for line, place in zip(lines[1:], places, strict=True))


def test_the_page_shows_a_problem_at_the_field_of_its_option_and_others_above(folder):
    with (folder / "set.toml").open("a") as file:
        file.write("keep_tokens = -1\n")
    values = {"dataset_config": str(folder / "set.toml"), "network_dim": "0"}
    values |= {"min_timestep": "500", "max_timestep": "400"}
    answer = open_page(folder).post("/api/new/check", json={"values": values}).json()

    shown = {problem["text"].partition(" ")[0]: problem["field"] for problem in answer["problems"]}
    assert shown == {
        "--network_dim:": "network_dim",
        "--min_timestep:": "min_timestep",
        f"{folder}/set.toml:5:": "",  # num_repeats is no option
        f"{folder}/set.toml:6:": "",  # keep_tokens is one, which the form does not set
    }


def test_an_error_of_the_page_has_each_problem_as_data_and_as_a_line(folder):
    answer = open_page(folder).post("/api/new/plan", json={"values": {"network_dim": "0"}})

    assert answer.status_code == 400
    problems = answer.json()["problems"]
    assert [(each["option"], each["place"] and each["place"]["flag"]) for each in problems] == [
        ("network_dim", "--network_dim"),
        ("dataset_config", None),
    ]
    assert answer.json()["error"] == "\n".join(each["line"] for each in problems)


def test_ranks_exchange_problems_with_their_places():
    one, two = Problem("tp_size", "too many", place=RUN), Problem("fsdp", "needs CUDA")
    reports = [RankReport("a", {}, (one,)), RankReport("b", {}, (one, two))]

    assert find_report_problems(reports) == [one, replace(two, scope="rank 1 (on b)")]


def test_a_dataset_key_that_the_run_file_sets_is_located_there(folder):
    (folder / "run.toml").write_text("dataset_repeats = 200_000_000\n")
    (folder / "set.toml").write_text("[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\n")
    (problem,) = find_settings_problems(load_settings(["--config_file", "run.toml", "--dataset_config", "set.toml"]))

    assert (problem.option, problem.place) == ("dataset_repeats", Place("run.toml", 1, key="dataset_repeats"))


def test_a_flag_that_is_wrong_is_named_although_the_file_sets_the_option_as_well(folder):
    (folder / "run.toml").write_text("lr_warmup_steps = 10\n")
    argv = ["--config_file", "run.toml", "--dataset_config", "set.toml", "--lr_warmup_steps", "5", "more"]
    first = find_settings_problems(load_settings(argv))[0]

    assert (first.option, first.place) == ("lr_warmup_steps", Place(flag="--lr_warmup_steps"))


def test_a_value_that_is_not_what_was_set_is_explained_by_its_option(folder):
    parsed = replace(parse_config([]), adjustments={"bucket_reso_steps": "run.toml:1: bucket_reso_steps: 8 is finer"})
    named = Problem("resolution", "too small for a bucket", others=("bucket_reso_steps",))
    other = Problem("resolution", "bucket_reso_steps 64 is mentioned")

    assert [each.note for each in parsed.locate_problems([named, other])] == [
        "run.toml:1: bucket_reso_steps: 8 is finer",
        "",
    ]


def test_a_flag_stands_for_the_line_that_sets_its_option_and_other_places_stay():
    places = {"dataset_repeats": Place("run.toml", 4, key="dataset_repeats")}
    of_flag = Problem("num_repeats", "too large", place=Place(flag="--dataset_repeats"))
    in_file = Problem("num_repeats", "too large", place=Place("set.toml", 5, key="num_repeats"))
    (first, second) = locate_problems([of_flag, in_file], places)

    assert (first.option, first.place) == ("dataset_repeats", places["dataset_repeats"])
    assert second == in_file


def test_unreadable_images_are_problems_with_the_image_as_their_place(folder):
    (folder / "set.toml").write_text("[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\n")
    (folder / "images" / "a.png").write_bytes(b"")
    with pytest.raises(FileError) as caught:
        prepare_data(parse_config(["--dataset_config", "set.toml"]).config.data, 8)

    first, last = caught.value.problems
    assert first.place == Place("images/a.png") and first.text.startswith("is empty")
    assert (last.text, last.place) == ("1 of 1 image cannot be used", None)


def test_arguments_of_tools_are_problems_with_the_argument_as_their_place():
    from library.tools.tags import TagsOptions, _Arguments

    with pytest.raises(ConfigError) as caught:
        check_doctor_arguments(["--jsn"], "usage: ...")
    assert [each.place for each in caught.value.problems] == [Place(flag="--jsn")]
    own = parse_config(["--caption_extension", "txt"], _Arguments)
    with pytest.raises(ConfigError) as caught:
        check_tags_arguments("edt", ["edit"], TagsOptions(caption_extension="txt"), [Path()], own, "usage: ...")
    assert [(each.option, each.place) for each in caught.value.problems] == [
        ("", Place(flag="tags")),
        ("caption_extension", None),
    ]


def test_the_doctor_has_the_fix_of_a_problem_in_a_field_of_its_own():
    from library.tools.doctor import check_command

    command = "python train_lora.py --network_dim 4 --resume latest --auto_resume --dataset_config set.toml"
    findings = [each for each in check_command(command.split()) if getattr(each, "is_error", False)]

    assert ("--resume: cannot be combined with auto_resume", "remove one of them") in [
        (each.value, each.fix) for each in findings
    ]


def test_the_lines_of_all_problems_are_what_an_error_says():
    problems = [problem for problem, _ in KINDS.values()]

    assert str(ConfigError(problems)).splitlines() == format_lines(problems) == [line for _, line in KINDS.values()]
