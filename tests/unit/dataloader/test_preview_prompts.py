"""Preview prompts: text, TOML and JSON files as in sd-scripts, with all their errors at once."""

import json
from pathlib import Path

import pytest
from clip_files import write_clip
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from problem_lines import format_lines

from library.config import parse_config
from library.config.schema import ModelConfig
from library.config.schema_output import PreviewConfig
from library.dataloader.images import load_control_clips
from library.dataloader.sample_prompts import Prompt, load_preview_prompts, load_prompts
from library.dataset.clip_windows import FrameRule
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILY_FACTS
from library.models.model_configs import load_bundled_config
from library.models.validate_options import drop_unused_model_options, validate_prompts


def read(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return load_prompts(tmp_path / name)


def problems(tmp_path, name, text):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, name, text)
    return [line.removeprefix(f"{tmp_path / name}") for line in format_lines(caught.value.problems)]


FULL = Prompt(
    "a cat, red", "a dog - or two", 512, 768, seed=7, num_inference_steps=20, cfg_scale=3.5, sampler="euler_a"
)


def test_a_line_is_a_prompt_followed_by_its_options(tmp_path):
    text = "# a comment\n\na cat, red --n a dog - or two --w 512 --h 768 --d 7 --s 20 --l 3.5 --ss euler_a\n  plain \n"
    assert read(tmp_path, "p.txt", text) == [FULL, Prompt("plain")]


def test_options_are_case_insensitive_and_prompts_may_have_dashes_or_be_empty(tmp_path):
    text = "a well-lit cat -- at night --W 64\n--w 64\n"
    assert read(tmp_path, "p.txt", text) == [Prompt("a well-lit cat -- at night", width=64), Prompt("", width=64)]


def test_the_option_may_be_the_prompts_themselves():
    """GUIs of sd-scripts write them so; a name with spaces that ends as a file is one."""
    text = "a cat, red --n a dog - or two --w 512 --h 768 --d 7 --s 20 --l 3.5 --ss euler_a\nplain words"

    assert load_preview_prompts(PreviewConfig(text)) == [FULL, Prompt("plain words")]
    with pytest.raises(ConfigError, match="--sample_prompts: --x: unknown option"):
        load_preview_prompts(PreviewConfig("a cat --x 3"))
    with pytest.raises(ConfigError, match=r"my prompts\.txt: no such file"):
        load_preview_prompts(PreviewConfig("my prompts.txt"))


def test_a_toml_file_has_common_settings_and_a_table_for_each_prompt(tmp_path):
    text = """
        [prompt]
        width = 512
        height = 768
        sample_steps = 20
        scale = 7
        [[prompt.subset]]
        prompt = "a cat, red"
        negative_prompt = "a dog - or two"
        seed = 7
        scale = 3.5
        sample_sampler = "euler_a"
        [[prompt.subset]]
        prompt = "plain"
    """
    plain = Prompt("plain", width=512, height=768, num_inference_steps=20, cfg_scale=7.0)
    assert read(tmp_path, "p.toml", text) == [FULL, plain]


def test_a_json_file_is_a_list_of_objects_or_lines(tmp_path):
    item = {
        "prompt": "a cat, red",
        "negative_prompt": "a dog - or two",
        "width": 512,
        "height": 768,
        "seed": 7,
        "sample_steps": 20,
        "scale": 3.5,
        "sample_sampler": "euler_a",
    }
    assert read(tmp_path, "p.json", json.dumps([item, "plain --w 64"])) == [FULL, Prompt("plain", width=64)]


def test_all_errors_of_a_text_file_are_reported_at_once_with_line_numbers(tmp_path):
    text = "\n".join(
        [
            "fine --w 64",
            "one --w 100 --d -1",
            "two --widht 64",
            "three --s many --l inf",
            "four --fs 0 --g -3.5",
            "five --ss eular",
            "six --w 64 --w 128 --h",
            "seven --rcg 1",
        ]
    )
    assert problems(tmp_path, "p.txt", text) == [
        ":2: --w: 100 is not a multiple of 8; use 96 or 104",
        ":2: --d: expected at least 0, got -1",
        ":3: --widht: unknown option; use --n negative_prompt, --w width, --h height, --d seed, "
        "--s sample_steps, --l scale, --ss sample_sampler, --g guidance_scale, --cn control_video_path, --fs flow_shift,"
        " --ci control_image_path,"
        " --cf control_from_image, --f frame_count, --fps fps, --i image_path, --ei end_image_path, --of one_frame,"
        " --am network_multiplier",
        ":4: --s: expected an integer, got 'many'",
        ":4: --l: expected a number of at least 0, got inf",
        ":5: --fs: expected a number above 0, got 0",
        ":5: --g: expected a number of at least 0, got -3.5",
        ":6: --ss: no sampler 'eular'; did you mean euler?",
        ":7: --w: duplicate option; remove one of the two",
        ":7: --h: value missing",
        ":8: --rcg: unknown option; did you mean --rcfg?",
    ]


