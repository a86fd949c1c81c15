"""Training with cached latents and text encoder outputs equals training without, on any number of ranks."""

import itertools
import logging
import os
import time
from pathlib import Path
from typing import Any

import cache_family
import numpy as np
import pytest
import torch
from cache_family import AveragePoolFamily, CachedRun, EncodedNames, write_dataset_file
from numbered_images import write_numbered_images
from PIL import Image
from problem_lines import format_lines
from rank_processes import CONTEXT, run_on_ranks
from training_runs import write_images

from library.cache.store import CacheStore
from library.dataloader.batch import normalize_pixels
from library.diffusion.masked_loss import resize_mask_to_latents
from library.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[2]
STEPS = (
    "--max_train_steps 8 --train_batch_size 2 --gradient_accumulation_steps 2 --flip_aug --shuffle_caption "
    "--keep_tokens 1 --caption_dropout_rate 0.3 --optimizer_type SGD --learning_rate 0.5 --max_data_loader_n_workers 0 "
    "--quiet"
).split()
ON_DISK = ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
IN_MEMORY = ["--cache_latents", "--cache_text_encoder_outputs"]


@pytest.fixture(scope="module")
def uneven_dataset(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("uneven"), {(96, 64): 5, (64, 96): 3, (100, 70): 2})


def train_and_record(*flags: str) -> tuple[list[float], list[tuple[str, ...]], list[str]]:
    """Train; return the loss of each step, the components of each model load, and what was encoded."""
    from library.config import parse_config
    from library.models.families.sd1_sd2 import StableDiffusion1
    from library.parallel.ddp import DDPStrategy
    from library.training.run import run_training

    losses: list[float] = []
    loaded_components: list[tuple[str, ...]] = []
    compute_gradients, load_model, encoded = DDPStrategy.compute_gradients, StableDiffusion1.load, EncodedNames()

    def record_loss(self, *arguments):
        loss = compute_gradients(self, *arguments)
        losses.append(float(loss))
        return loss

    def record_load(self, model, dtype, components=None, **others):
        loaded_components.append(tuple(components))
        return load_model(self, model, dtype, components, **others)

    DDPStrategy.compute_gradients, StableDiffusion1.load = record_loss, record_load
    run_training(parse_config(["--network_train_unet_only", *flags]).require_valid())
    return losses, loaded_components, encoded.take()


@pytest.fixture(scope="module")
def uncached_losses(uneven_dataset, tmp_path_factory) -> dict[int, list[list[float]]]:
    """The losses of each rank, by number of ranks."""
    folder = str(tmp_path_factory.mktemp("uncached"))
    flags = ["--dataset_config", str(uneven_dataset), "--output_dir", folder, *STEPS]
    return {ranks: [losses for losses, _, _ in run_on_ranks(ranks, train_and_record, *flags)] for ranks in (1, 2)}


@pytest.mark.parametrize(
    "flags",
    [
        ON_DISK,
        IN_MEMORY,
        IN_MEMORY[:1],
        IN_MEMORY[1:],
        [*ON_DISK, "--vae_batch_size", "3", "--text_encoder_batch_size", "4"],
    ],
)
def test_losses_with_and_without_caches_are_bitwise_equal(flags, uneven_dataset, uncached_losses, tmp_path):
    all_flags = [
        "--dataset_config",
        str(uneven_dataset),
        "--output_dir",
        str(tmp_path),
        "--cache_dir",
        str(tmp_path / "cache"),
        *STEPS,
        *flags,
    ]
    ((losses, loads, encoded),) = run_on_ranks(1, train_and_record, *all_flags)

    assert len(set(losses)) == 8
    if "--vae_batch_size" in flags:  # a batch of images is rounded differently from single images
        assert losses == pytest.approx(uncached_losses[1][0], rel=1e-5)
    else:
        assert losses == uncached_losses[1][0]
    assert encoded
    if flags == ON_DISK:
        ((second_losses, loads, encoded),) = run_on_ranks(1, train_and_record, *all_flags)
        assert second_losses == losses and not encoded
    if flags in (ON_DISK, IN_MEMORY):
        assert sorted(loads[-1]) == ["tokenizer", "unet"]


