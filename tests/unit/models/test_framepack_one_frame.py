"""One frame of FramePack: the positions are musubi-tuner's, and the transformer gets the same as in the pipeline."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from problem_lines import format_lines

from library.config.schema import ModelConfig, RunConfig
from library.config.schema_data import DataConfig
from library.dataloader.batch import Batch
from library.dataloader.sample_prompts import Prompt, load_prompts
from library.dataset.dataset_config import load_dataset_config
from library.dataset.one_frame import OneFrame, parse_one_frame
from library.errors import ConfigError, FileError
from library.models.detect import build_control_limits, detect_model
from library.models.families.framepack_one_frame import FACTS, FramePackOneFrame
from library.models.validate_options import validate_model_options, validate_prompts

MODEL = "random:framepack:tiny"
SIZE = 64
ALL = "target_index=5,control_index=0;10"
SETTINGS = (ALL, f"no_post,{ALL}", f"no_2x,no_4x,{ALL}", f"no_4x,{ALL}", f"no_post,no_2x,no_4x,{ALL}")


def build_config(settings: str = ALL, **options) -> ModelConfig:
    return ModelConfig(MODEL, one_frame=True, one_frame_settings=settings, **options)


def load_case(settings: str):
    family = FramePackOneFrame(build_config(settings))
    return family, family.load(MODEL, torch.float32)


def draw_image(number: int, has_alpha: bool = False) -> Image.Image:
    gradient = Image.linear_gradient("L").rotate(40 * number).resize((SIZE, SIZE))
    image = Image.merge("RGB", [gradient, gradient.rotate(90), gradient])
    if has_alpha:
        image.putalpha(Image.radial_gradient("L").resize((SIZE, SIZE)))
    return image


def to_pixels(image: Image.Image) -> torch.Tensor:
    values = torch.frombuffer(bytearray(image.convert("RGBA").tobytes()), dtype=torch.uint8)
    return values.view(1, SIZE, SIZE, 4).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def build_batch(family, pipe, images) -> Batch:
    pixels = [to_pixels(image) for image in images]
    with torch.no_grad():
        controls = family.encode_controls(pipe, pixels, pixels[0][:, :3])
        cond = family.encode_prompts(pipe, ["a cat"])
        frame_cond = family.encode_control_cond(pipe, pixels)
    batch = Batch(torch.zeros_like(controls[0]), cond, torch.zeros(1, 6), torch.ones(1), (0,), ("a",))
    return family.arrange_batch(replace(batch, control_latents=controls, frame_cond=frame_cond))


def record_calls(pipe) -> list[dict]:
    """Record the arguments of all calls, after hooks have changed them."""
    calls, forward = [], pipe.transformer.forward

    def record(**kwargs):
        calls.append(kwargs)
        return forward(**kwargs)

    pipe.transformer.forward = record
    return calls


@pytest.mark.parametrize("text", ["", "default", ALL, "no_post,no_2x,no_4x,target_index=0,control_index=1;2;3"])
def test_settings_are_formatted_as_they_are_read(text):
    assert parse_one_frame(parse_one_frame(text).format()) == parse_one_frame(text)


def test_settings_without_positions_are_those_of_musubi_tuner():
    assert parse_one_frame("default") == OneFrame(None, (0,), has_post=True, has_2x=True, has_4x=True)
    assert parse_one_frame("no_post, no_2x,target_index=9,control_index=0;10") == OneFrame(9, (0, 10), False, False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no_3x", "expected some of default, no_post, no_2x, no_4x, target_index=N, control_index=N;N"),
        ("target_index=1;2", "target_index: expected one integer, got 2"),
        ("target_index=-1", "expected some of"),
        ("no_2x,no_2x", "no_2x is set twice"),
        ("control_index=0,control_index=1", "control_index is set twice"),
        ("control_index=1001", "at most 1000"),
    ],
)
def test_wrong_settings_are_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_one_frame(text)
    with pytest.raises(ConfigError, match=problem):
        detect_model(build_config(text))


@pytest.mark.parametrize("settings", SETTINGS)
def test_positions_and_empty_frames_are_those_of_musubi_tuner(settings):
    """In its terms: the post frame is at 1 + window, those compressed twofold after it, and fourfold after these."""
    family, pipe = load_case(settings)
    calls, batch = record_calls(pipe), build_batch(family, pipe, [draw_image(1), draw_image(2)])
    timesteps = torch.full((1,), 500.0)
    with torch.no_grad():
        family.predict(pipe, pipe.transformer, batch.latents, timesteps, batch)
    (call,) = calls
    post = [] if "no_post" in settings else [10]
    assert call["indices_latents_clean"].tolist() == [0, 10, *post]
    assert call["indices_latents_history_2x"].tolist() == ([] if "no_2x" in settings else [11, 12])
    assert call["indices_latents_history_4x"].tolist() == ([] if "no_4x" in settings else list(range(13, 29)))
    assert call["indices_latents"].tolist() == [5]
    clean = call["latents_clean"]
    assert torch.equal(clean[:, :, :2], torch.cat(batch.control_latents, dim=2)) and not clean[:, :, 2:].any()
    assert clean.shape[2] == 2 + len(post)
    assert not call["latents_history_2x"].any() and not call["latents_history_4x"].any()


def test_the_picture_is_by_default_the_last_frame_of_a_section():
    family = FramePackOneFrame(build_config("default", latent_window_size=4))
    pipe = family.load(MODEL, torch.float32)
    batch = build_batch(family, pipe, [draw_image(1)])
    assert batch.frame_cond["positions"][0].tolist() == [0, 5, 6, 7, *range(8, 24), 4]


def test_without_compressed_frames_the_blocks_have_the_tokens_and_positions_of_the_others_alone():
    family, pipe = load_case(f"no_2x,no_4x,no_post,{ALL}")
    batch, seen = build_batch(family, pipe, [draw_image(1), draw_image(2)]), []
    block = pipe.transformer.transformer_blocks[0]
    block.register_forward_pre_hook(lambda _, args: seen.append((args[0], args[4])))
    with torch.no_grad():
        family.predict(pipe, pipe.transformer, batch.latents, torch.full((1,), 500.0), batch)
        expected = pipe.transformer.rope(
            frame_indices=torch.tensor([0, 10, 5]), height=SIZE // 8, width=SIZE // 8, device=torch.device("cpu")
        )
    ((hidden_states, positions),) = seen
    assert hidden_states.shape[1] == 3 * (SIZE // 16) ** 2
    assert all(map(torch.equal, positions, expected))


def test_alpha_hides_parts_of_a_control_image():
    family, pipe = load_case(ALL)
    opaque, hidden = draw_image(1), draw_image(1)
    alpha = Image.new("L", (SIZE, SIZE), 255)
    alpha.paste(0, (0, 0, SIZE // 2, SIZE))
    hidden.putalpha(alpha)
    with torch.no_grad():
        whole, part = (family.encode_control(pipe, to_pixels(each), to_pixels(each)) for each in (opaque, hidden))
    assert not part[..., 0].any() and bool(whole[..., 0].any()), "musubi-tuner's filter blurs the edge"
    assert torch.equal(part[..., -1], whole[..., -1])


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[:1] + SETTINGS[-1:])
def test_the_transformer_gets_in_a_preview_what_it_gets_in_training(settings, tmp_path):
    family, pipe = load_case("default")
    images, paths = [draw_image(1, has_alpha=True), draw_image(2)], [tmp_path / "a.png", tmp_path / "b.png"]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    calls = record_calls(pipe)
    prompt = Prompt("a cat", "", SIZE, SIZE, num_inference_steps=1, control_images=tuple(paths), one_frame=settings)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in ("a cat", ""))
    generator = torch.Generator().manual_seed(1)
    (picture,) = family.generate_frames(pipe, prompt, cond, negative, generator=generator, sampler=None)
    assert picture.size == (SIZE, SIZE)
    trained = FramePackOneFrame(build_config(settings))
    batch = build_batch(trained, pipe, images)
    latents, timesteps = calls[0]["hidden_states"], calls[0]["timestep"]
    with torch.no_grad():
        trained.predict(pipe, pipe.transformer, latents, timesteps, batch)
    sampled, ours = calls[0], calls[-1]
    assert latents.shape == batch.latents.shape
    for name in ("image_embeds", "latents_clean", "latents_history_2x", "latents_history_4x"):
        torch.testing.assert_close(sampled[name], ours[name], msg=lambda text, name=name: f"{name}: {text}")
    for name in [name for name in ours if name.startswith("indices")]:
        assert torch.equal(sampled[name], ours[name]), name


@pytest.mark.slow
def test_siglip_sees_the_image_with_which_a_preview_begins_if_there_is_one(tmp_path):
    family, pipe = load_case("default")
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for number, path in enumerate(paths):
        draw_image(number).save(path)
    calls, cond = record_calls(pipe), family.encode_prompts(pipe, ["a cat"])
    for first in (None, *paths):
        prompt = Prompt("a", "", SIZE, SIZE, num_inference_steps=1, control_images=paths[:1], first_image=first)
        assert not [*validate_prompts([prompt], detect_model(build_config("default")))]
        generator = torch.Generator().manual_seed(1)
        family.generate_frames(pipe, prompt, cond, cond, generator=generator, sampler=None)
    without, same, other = (call["image_embeds"] for call in calls)
    assert torch.equal(without, same) and not torch.equal(same, other)
    assert all(torch.equal(call["latents_clean"], calls[0]["latents_clean"]) for call in calls)


def test_a_picture_has_as_many_control_images_as_the_settings_have_positions():
    detected = detect_model(build_config("control_index=0;3;5"))
    limits = build_control_limits(detected)
    assert limits.describe_problem(3) is None
    assert "FramePack one frame needs 3 control images for each picture, not 2" in limits.describe_problem(2)
    assert "at most 3 control images" in limits.describe_problem(4)
    assert detected.frame_rule is None and FACTS.pipeline.frames is None


def test_datasets_of_musubi_tuner_have_the_positions_of_the_run(tmp_path):
    (tmp_path / "p").mkdir()
    text = f"[general]\nresolution = 64\n[[datasets]]\nimage_directory = '{tmp_path / 'p'}'\ncontrol_directory = 'c'\n"
    keys = "fp_1f_clean_indices = [0, 10]\nfp_1f_target_index = 5\nfp_1f_no_post = true\n"
    (tmp_path / "set.toml").write_text(text + keys, encoding="utf-8")
    data = DataConfig(dataset_config=str(tmp_path / "set.toml"))
    assert load_dataset_config(data).datasets[0].one_frame == OneFrame(5, (0, 10), has_post=False)
    lines = {}
    for settings in ("no_2x,no_post,target_index=5,control_index=0;10", "target_index=5,control_index=0;10"):
        config = RunConfig(model=build_config(settings), data=data)
        lines[settings] = [each for each in validate_model_options(config, {}) if "fp_1f" in str(each)]
    right, wrong = lines.values()
    assert not right
    (problem,) = map(str, wrong)
    assert "set.toml:6: fp_1f_clean_indices: positions of one-frame training are an option of the run" in problem
    assert "set --one_frame_settings 'no_post,target_index=5,control_index=0;10'" in problem
    (tmp_path / "set.toml").write_text(f"{text}fp_1f_clean_indices = 0\nfp_1f_no_post = 1\n", encoding="utf-8")
    problems = format_lines(load_dataset_config(data).problems)
    assert [line.partition("set.toml:")[2] for line in problems] == [
        "6: fp_1f_clean_indices: expected a list of integers from 0 to 1000, got 0",
        "7: fp_1f_no_post: expected true or false, got 1",
    ]


def find_problems(folder: Path, keys: str, **options) -> list[str]:
    (folder / "p").mkdir(exist_ok=True)
    source = f"image_directory = '{folder / 'p'}'\ncontrol_directory = 'c'\nresolution = 64\n"
    (folder / "set.toml").write_text(f"[[datasets]]\n{source}{keys}\n", encoding="utf-8")
    data = DataConfig(dataset_config=str(folder / "set.toml"))
    problems = load_dataset_config(data).problems
    config = RunConfig(model=ModelConfig(MODEL, **{"one_frame": True, **options}), data=data)
    lines = format_lines([*problems, *validate_model_options(config, {})])
    return [line.partition("set.toml:")[2] for line in lines if "set.toml" in line]


def test_the_example_of_musubi_tuner_is_what_is_trained_without_settings(tmp_path):
    keys = "fp_1f_clean_indices = [0]\nfp_1f_target_index = 9\nfp_1f_no_post = false\nfp_latent_window_size = 9"
    assert not find_problems(tmp_path, keys)
    (other,) = find_problems(tmp_path, "fp_1f_target_index = 9", latent_window_size=4)
    assert other.endswith("set --one_frame_settings 'target_index=9,control_index=0'")
    assert not find_problems(tmp_path, "fp_1f_clean_indices = [0]", one_frame_settings="target_index=9")


def test_sections_of_another_size_are_not_ignored_in_pictures(tmp_path):
    text = "5: fp_latent_window_size: sections of 4 latent frames are an option of the run, for all datasets"
    fix = "remove it, and set --latent_window_size 4"
    assert find_problems(tmp_path, "fp_latent_window_size = 4") == [f"{text}; {fix}"]
    assert not find_problems(tmp_path, "fp_latent_window_size = 4", latent_window_size=4)
    for wrong in ("'x'", "0", "4.0", "true"):
        (problem,) = find_problems(tmp_path, f"fp_latent_window_size = {wrong}")
        assert problem.startswith("5: fp_latent_window_size: expected an integer, 1 or more, got ")


def test_pictures_with_control_images_name_the_option_that_trains_them(tmp_path):
    (problem,) = find_problems(tmp_path, "", one_frame=False)
    assert problem.endswith("to train pictures from control images, add --one_frame")


def test_previews_are_checked_by_their_own_positions(tmp_path: Path):
    draw_image(1).save(tmp_path / "a.png")
    lines = [
        "a --ci a.png --of target_index=1",
        "b --ci a.png --of control_index=0;1",
        "c",
        "d --ci a.png --ci a.png --of control_index=0;1",
    ]
    (tmp_path / "p.txt").write_text("\n".join(lines), encoding="utf-8")
    problems = format_lines(validate_prompts(load_prompts(tmp_path / "p.txt"), detect_model(build_config("default"))))
    assert [line.partition("p.txt:")[2] for line in problems] == [
        "2: --ci: FramePack one frame needs 2 control images for each picture, not 1",
        "3: --ci: FramePack one frame needs 1 control image for each picture, not 0",
    ]
    (other,) = format_lines(validate_prompts([Prompt("e", one_frame="default")], detect_model("random:flux:tiny")))
    assert "FLUX.1 is not run with --one_frame; leave it out" in other
    (tmp_path / "p.txt").write_text("a --of no_3x", encoding="utf-8")
    with pytest.raises(FileError, match=r"p.txt:1: --of: expected some of default"):
        load_prompts(tmp_path / "p.txt")