def test_the_keys_of_musubi_tuner_for_clips_are_taken(tmp_path):
    line = "a cat walks --w 640 --h 480 --f 25 --d 1 --s 20 --fs 5 --l 6.0 --n blurry\n"
    expected = Prompt(
        "a cat walks", "blurry", 640, 480, seed=1, num_inference_steps=20, cfg_scale=6.0, flow_shift=5.0, num_frames=25
    )
    assert read(tmp_path, "p.txt", line) == [expected]
    names = {"prompt": "a cat walks", "negative_prompt": "blurry", "width": 640, "height": 480, "seed": 1}
    names |= {"sample_steps": 20, "cfg_scale": 6.0, "discrete_flow_shift": 5, "frame_count": 25}
    assert read(tmp_path, "p.json", json.dumps([names])) == [expected]
    assert problems(tmp_path, "p.json", json.dumps([{"prompt": "a", "scale": 3, "cfg_scale": 4}])) == [
        ": prompt 1: cfg_scale: is set twice, by two names"
    ]
    one_frame = "b --i no.png --ei none.png --of target_index=1,control_index=0;2 --f 0\n"
    assert problems(tmp_path, "p.txt", one_frame) == [
        ":1: --f: expected at least 1, got 0",
    ]
    assert problems(tmp_path, "p.txt", "b --i no.png --ei none.png\n") == [
        ":1: --i: no.png: no such file",
        ":1: --ei: none.png: no such file",
    ]


CLIP_PROBLEMS = {
    ("random:wan:tiny", "--f 24"): "--f: Wan 2.1 makes 4 x N + 1 frames, not 24; use 21 or 25",
    ("random:wan:tiny", "--f 25 --fps 8 --fs 3"): "",
    ("random:wan:tiny", "--i a.png"): "--i: what Wan 2.1 makes cannot begin with an image; leave it out",
    ("random:wan:tiny", "--ei a.png"): "--ei: what Wan 2.1 makes cannot end with an image; leave it out",
    ("random:wan:tiny", "--ci a.png"): "--ci: Wan 2.1 takes no control clips",
    ("random:wan:tiny", "--g 6"): "--g: Wan 2.1 has no guidance embedding; use --l",
    ("random:flux:tiny", "--f 25"): "--f: FLUX.1 makes images, not 25 frames; leave it out",
    ("random:flux:tiny", "--f 1"): "",
    ("random:flux:tiny", "--fps 8"): "--fps: FLUX.1 makes images; leave it out",
}


@pytest.mark.parametrize(("model", "options"), CLIP_PROBLEMS)
def test_what_a_model_cannot_do_with_the_frames_of_a_clip_is_refused(model, options, tmp_path):
    Image.new("RGB", (32, 16)).save(tmp_path / "a.png")
    prompts = read(tmp_path, "p.txt", f"a cat {options}\n")
    found = format_lines(list(validate_prompts(prompts, detect_model(ModelConfig(model)))))
    expected = CLIP_PROBLEMS[model, options]
    assert len(found) == bool(expected)
    assert all(line.removeprefix(f"{tmp_path / 'p.txt'}:1: ").startswith(expected) for line in found)