@pytest.mark.parametrize("flags", [ON_DISK, IN_MEMORY])
def test_two_ranks_share_the_encoding_and_losses_equal_those_without_a_cache(
    flags, uneven_dataset, uncached_losses, tmp_path
):
    results = run_on_ranks(
        2,
        train_and_record,
        "--dataset_config",
        str(uneven_dataset),
        "--output_dir",
        str(tmp_path),
        "--cache_dir",
        str(tmp_path / "cache"),
        *STEPS,
        *flags,
    )

    assert [losses for losses, _, _ in results] == uncached_losses[2]
    first, second = ({name for name in encoded if "images/" in name} for _, _, encoded in results)
    assert len(first) == len(second) == 10 and not first & second
    leftover = {path.name for path in (tmp_path / "cache").iterdir()} - {
        "scan"
    }  # the results of the image scan are always cached
    assert leftover - {"files.json"} == ({"latents", "texts"} if flags == ON_DISK else set())


@pytest.mark.slow
def test_previews_with_caches_load_only_the_vae(uneven_dataset, tmp_path):
    flags = [
        "--dataset_config",
        str(uneven_dataset),
        "--output_dir",
        str(tmp_path),
        "--cache_dir",
        str(tmp_path / "cache"),
        *STEPS,
        "--max_train_steps",
        "2",
        "--sample_prompts",
        str(ROOT / "dataset_configs/demo_prompts.txt"),
        "--sample_every_n_steps",
        "2",
    ]
    run_on_ranks(1, train_and_record, *flags)
    uncached_previews = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "sample").iterdir())]
    for path in (tmp_path / "sample").iterdir():
        path.unlink()
    ((_, loads, _),) = run_on_ranks(1, train_and_record, *flags, *ON_DISK)

    assert [sorted(components) for components in loads[-2:]] == [["tokenizer", "unet"], ["vae"]]
    cached_previews = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "sample").iterdir())]
    assert len(uncached_previews) == len(cached_previews) == 6
    assert all(np.array_equal(*pair) for pair in zip(uncached_previews, cached_previews, strict=True))


def collect_batch_rows(dataset_file: str, *flags: str) -> list[tuple[int, int, int, bool, int]]:
    """Collect (name, latent, caption, is_mirrored, ...) of every sample in this rank's batches of three epochs."""
    family = AveragePoolFamily()
    pipe = family.load(None, torch.float32, ())
    cached_run = CachedRun(
        family,
        "--dataset_config",
        dataset_file,
        *"--flip_aug --shuffle_caption --train_batch_size 2 --max_train_epochs 3 --max_data_loader_n_workers 0".split(),
        *flags,
    )
    rows = []
    for step, batches in enumerate(itertools.islice(cached_run.build_loader().iter_steps(0), cached_run.plan.steps)):
        for batch in batches.micro_batches:
            moments = batch.moments or family.encode_moments(pipe, normalize_pixels(batch.pixels))
            mask = batch.latent_mask
            if batch.mask is not None:
                mask = resize_mask_to_latents(
                    batch.mask, (moments.mean_and_std.shape[-2], moments.mean_and_std.shape[-1])
                )
            cond = batch.cond or family.encode_prompts(pipe, batch.captions)
            for row, (name, weight) in enumerate(zip(batch.sample_keys, batch.loss_weights.tolist(), strict=True)):
                latent = moments.mean_and_std[row, 0, 0]
                value, is_mirrored = float(latent.max()), bool(latent[0, 0] > latent[0, -1])
                assert float(latent.min()) == -1 and float(cond["sums"][row]) == float(cond["numbers"][row].sum())
                order = tuple(int(number) for number in cond["numbers"][row])
                caption = sum(order) - 1100
                rows.append(
                    (
                        name,
                        round(((value + 1) * 127.5 - 20) / 10),
                        caption,
                        is_mirrored,
                        order,
                        weight,
                        batch.global_positions[row],
                        step,
                        tuple(batch.size_conditioning[row].tolist()),
                        None if mask is None else mask[row].tolist(),
                    )
                )
    return rows


