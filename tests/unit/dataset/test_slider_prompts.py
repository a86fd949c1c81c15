"""The prompts file of ``--slider_prompts``: formats of sd-scripts, expansion of sliders, and wrong entries."""

from dataclasses import replace

import pytest
from problem_lines import format_lines

from library.config.schema_data import DataConfig
from library.config.types import Resolution
from library.dataset.dataset_config import load_dataset_config
from library.dataset.slider_prompts import ParsedSliderPrompts, SliderPrompt, parse_slider_prompts

VAN_GOGH = SliderPrompt("van gogh", "van gogh", "", "", "erase", 1.5, Resolution(768, 512), batch_size=2)
FOX = SliderPrompt("a fox", "an old fox", "a young fox", "a fox", "enhance", 2.0, weight=0.5)


def parse(folder, text: str, name: str = "prompts.toml") -> ParsedSliderPrompts:
    (folder / name).write_text(text, encoding="utf-8")
    return parse_slider_prompts(folder / name)


def test_toml_and_yaml_of_leco_are_the_same_prompts_with_the_defaults_of_sd_scripts(tmp_path):
    toml = parse(
        tmp_path, "batch_size = 2\n[[prompts]]\ntarget = 'van gogh'\nguidance_scale = 1.5\nresolution = [512, 768]"
    )
    text = "- target: van gogh\n  guidance_scale: 1.5\n  resolution: [512, 768]  # height, width\n  batch_size: 2\n"
    yaml = parse(tmp_path, text, "prompts.yaml")
    assert toml.prompts == yaml.prompts == (VAN_GOGH,)
    assert not toml.problems and not yaml.problems
    assert VAN_GOGH.direction == -1.5 and VAN_GOGH.texts == ("van gogh", "")


def test_positive_is_the_target_and_neutral_is_unconditional_unless_they_are_set(tmp_path):
    (first, second) = parse(
        tmp_path,
        """
        [[prompts]]
        target = "a fox"
        unconditional = "a dog"
        [[prompts]]
        target = "a fox"
        positive = "an old fox"
        unconditional = "a young fox"
        neutral = "a fox"
        action = "enhance"
        guidance_scale = 2
        weight = 0.5
        """,
    ).prompts
    assert (first.positive, first.neutral) == ("a fox", "a dog")
    assert second == FOX and second.direction == 2


SLIDER = """
guidance_scale = 2.0
resolutions = [[512, 512], [768, 640]]
neutrals = ["a person", "a photo of a person"]
[[targets]]
target_class = "a person"
positive = "an old person"
negative = "a young person"
multiplier = 1.5
"""


def test_a_slider_becomes_both_directions_of_each_size_and_neutral_text(tmp_path):
    prompts = parse(tmp_path, SLIDER).prompts
    assert len(prompts) == 2 * 2 * 4
    first = prompts[:4]
    old, young = "an old person", "a young person"
    assert [(each.positive, each.unconditional, each.action, each.multiplier) for each in first] == [
        (young, old, "erase", 1.5),
        (old, young, "enhance", 1.5),
        (old, young, "erase", -1.5),
        (young, old, "enhance", -1.5),
    ]
    # What is learned: towards the positive text at +1.5 and towards the negative one at -1.5.
    signs = [each.direction * (1 if each.positive == old else -1) for each in first]
    assert signs == [2, 2, -2, -2]
    assert {each.resolution for each in prompts} == {Resolution(512, 512), Resolution(640, 768)}
    assert {each.neutral for each in prompts} == {"a person", "a photo of a person"}


def test_a_slider_with_one_text_has_one_direction_each_way(tmp_path):
    one = parse(tmp_path, "[slider]\ntarget_class = ''\npositive = 'detailed'").prompts
    assert [(each.positive, each.action, each.multiplier) for each in one] == [
        ("detailed", "enhance", 1),
        ("detailed", "erase", -1),
    ]
    other = parse(tmp_path, "targets:\n  - target_class: ''\n    negative: blurry\n", "prompts.yml").prompts
    assert [(each.positive, each.action, each.multiplier) for each in other] == [
        ("blurry", "erase", 1),
        ("blurry", "enhance", -1),
    ]


def test_attributes_stand_before_all_texts_and_preserved_texts_are_kept_in_both_directions(tmp_path):
    prompts = parse(
        tmp_path,
        """
        [[targets]]
        target_class = "person"
        positive = "old person"
        neutral = "person"
        attributes = ["male", "female"]
        preserve = ["a dog"]
        """,
    ).prompts
    assert [each.target for each in prompts] == ["male person", "female person"] * 2 + ["a dog"] * 2
    assert {each.neutral for each in prompts[:4]} == {"male person", "female person"}
    assert [(each.neutral, each.direction, each.multiplier) for each in prompts[4:]] == [
        ("a dog", 0, 1),
        ("a dog", 0, -1),
    ]


def test_neutral_texts_can_be_in_a_file_and_those_of_an_entry_replace_them(tmp_path):
    (tmp_path / "texts.txt").write_text("a cat\n\n a dog \n", encoding="utf-8")
    parsed = parse(
        tmp_path,
        """
        neutral_prompt_file = "texts.txt"
        [[targets]]
        target_class = "a cat"
        positive = "a red cat"
        [[targets]]
        target_class = "a cat"
        positive = "a red cat"
        neutral = "a bird"
        """,
    )
    assert [each.neutral for each in parsed.prompts] == ["a cat", "a cat", "a dog", "a dog", "a bird", "a bird"]


