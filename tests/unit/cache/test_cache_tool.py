"""``python -m library cache`` builds, verifies, repairs and prunes caches, and reports what cannot be cached."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cache_family import write_dataset_file
from numbered_images import write_numbered_images
from problem_lines import format_lines
from rank_processes import run_on_ranks

from library.cache.store import CacheStore
from library.config import parse_config
from library.config.validate_adapter import validate_text_caching
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def tools(*calls: list[str]) -> list[tuple[str, int]]:
    """Call the tool several times in one process."""
    from library.tools.cache import run_cache

    return [run_cache([*call, "--quiet"]) for call in calls]


def damage(folder: Path) -> None:
    """Flip a bit in the middle of the first entry."""
    (path,) = folder.rglob("*.shard")
    data = bytearray(path.read_bytes())
    data[int(CacheStore([path.parent]).entries["length"][0]) // 2] ^= 16
    path.write_bytes(bytes(data))


def age(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))


def damage_and_repair(file: str, cache: str) -> list[tuple[str, int]]:
    options = [
        "--dataset_config",
        file,
        "--cache_dir",
        cache,
        "--pp_size",
        "2",
    ]  # an option of training, not of caching
    results = tools(["info", *options], ["build", *options], ["verify", *options], ["info", *options])
    damage(Path(cache))
    results += tools(["verify", *options], ["repair", *options], ["verify", *options])
    age(Path(cache))
    smaller = [*options, "--resolution", "64"]
    (Path(file).parent / "images" / "00.png").unlink()
    results += tools(["prune", *smaller], ["prune", "--yes", *smaller], ["info", *smaller], ["verify", *smaller])
    return results


@pytest.mark.slow
def test_a_cache_is_built_verified_repaired_and_pruned(tmp_path):
    write_numbered_images(tmp_path, 6)
    cache = tmp_path / "cache"
    (results,) = run_on_ranks(1, damage_and_repair, write_dataset_file(tmp_path), str(cache))
    texts, codes = [text for text, _ in results], [code for _, code in results]

    assert codes == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert texts[0].splitlines()[0] == "latents: 0 of 6 cached"
    assert texts[1] == "latents: 6 of 6 cached"
    assert texts[2] == "latents: 6 entries, 0 damaged; 6 of 6 cached"
    assert texts[3].splitlines()[1].startswith(f"  {cache}/latents: 6 entries, 6 of them needed, ")
    assert "6 entries, 1 damaged" in texts[4] and "  damaged: images/0" in texts[4]
    assert texts[5].splitlines()[-1] == "latents: 6 of 6 cached"
    assert texts[6] == "latents: 6 entries, 0 damaged; 6 of 6 cached"
    assert re.search(r"[12] of 6 latents not needed", texts[7])  # the deleted image's, and the damaged one
    assert texts[7].splitlines()[-1] == "nothing was removed; add --yes to remove it"
    assert texts[8].splitlines()[-1] == "removed"
    assert texts[9].splitlines()[1].startswith(f"  {cache}/latents: 5 entries, 5 of them needed, ")
    assert texts[10] == "latents: 5 entries, 0 damaged; 5 of 5 cached"


def build_texts(file: str, cache: str) -> tuple[list[tuple[str, int]], list[str]]:
    options = [
        "--dataset_config",
        file,
        "--cache_dir",
        cache,
        *"--cache_text_encoder_outputs --shuffle_caption --max_train_steps 6".split(),
    ]
    return tools(["build", *options], ["info", *options, "--cache_latents"]), sorted(os.listdir(cache))


def test_text_outputs_are_built_if_caption_caching_is_set(tmp_path):
    write_numbered_images(tmp_path, 3)
    ((results, names),) = run_on_ranks(1, build_texts, write_dataset_file(tmp_path), str(tmp_path / "cache"))
    count = int(results[0][0].split()[2])
    assert 4 < count <= 7 and results[0][0] == f"text-encoder outputs: {count} of {count} cached"
    assert "latents: 0 of 3 cached" in results[1][0] and {"latents", "texts"} & {*names} == {"texts"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["biuld"], "unknown command 'biuld'; did you mean build?"),
        (["verify", "--yes"], "--yes: only with prune"),
        (["build", "--dataset_config", "nowhere.toml", "--cache_dirr", "x"], "--cache_dirr: unknown option"),
    ],
)
def test_command_line_errors_are_reported_before_anything_is_read(words, problem):
    from library.tools.cache import run_cache

    with pytest.raises(ConfigError, match=problem.replace("?", r"\?")):
        run_cache(words)


TEXTS = "network_train_text_encoder_only"


def problems(folder: Path, *flags: str, lines: str = "", subset: str = "") -> list[str]:
    loaded = parse_config(["--dataset_config", write_dataset_file(folder, lines, subset), *flags])
    return [
        *format_lines(loaded.problems),
        *format_lines(validate_dataset_config(loaded.config.data, loaded.config.cache)),
    ]


def test_settings_that_rule_out_caching_are_rejected_early_with_both_options(tmp_path):
    (tmp_path / "images").mkdir()
    file = tmp_path / "set.toml"
    assert problems(tmp_path, "--cache_latents", "--cache_text_encoder_outputs_to_disk") == []
    assert problems(tmp_path, subset="random_crop = true") == []
    assert problems(tmp_path, "--cache_latents_to_disk", subset="random_crop = true") == [
        f"{file}:12: random_crop: cannot be used with cache_latents_to_disk, because images are cropped at random"
        " each time; remove one of the two"
    ]
    assert problems(tmp_path, "--cache_latents", "--random_crop")[0].startswith("--random_crop: cannot be used with")
    for switch, name in (("--no-network_train_unet_only", "network_train_unet_only"), (f"--{TEXTS}", TEXTS)):
        loaded = parse_config([*switch.split(), "--cache_text_encoder_outputs"])
        adapter, cache = loaded.config.adapter, loaded.config.cache
        (problem,) = validate_text_caching(adapter, cache, ["text_encoder"], None)
        assert problem.options[0] == "cache_text_encoder_outputs" and name in str(problem)
        assert format_lines(validate_text_caching(adapter, cache, [], None)) == []
        assert format_lines(validate_text_caching(adapter, cache, ["text_encoder"], "text_encoder_2")) == []
        (problem,) = validate_text_caching(adapter, cache, ["text_encoder_2"], "text_encoder_2")
        assert problem.options[1] == "network_args" and "remove train_t5xxl" in problem.fix


def test_caching_conflicts_are_reported_without_importing_torch(tmp_path):
    (tmp_path / "images").mkdir()
    script = (
        "import sys; from library.cli import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    words = ["--dataset_config", write_dataset_file(tmp_path, subset="random_crop = true"), "--cache_latents"]
    result = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "2 []", result.stdout + result.stderr
    assert "random_crop" in result.stderr and "cache_latents" in result.stderr


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "library", "plan", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_plan_shows_cache_sizes_and_directories(tmp_path):
    write_numbered_images(tmp_path, 6)
    words = [
        "--dataset_config",
        write_dataset_file(tmp_path),
        *"--cache_latents_to_disk --cache_text_encoder_outputs --network_train_unet_only --flip_aug".split(),
        *"--max_train_steps 3".split(),
    ]
    results = json.loads(plan(*words, "--json").stdout)["caches"]
    latents = 2 * 4 * 10 * 6 * 4
    assert results["latents"] == {
        "entries": 12,
        "bytes": 12 * latents,
        "folders": [str(tmp_path / "images" / ".cache-lorikeet")],
    }
    assert results["captions"] == {"entries": 7, "bytes": 7 * 77 * 128 * 4, "folders": []}
    text = plan(*words).stdout.splitlines()
    assert f"cached latents: 12, 23 kB, in {tmp_path}/images/.cache-lorikeet" in text
    assert "cached captions: 7, at most 276 kB, for this run only" in text
    assert os.listdir(tmp_path / "images" / ".cache-lorikeet") == ["scan"]


def cache_in_a_read_only_directory(file: str, cache: str) -> list[str]:
    from cache_family import AveragePoolFamily, CachedRun

    from library.errors import UserError

    family, results = AveragePoolFamily(), []
    for flag in ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"):
        try:
            CachedRun(family, "--dataset_config", file, flag, "--cache_dir", cache)
        except UserError as error:
            results.append(str(error))
    return [*results, str([parts for parts in family.loaded if parts == ("vae",)][1:])]


def test_a_read_only_cache_directory_is_reported_before_a_model_is_loaded(tmp_path):
    write_numbered_images(tmp_path, 2)
    (tmp_path / "file").touch()
    (results,) = run_on_ranks(
        1, cache_in_a_read_only_directory, write_dataset_file(tmp_path), str(tmp_path / "file" / "cache")
    )
    for option, line in zip(("cache_latents_to_disk", "cache_text_encoder_outputs_to_disk"), results, strict=False):
        assert (
            line.startswith(f"--{option}: {tmp_path}/file/cache/") and "set another directory with --cache_dir" in line
        )
    assert results[2] == "[]"  # besides reading the model config


def cache_on_a_small_disk(file: str) -> str:
    import shutil
    from types import SimpleNamespace

    from cache_family import AveragePoolFamily, CachedRun

    from library.errors import UserError

    shutil.disk_usage = lambda path: SimpleNamespace(free=100)  # less than any estimate, even from the empty caption
    try:
        CachedRun(AveragePoolFamily(), "--dataset_config", file, "--cache_text_encoder_outputs", "--shuffle_caption")
    except UserError as error:
        return str(error)
    return ""


def test_too_many_captions_for_the_disk_are_reported_with_suggestions(tmp_path):
    write_numbered_images(tmp_path, 5)
    (results,) = run_on_ranks(1, cache_on_a_small_disk, write_dataset_file(tmp_path))
    assert re.search(r"text-encoder outputs of \d+ captions: about \d+ bytes needed, 100 bytes free in", results)
    assert "fewer captions without shuffle_caption (--shuffle_caption)" in results
    assert "encode captions during training without --cache_text_encoder_outputs" in results


def build_both_caches(file: str, cache: str) -> list[tuple[str, int]]:
    return tools(
        ["build", "--dataset_config", file, "--cache_dir", cache, "--cache_latents", "--cache_text_encoder_outputs"]
    )


def test_a_dataset_with_a_cache_directory_caches_all_its_images_there(tmp_path):
    write_numbered_images(tmp_path / "one", 3)
    write_numbered_images(tmp_path / "two", 4)
    table = "[[datasets]]\nresolution = 64\ncaption_extension = '.txt'\nimage_directory = '{}/images'\n"
    file = tmp_path / "musubi.toml"
    file.write_text(
        table.format(tmp_path / "one") + f"cache_directory = '{tmp_path}/own'\n" + table.format(tmp_path / "two")
    )
    run_on_ranks(1, build_both_caches, str(file), str(tmp_path / "cache"))
    counts = {
        folder: [len(CacheStore([tmp_path / folder / what])) for what in ("latents", "texts")]
        for folder in ("own", "cache")
    }
    assert counts == {"own": [3, 4], "cache": [1, 1]}  # three of the four are in both folders
    assert [len(list((tmp_path / folder / "scan").glob("*.json"))) for folder in ("own", "cache")] == [1, 1]
    assert not list(tmp_path.rglob(".cache-lorikeet"))


def built(file: str, cache: str) -> list[tuple[str, int]]:
    return tools(["build", "--dataset_config", file, "--cache_dir", cache])


@pytest.mark.slow
def test_several_processes_build_together_and_one_prints(tmp_path):
    write_numbered_images(tmp_path, 6)
    results = run_on_ranks(2, built, write_dataset_file(tmp_path), str(tmp_path / "cache"))
    assert results == [[("latents: 6 of 6 cached", 0)], [("", 0)]]
    assert len(CacheStore([tmp_path / "cache" / "latents"]).get_index_files()) == 2


def test_options_of_cached_latents_count_without_the_option_that_caches_them_in_training(tmp_path):
    from library.tools.cache import load_cached_run

    words = ["--dataset_config", write_dataset_file(tmp_path), "--cache_precision", "fp16"]
    loaded = load_cached_run(words)
    assert loaded.config.cache.cache_precision == "fp16" and not loaded.unused
    captions = load_cached_run([*words, "--cache_text_encoder_outputs"])
    assert [str(place) for place, _ in captions.unused] == ["--cache_precision"]