def test_images_captions_and_latents_match_in_every_batch_of_three_epochs(tmp_path):
    write_numbered_images(tmp_path, 11, with_masks=True)
    file = write_dataset_file(tmp_path, subset="alpha_mask = true")
    plain = run_on_ranks(2, collect_batch_rows, file)
    cached = run_on_ranks(2, collect_batch_rows, file, *ON_DISK)
    assert cached == plain

    samples = [row for rows in cached for row in rows]
    number_by_name = {f"images/{(number * 7) % 11:02d}.png": number for number in range(11)}
    assert all(latent == caption == number_by_name[name] for name, latent, caption, *_ in samples)
    counts = {name: sum(row[0] == name and row[5] > 0 for row in samples) for name in number_by_name}
    assert set(counts.values()) == {3}
    assert len({str(row[-1]) for row in samples}) > 10  # masks of five images, flipped and unflipped, and no mask
    assert {row[3] for row in samples} == {True, False} and len({row[4][0] for row in samples}) > 3


def read_latent_maxima(cached_run: CachedRun) -> list[float]:
    """Read the largest value in the latents of each image."""
    count = len(cached_run.prepared.manifest.samples)
    return [float(cached_run.latents.read_moments([index], [False]).mean_and_std[0, 0].max()) for index in range(count)]