def test_control_images_are_found_next_to_the_file_and_checked(tmp_path):
    Image.new("RGB", (32, 16)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    (tmp_path / "p.txt").write_text("one --ci a.png --ci a.png\n")
    assert load_prompts(tmp_path / "p.txt")[0].control_images == (tmp_path / "a.png",) * 2
    (tmp_path / "p.json").write_text('[{"prompt": "one", "control_image_path": "a.png"}]')
    assert load_prompts(tmp_path / "p.json")[0].control_images == (tmp_path / "a.png",)
    first, second = problems(tmp_path, "p.txt", "one --ci none.png --ci b.png")
    assert first == ":1: --ci: none.png: no such file"
    assert "b.png: is not an image" in second


def test_errors_in_toml_and_json_files_are_reported_with_their_location(tmp_path):
    text = '[prompt]\nwidth = 65\n[[prompt.subset]]\nprompt = "a"\nsample_step = 3\n'
    text += '[[prompt.subset]]\nwidth = "64"\nseed = 1.5\n'
    assert problems(tmp_path, "p.toml", text) == [
        ":2: width: 65 is not a multiple of 8; use 64 or 72",
        ":5: sample_step: unknown key; did you mean sample_steps?",
        ":7: width: expected an integer, got '64'",
        ":8: seed: expected an integer, got 1.5",
        ":6: prompt: missing",
    ]
    items = [{"prompt": "a", "sample_steps": 0}, {"text": "b"}, 3]
    assert problems(tmp_path, "p.json", json.dumps(items)) == [
        ": prompt 1: sample_steps: expected at least 1 and at most 1000, got 0",
        ": prompt 2: text: unknown key",
        ": prompt 2: prompt: missing",
        ": prompt 3: expected an object or a string, got 3",
    ]


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("p.txt", "# nothing\n", ": no prompts"),
        ("p.yaml", "", ": not a .txt, .toml or .json file"),
        ("p.toml", "[prompts]\n", ": expected a [prompt] table with a [[prompt.subset]] for each image"),
        ("p.toml", "prompt = \n", ":1: not valid TOML: Invalid value"),
        ("p.json", "[\n1,,\n]", ":2: not valid JSON: Expecting value"),
        ("p.json", "{}", ": expected a list of prompts"),
    ],
)
def test_an_invalid_file_is_reported_in_one_line(tmp_path, name, text, problem):
    (line,) = problems(tmp_path, name, text)
    assert line == problem


def test_a_missing_file_is_reported_in_one_line():
    with pytest.raises(ConfigError, match=r"absent\.txt: no such file"):
        load_prompts(Path("absent.txt"))