def test_a_class_without_neutral_text_is_named_as_sd_scripts_takes_it(tmp_path):
    parsed = parse(tmp_path, "[[targets]]\ntarget_class = 'a cat'\npositive = 'a red cat'")
    assert [each.neutral for each in parsed.prompts] == ["", ""]
    (notice,) = parsed.notices
    assert "prompts.toml:1" in notice and "neutral = 'a cat' keeps the class" in notice


WRONG = """
neutral = 3                             # expected a string, got 3
batch_size = "two"                      # expected an integer
colour = "red"                          # unknown key
[[targets]]                             # a slider needs a positive or a negative text
positve = "a"                           # did you mean positive?
multiplier = 0                          # 0 trains nothing
[[targets]]
target_class = "a"
positive = "b"
resolutions = [512, 768]                # write [[512, 512], [768, 768]]
anchors = [1]                           # ai-toolkit's; list the texts in preserve
neutral_prompt_file = "nowhere.txt"
[[targets]]
target = "d"
action = "remove"                       # 'remove' is not one of erase, enhance
resolution = [512, 512, 512]            # such as 512 or [512, 768] (height, width)
negative = "e"                          # here it is called unconditional
weight = -1                             # must be at least 0
"""


def test_every_wrong_entry_is_named_at_once_with_line_and_key(tmp_path):
    problems = format_lines(parse(tmp_path, WRONG).problems)
    for number, line in enumerate(WRONG.splitlines(), start=1):
        key, _, text = line.partition("#")
        if text:
            name = key.partition("=")[0].strip() if "=" in key else ""
            start = f"{tmp_path / 'prompts.toml'}:{number}: {name}"
            assert any(each.startswith(start) and text.strip() in each for each in problems), (start, text, problems)
    assert any(f"{tmp_path / 'nowhere.txt'}: no such file" in each for each in problems)
    assert len(problems) == WRONG.count("#") + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither prompts nor targets"),
        ("prompts = []", "has no prompts"),
        ("prompts = 3", ":1: prompts: expected a list of tables"),
        ("[[prompts]]\npositive = 'a'", ":1: target is missing"),
        ("[slider]\ntarget = 'a'\n[other]\nb = 1", ":3: other: unknown key beside [slider]"),
        ("target = ", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_prompts_file_is_refused(text, message, tmp_path):
    assert [message in line for line in format_lines(parse(tmp_path, text).problems)] == [True]


def test_wrong_yaml_is_refused_with_its_line(tmp_path):
    (line,) = format_lines(parse(tmp_path, "- target: a\n  positive: [b\n", "prompts.yaml").problems)
    assert "prompts.yaml:3: not valid YAML" in line
    (line,) = format_lines(parse(tmp_path, "- target: a\n  batchsize: 2\n", "prompts.yaml").problems)
    assert line == f"{tmp_path / 'prompts.yaml'}:2: batchsize: unknown key; did you mean batch_size?"


def test_each_prompt_is_a_dataset_with_its_size_and_strength_whatever_the_options_of_images(tmp_path):
    parse(tmp_path, SLIDER)
    config = DataConfig(slider_prompts=str(tmp_path / "prompts.toml"), train_batch_size=7, shuffle_caption=True)
    datasets = load_dataset_config(config).require_valid()
    assert [each.network_multiplier for each in datasets[:4]] == [1.5, 1.5, -1.5, -1.5]
    assert {each.batch_size for each in datasets} == {1}
    assert {each.resolution for each in datasets} == {Resolution(512, 512), Resolution(640, 768)}
    assert not any(each.subsets[0].shuffle_caption for each in datasets)
    assert datasets[0].locate("network_multiplier").line == 9


def test_the_hash_of_a_prompt_changes_with_all_that_it_says_and_not_with_its_place():
    assert FOX.content_hash == replace(FOX, places={"target": VAN_GOGH}).content_hash
    for change in ({"multiplier": -1.0}, {"neutral": "x"}, {"guidance_scale": 1.0}, {"frames": 5}):
        assert replace(FOX, **change).content_hash != FOX.content_hash


def test_defaults_of_the_other_kind_of_entries_are_problems_with_their_lines(tmp_path):
    plain = parse(tmp_path, "neutrals = ['a']\nnegative = 'b'\nweight = 2\n[[prompts]]\ntarget = 'c'\n")
    slider = parse(tmp_path, "action = 'erase'\nunconditional = 'b'\n[[targets]]\ntarget_class = 'c'\npositive = 'd'\n")
    path = tmp_path / "prompts.toml"
    both = "neutral = 'n'\nneutrals = ['a']\n[[prompts]]\ntarget = 'c'\n[[prompts]]\ntarget_class = 'c'\npositive='d'\n"

    assert [str(each) for each in plain.problems] == [
        f"{path}:1: neutrals: has no effect on entries with target; set neutral; an entry has one",
        f"{path}:2: negative: has no effect on entries with target; it is called unconditional there",
    ]
    assert [str(each) for each in slider.problems] == [
        f"{path}:1: action: has no effect on entries with target_class; remove it: a slider is trained in both directions",
        f"{path}:2: unconditional: has no effect on entries with target_class; it is called negative there",
    ]
    assert not parse(tmp_path, both).problems


def test_a_file_has_one_kind_of_entries(tmp_path):
    both = parse(tmp_path, "[[prompts]]\ntarget = 'c'\n[[targets]]\ntarget_class = 'c'\npositive = 'd'\n")
    inner = parse(tmp_path, "[[slider.prompts]]\ntarget = 'c'\n")
    path = tmp_path / "prompts.toml"

    assert [str(each) for each in both.problems] == [
        f"{path}:3: targets: a file has one kind of entries, but this one has prompts and targets; move targets to a file"
        " of its own"
    ]
    assert [str(each) for each in inner.problems] == [
        f"{path}:1: prompts: entries with target are not in [slider]; write [[prompts]]"
    ]