def build_cache_in_process(dataset_file: str, name: str, queue: Any) -> None:
    encoded = EncodedNames()
    os.environ.pop("RANK", None)
    encode_moments = AveragePoolFamily.encode_moments

    def encode_slowly(self, pipe, pixels):
        time.sleep(0.02)
        return encode_moments(self, pipe, pixels)

    AveragePoolFamily.encode_moments = encode_slowly
    cached_run = CachedRun(AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk")
    queue.put((name, encoded.take(), read_latent_maxima(cached_run)))


def test_two_independent_processes_fill_one_cache_directory(tmp_path):
    write_numbered_images(tmp_path, 20)
    file, queue = write_dataset_file(tmp_path), CONTEXT.SimpleQueue()
    processes = [CONTEXT.Process(target=build_cache_in_process, args=(file, name, queue), daemon=True) for name in "ab"]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join()

    store = CacheStore([tmp_path / "images" / ".cache-lorikeet" / "latents"])
    assert store.find_damaged(range(len(store))) == []
    counts = np.unique(store.entries["key"], return_counts=True)[1]
    assert len(counts) == 20 and counts.max() <= 2
    assert results[0][2] == results[1][2] and len(set(results[0][2])) == 20


def build_cache_with_slow_rank(dataset_file: str) -> int:
    """The process group has a timeout of six seconds; encoding on rank 0 takes longer."""
    from datetime import timedelta

    from accelerate.utils import InitProcessGroupKwargs

    from library.distributed import accelerator

    accelerator.build_process_group_kwargs = lambda *_: InitProcessGroupKwargs(
        backend="gloo", timeout=timedelta(seconds=6)
    )
    encode_moments = AveragePoolFamily.encode_moments

    def encode_slowly(self, pipe, pixels):
        time.sleep(2 if os.environ["RANK"] == "0" else 0)
        return encode_moments(self, pipe, pixels)

    AveragePoolFamily.encode_moments = encode_slowly
    return len(
        set(
            read_latent_maxima(
                CachedRun(AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk")
            )
        )
    )


@pytest.mark.slow
def test_a_slow_rank_may_take_longer_than_the_group_timeout(tmp_path):
    write_numbered_images(tmp_path, 8)
    assert run_on_ranks(2, build_cache_with_slow_rank, write_dataset_file(tmp_path)) == [8, 8]


def build_cache_with_failing_rank(dataset_file: str) -> str:
    if os.environ["RANK"] == "1":

        def raise_error(self, pipe, pixels):
            raise UserError("device lost")

        AveragePoolFamily.encode_moments = raise_error
    try:
        CachedRun(AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk")
    except UserError as error:
        return f"{error} {error.is_reported}"
    return "no error"


def test_an_encoding_error_on_one_rank_is_raised_on_all_and_reported_once(tmp_path):
    write_numbered_images(tmp_path, 8)
    assert run_on_ranks(2, build_cache_with_failing_rank, write_dataset_file(tmp_path)) == [
        "device lost True",
        "device lost False",
    ]


def build_cache_without_shared_disk(dataset_file: str, folder: str) -> tuple[int, int]:
    encoded = EncodedNames()
    cache_dir = str(Path(folder) / os.environ["RANK"])
    cached_run = CachedRun(
        AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk", "--cache_dir", cache_dir
    )
    return len(encoded.take()), len(set(read_latent_maxima(cached_run)))


def test_ranks_without_a_shared_disk_encode_everything_each(tmp_path):
    write_numbered_images(tmp_path, 8)
    assert run_on_ranks(2, build_cache_without_shared_disk, write_dataset_file(tmp_path), str(tmp_path / "disks")) == [
        (8, 8),
        (8, 8),
    ]


def build_cache_with_overflow(dataset_file: str) -> tuple[list[str], list[float]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("library").addHandler(handler)
    cached_run = CachedRun(
        AveragePoolFamily(torch.float16), "--dataset_config", dataset_file, "--cache_latents", "--vae_batch_size", "4"
    )
    return [line for line in warnings if "overflows" in line], read_latent_maxima(cached_run)


def test_an_image_that_overflows_the_vae_is_reported_and_encoded_in_float32(tmp_path):
    (tmp_path / "images").mkdir()
    for number, gray in enumerate((10, 255, 90)):
        Image.new("RGB", (64, 64), (gray, gray, gray)).save(tmp_path / "images" / f"{number}.png")
    ((warnings, values),) = run_on_ranks(1, build_cache_with_overflow, write_dataset_file(tmp_path))
    assert [line.partition(":")[0] for line in warnings] == ["images/1.png"] and "torch.float16" in warnings[0]
    assert values == pytest.approx([10 / 127.5 - 1, 1, 90 / 127.5 - 1])


def build_cache_with_breaking_image(dataset_file: str, on_invalid_images: str) -> Any:

    cache_latents = cache_family.cache_latents

    def break_image_and_cache(encoders, prepared):
        encoders.strategy.comm.barrier()  # all ranks have scanned the images
        (Path(dataset_file).parent / "images" / "03.png").write_bytes(b"not an image")
        return cache_latents(encoders, prepared)

    cache_family.cache_latents = break_image_and_cache
    try:
        run = CachedRun(
            AveragePoolFamily(),
            "--dataset_config",
            dataset_file,
            "--cache_latents_to_disk",
            "--on_invalid_images",
            on_invalid_images,
        )
    except ConfigError as error:
        return format_lines(error.problems)
    names = [sample.key for sample in run.prepared.manifest.samples]
    planned = {sample for bucket in run.plan.batch_plan.buckets for sample in bucket.sample_indices}
    return names, [round(((value + 1) * 127.5 - 20) / 10) for value in read_latent_maxima(run)], sorted(planned)


@pytest.mark.slow
def test_an_image_that_breaks_after_the_scan_is_handled_by_on_invalid_images_on_every_rank(tmp_path):
    write_numbered_images(tmp_path, 8)
    content = (tmp_path / "images" / "03.png").read_bytes()
    file = write_dataset_file(tmp_path)
    problems = run_on_ranks(2, build_cache_with_breaking_image, file, "fail")
    assert problems[0] == problems[1] and len(problems[0]) == 2
    assert "03.png: was readable at the start of the run, cannot be read now" in problems[0][0]

    (tmp_path / "images" / "03.png").write_bytes(content)
    results = run_on_ranks(2, build_cache_with_breaking_image, file, "skip")
    names = [f"images/{number:02d}.png" for number in range(8) if number != 3]
    numbers = {f"images/{(number * 7) % 8:02d}.png": number for number in range(8)}
    assert results == [(names, [numbers[name] for name in names], list(range(7)))] * 2