def test_a_seed_above_63_bits_is_rejected(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat --d 99999999999999999999\n")

    with pytest.raises(ConfigError, match="--d: 99999999999999999999 is too large"):
        load_prompts(path)


def test_settings_the_model_does_not_support_are_reported_with_their_location(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("a --w 72 --h 8 --g 3 --fs 2 --ss ddim\nb --w 64 --h 48 --ss euler\n", "utf-8")
    prompts = load_prompts(path)
    assert [*format_lines(validate_prompts(prompts, detect_model("random:flux:tiny")))] == [
        f"{path}:1: --w: 72 is not a multiple of 16 (FLUX.1); use 80 or 64",
        f"{path}:1: --h: 8 is not a multiple of 16 (FLUX.1); use 16",
    ]
    assert [*format_lines(validate_prompts(prompts, detect_model(None)))] == [
        f"{path}:1: --fs: for flow-matching models only, not for Stable Diffusion 1; leave it out",
        f"{path}:1: --g: Stable Diffusion 1 has no guidance embedding; use --l",
    ]
    assert [
        line.split(": ")[1]
        for line in format_lines(validate_prompts(prompts[:1], detect_model("random:flux:schnell:tiny")))
    ] == [
        "--w",
        "--h",
        "--g",
    ]


def test_images_with_which_a_clip_begins_and_ends_are_arguments_of_the_pipelines_that_take_them(tmp_path):
    import inspect

    from diffusers import WanImageToVideoPipeline

    from library.dataloader.images import load_frame_images
    from library.models.families import FAMILIES

    for name, color in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (32, 16), color).save(tmp_path / name)
    both, first = read(tmp_path, "p.txt", "a --i a.png --ei b.png\nb --i a.png\n")
    family = FAMILIES.get("wan")()
    found = [family.build_frame_image_kwargs(None, *load_frame_images(prompt)) for prompt in (both, first)]
    assert {name: image.getpixel((0, 0)) for name, image in found[0].items()} == {
        "image": (255, 0, 0),
        "last_image": (0, 0, 255),
    }
    assert found[1].keys() == {"image"} and family.build_frame_image_kwargs(None, None, None) == {}
    assert found[0].keys() <= inspect.signature(WanImageToVideoPipeline.__call__).parameters.keys()


@pytest.mark.parametrize("fps", ["0", "0.0001", "0.99", "241", "2000", "nan", "fast"])
def test_rates_at_which_a_clip_cannot_be_written_are_refused(fps, tmp_path):
    (line,) = problems(tmp_path, "p.txt", f"plain\nwalks --f 5 --fps {fps}\n")
    assert line.startswith(":2: --fps: expected 1 to 240 frames per second, got ")
    assert line.endswith("; leave it out for the rate of the model")


def test_the_limits_of_the_rate_are_taken(tmp_path):
    assert [prompt.fps for prompt in read(tmp_path, "p.txt", "a --fps 1\na --fps 23.976\na --fps 240\n")] == [
        1.0,
        23.976,
        240.0,
    ]


def list_notices(prompts: Path | str, model: str) -> list[str]:
    flags = {"pretrained_model_name_or_path": model, "sample_prompts": str(prompts), "sample_every_n_steps": "1"}
    parsed = parse_config([word for name, value in flags.items() for word in (f"--{name}", value)])
    return [line for line in drop_unused_model_options(parsed).list_notices() if "no effect" in line]


def test_the_rate_of_a_prompt_that_makes_an_image_is_named_in_one_line(tmp_path):
    reason = "(an image has no rate; a prompt of more than 1 frame, set with --f or frame_count, has)"
    lines = tmp_path / "p.txt"
    lines.write_text("a --fps 8\nb --f 5 --fps 8\nc --f 1 --fps 24\nd\n")
    assert list_notices(lines, "random:wan:tiny") == [
        f"no effect on this run: {lines}:1: --fps {reason}, {lines}:3: --fps {reason}"
    ]
    lines.write_text("b --f 5 --fps 8\n")
    assert list_notices(lines, "random:wan:tiny") == []
    assert list_notices("a --f 5 --fps 8\nb --fps 8", "random:wan:tiny") == [
        f"no effect on this run: --sample_prompts: --fps {reason}"
    ]
    shared = tmp_path / "p.toml"
    for frames, notices in ((5, []), (1, [f"no effect on this run: {shared}:2: fps {reason}"])):
        subsets = f'[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nprompt = "b"\nframe_count = {frames}\n'
        shared.write_text(f"[prompt]\nfps = 8\n{subsets}")
        assert list_notices(shared, "random:wan:tiny") == notices, "prompts that share the key name it once"


@pytest.mark.parametrize(("name", "flags"), [("wan_i2v", ["--i"]), ("wan_flf2v", ["--i", "--ei"])])
def test_a_clip_from_images_needs_them(name, flags):
    model = detect_model(f"random:{name}:tiny")
    problems = list(map(str, validate_prompts([Prompt("a")], model)))
    assert [text.rsplit(" ", 1)[1] for text in problems] == flags
    given = Prompt("a", first_image=Path("a.png"), last_image=Path("b.png"))
    (problem,) = [*validate_prompts([given], model)] or [None]
    assert (problem is None) == (len(flags) == 2), "a last frame is not used by I2V"


def test_the_strength_of_the_lora_is_a_number_of_either_sign(tmp_path):
    (line,) = problems(tmp_path, "p.txt", "a cat --am -1.5\na cat --am strong\n")
    assert line == ":2: --am: expected a number, got 'strong'"
    prompts = read(tmp_path, "p.txt", "a cat --am -1.5\na cat\n")
    assert [prompt.network_multiplier for prompt in prompts] == [-1.5, 1.0]


@pytest.mark.parametrize("model", ["flux_control", "flux_fill", "flux2_dev"])
def test_negative_prompts_of_a_model_whose_guidance_is_an_input_are_named_in_one_line(model, tmp_path):
    lines = tmp_path / "p.txt"
    lines.write_text("a --n blurry\nb\n")
    (notice,) = list_notices(lines, f"random:{model}:tiny")
    title = FAMILY_FACTS[model].title
    assert notice == (
        f"no effect on this run: {lines}:1: --n (guidance is an input of {title}, without negative prompts)"
    )
    assert list_notices(lines, "random:flux:tiny") == list_notices(lines, "random:flux2_klein:tiny") == []


def test_two_guidances_of_a_model_that_has_one_are_refused_where_they_differ(tmp_path):
    model = detect_model(ModelConfig("random:flux2_dev:tiny"))
    prompts = read(tmp_path, "p.txt", "a --g 10 --l 30\nb --g 10 --l 10\nc --g 10\nd --l 10\n")
    text = "--g: guidance is one input of FLUX.2 dev, which --g (10) and --l (30) both set"
    assert format_lines(validate_prompts(prompts, model)) == [f"{tmp_path / 'p.txt'}:1: {text}; give one of them"]
    assert not [*validate_prompts(prompts, detect_model(ModelConfig("random:flux:tiny")))]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_one_step_is_refused_where_it_would_divide_zero_by_zero(tmp_path):
    prompts = read(tmp_path, "p.txt", "a --s 1\nb --s 2\n")
    assert not [*validate_prompts(prompts, detect_model("random:flux:tiny"))]
    (line,) = format_lines(validate_prompts(prompts, detect_model("random:qwen_image:tiny")))
    assert line.startswith(f"{tmp_path / 'p.txt'}:1: --s: the noise levels of Qwen-Image end above 0")
    config = load_bundled_config("qwen_image_tiny")["scheduler/scheduler_config.json"]
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    for steps, is_finite in ((1, False), (2, True)):
        scheduler.set_timesteps(sigmas=[1.0, 0.5][:steps], mu=1.0)
        assert bool(scheduler.sigmas.isfinite().all()) == is_finite


def test_a_control_clip_of_a_preview_is_found_checked_and_only_for_models_that_take_one(tmp_path):
    write_clip(tmp_path / "pose.mp4", 12, 24, (32, 32))
    assert problems(tmp_path, "p.txt", "a --cn none.mp4\n") == [":1: --cn: none.mp4: no such file or folder"]
    (prompt,) = read(tmp_path, "p.txt", "a --cn pose.mp4\n")
    assert prompt.control_clips == (tmp_path / "pose.mp4",)
    reasons = {
        name: [str(problem) for problem in validate_prompts([prompt, Prompt("b")], detect_model(f"random:{name}:tiny"))]
        for name in ("wan_vace", "wan", "flux")
    }
    assert [len(each) for each in reasons.values()] == [1, 1, 1]
    assert "Wan 2.1 VACE needs 1 control clip for each clip, not 0" in reasons["wan_vace"][0]
    Image.new("RGB", (32, 32)).save(tmp_path / "mask.png")
    (both,) = read(tmp_path, "p.txt", "a --cn pose.mp4 --ci mask.png\n")
    (problem,) = validate_prompts([both], detect_model("random:wan_fun_control:tiny"))
    assert "so that their order is unknown" in str(problem)
    assert "Wan 2.1 takes no control clips; Wan 2.1 VACE" in reasons["wan"][0]
    assert "FLUX.1 takes no control clips; control images of editing models are set with --ci" in reasons["flux"][0]


def test_a_control_clip_of_a_preview_has_its_rate_size_and_number_of_frames(tmp_path):
    write_clip(tmp_path / "pose.mp4", 12, 24, (64, 32))
    (prompt,) = read(tmp_path, "p.txt", "a --cn pose.mp4 --f 13\n")
    (frames,) = load_control_clips(prompt, FrameRule(fps=16.0), lambda number: (32, 32))
    assert {frame.size for frame in frames} == {(32, 32)} and len(frames) == 13
    shown = [frame.tobytes() for frame in frames]
    assert len(set(shown[:8])) == 8, "half a second has eight frames at 16 per second"
    assert set(shown[8:]) == {shown[7]}, "the last one is repeated"


def test_control_clips_of_a_preview_have_each_its_own_size(tmp_path):
    write_clip(tmp_path / "pose.mp4", 6, 16, (64, 32))
    (prompt,) = read(tmp_path, "p.txt", "a --cn pose.mp4 --cn pose.mp4 --f 5\n")
    clips = load_control_clips(prompt, FrameRule(fps=16.0), {0: (64, 32), 1: (16, 16)}.__getitem__)
    assert [{frame.size for frame in clip} for clip in clips] == [{(64, 32)}, {(16, 16)}]


def test_a_model_that_takes_control_clips_in_pairs_takes_no_other_number(tmp_path):
    write_clip(tmp_path / "pose.mp4", 6, 16, (64, 32))
    Image.new("RGB", (64, 32)).save(tmp_path / "still.png")
    model = detect_model("random:wan_animate:tiny")
    for count, reason in {1: "needs 2 control clips for each clip, not 1", 3: "takes 2 or 4 control clips"}.items():
        (prompt,) = read(tmp_path, "p.txt", f"a --i still.png --f 5 {'--cn pose.mp4 ' * count}\n")
        (line,) = format_lines(validate_prompts([prompt], model))
        assert reason in line and "p.txt:1" in line
    for count in (2, 4):
        (prompt,) = read(tmp_path, "p.txt", f"a --i still.png --f 5 {'--cn pose.mp4 ' * count}\n")
        assert list(validate_prompts([prompt], model)) == []
