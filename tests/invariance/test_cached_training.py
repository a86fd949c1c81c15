"""With a cache the same is trained as without: the same numbers in the same order, on any number of processes."""

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
from rank_processes import CONTEXT, run_on_ranks
from training_runs import write_images

from library.cache.store import CacheStore
from library.data.batch import normalize_pixels
from library.diffusion.losses import resize_mask_to_latents
from library.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[2]
STEPS = [
    "--max_train_steps",
    "8",
    "--train_batch_size",
    "2",
    "--gradient_accumulation_steps",
    "2",
    "--flip_aug",
    "--shuffle_caption",
    "--keep_tokens",
    "1",
    "--caption_dropout_rate",
    "0.3",
    "--optimizer_type",
    "SGD",
    "--learning_rate",
    "0.5",
    "--max_data_loader_n_workers",
    "0",
    "--quiet",
]
ON_DISK = ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
FOR_THE_RUN = ["--cache_latents", "--cache_text_encoder_outputs"]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("uneven"), {(96, 64): 5, (64, 96): 3, (100, 70): 2})


def losses(*flags: str) -> tuple[list[float], list[tuple[str, ...]], list[str]]:
    """Of each step; the parts of the model that were loaded, load by load; and what was encoded."""
    from library.config import parse_config
    from library.models.families.sd1_sd2 import StableDiffusion1
    from library.parallel.ddp import DDPStrategy
    from library.training.run import run_training

    seen: list[float] = []
    loaded: list[tuple[str, ...]] = []
    honest, honest_load, encoded = DDPStrategy.compute_gradients, StableDiffusion1.load, EncodedNames()

    def gradients(self, *arguments):
        loss = honest(self, *arguments)
        seen.append(float(loss))
        return loss

    def load(self, model, dtype, parts=None, **others):
        loaded.append(tuple(parts))
        return honest_load(self, model, dtype, parts, **others)

    DDPStrategy.compute_gradients, StableDiffusion1.load = gradients, load
    run_training(parse_config(flags).require_valid())
    return seen, loaded, encoded.take()


@pytest.fixture(scope="module")
def uncached(uneven, tmp_path_factory) -> dict[int, list[list[float]]]:
    """By number of processes the losses of each."""
    folder = str(tmp_path_factory.mktemp("uncached"))
    flags = ["--dataset_config", str(uneven), "--output_dir", folder, *STEPS]
    return {ranks: [seen for seen, _, _ in run_on_ranks(ranks, losses, *flags)] for ranks in (1, 2)}


@pytest.mark.parametrize(
    "flags",
    [
        ON_DISK,
        FOR_THE_RUN,
        FOR_THE_RUN[:1],
        FOR_THE_RUN[1:],
        [*ON_DISK, "--vae_batch_size", "3", "--text_encoder_batch_size", "4"],
    ],
)
def test_losses_are_those_without_a_cache_to_the_bit(flags, uneven, uncached, tmp_path):
    words = [
        "--dataset_config",
        str(uneven),
        "--output_dir",
        str(tmp_path),
        "--cache_dir",
        str(tmp_path / "cache"),
        *STEPS,
        *flags,
    ]
    ((found, loaded, encoded),) = run_on_ranks(1, losses, *words)

    assert len(set(found)) == 8
    if "--vae_batch_size" in flags:  # several pictures at once are rounded in another way than each alone
        assert found == pytest.approx(uncached[1][0], rel=1e-5)
    else:
        assert found == uncached[1][0]
    assert encoded
    if flags == ON_DISK:
        ((again, loaded, encoded),) = run_on_ranks(1, losses, *words)
        assert again == found and not encoded
    if flags in (ON_DISK, FOR_THE_RUN):
        assert sorted(loaded[-1]) == ["tokenizer", "unet"]


@pytest.mark.parametrize("flags", [ON_DISK, FOR_THE_RUN])
def test_two_processes_share_the_work_and_train_as_without_a_cache(flags, uneven, uncached, tmp_path):
    results = run_on_ranks(
        2,
        losses,
        "--dataset_config",
        str(uneven),
        "--output_dir",
        str(tmp_path),
        "--cache_dir",
        str(tmp_path / "cache"),
        *STEPS,
        *flags,
    )

    assert [found for found, _, _ in results] == uncached[2]
    one, other = ({name for name in encoded if "picture" in name and "/" in name} for _, _, encoded in results)
    assert len(one) == len(other) == 10 and not one & other
    left = {path.name for path in (tmp_path / "cache").iterdir()} - {"scan"}  # what pictures are like is always kept
    assert left - {"files.json"} == ({"latents", "texts"} if flags == ON_DISK else set())


@pytest.mark.slow
def test_previews_need_no_text_encoder_and_the_vae_only_while_they_are_drawn(uneven, tmp_path):
    flags = [
        "--dataset_config",
        str(uneven),
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
    run_on_ranks(1, losses, *flags)
    drawn = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "sample").iterdir())]
    for path in (tmp_path / "sample").iterdir():
        path.unlink()
    ((_, loaded, _),) = run_on_ranks(1, losses, *flags, *ON_DISK)

    assert [sorted(parts) for parts in loaded[-2:]] == [["tokenizer", "unet"], ["vae"]]
    again = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "sample").iterdir())]
    assert len(drawn) == len(again) == 6
    assert all(np.array_equal(*pair) for pair in zip(drawn, again, strict=True))


def paired(dataset_file: str, *flags: str) -> list[tuple[int, int, int, bool, int]]:
    """For three epochs, (name, latent, caption, mirrored, place) as this rank's batches have them."""
    family = AveragePoolFamily()
    pipe = family.load(None, torch.float32, ())
    kept = CachedRun(
        family,
        "--dataset_config",
        dataset_file,
        "--flip_aug",
        "--shuffle_caption",
        "--train_batch_size",
        "2",
        "--max_train_epochs",
        "3",
        "--max_data_loader_n_workers",
        "0",
        *flags,
    )
    rows = []
    for step, work in enumerate(itertools.islice(kept.build_loader().iter_steps(0), kept.plan.steps)):
        for batch in work.micro_batches:
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


def test_picture_caption_and_latent_stay_together_for_three_epochs(tmp_path):
    write_numbered_images(tmp_path, 11, with_masks=True)
    file = write_dataset_file(tmp_path, subset="alpha_mask = true")
    plain = run_on_ranks(2, paired, file)
    cached = run_on_ranks(2, paired, file, *ON_DISK)
    assert cached == plain

    shown = [row for rows in cached for row in rows]
    truth = {f"images/{(number * 7) % 11:02d}.png": number for number in range(11)}
    assert all(latent == caption == truth[name] for name, latent, caption, *_ in shown)
    counts = {name: sum(row[0] == name and row[5] > 0 for row in shown) for name in truth}
    assert set(counts.values()) == {3}
    assert len({str(row[-1]) for row in shown}) > 10  # those of five pictures, straight and mirrored, and none
    assert {row[3] for row in shown} == {True, False} and len({row[4][0] for row in shown}) > 3


def brightest(kept: CachedRun) -> list[float]:
    """The largest number in the latents of each picture."""
    count = len(kept.prepared.manifest.samples)
    return [float(kept.latents.read_moments([index], [False]).mean_and_std[0, 0].max()) for index in range(count)]


def built_alone(dataset_file: str, name: str, queue: Any) -> None:
    encoded = EncodedNames()
    os.environ.pop("RANK", None)
    honest = AveragePoolFamily.encode_moments

    def slowly(self, pipe, pixels):
        time.sleep(0.02)
        return honest(self, pipe, pixels)

    AveragePoolFamily.encode_moments = slowly
    kept = CachedRun(AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk")
    queue.put((name, encoded.take(), brightest(kept)))


def test_two_programs_that_know_nothing_of_each_other_fill_one_folder(tmp_path):
    write_numbered_images(tmp_path, 20)
    file, queue = write_dataset_file(tmp_path), CONTEXT.SimpleQueue()
    processes = [CONTEXT.Process(target=built_alone, args=(file, name, queue), daemon=True) for name in "ab"]
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


def slow_on_one(dataset_file: str) -> int:
    """The process group gives up after six seconds; the first process's share takes longer."""
    from datetime import timedelta

    from accelerate.utils import InitProcessGroupKwargs

    from library.distributed import accelerator

    accelerator.build_process_group_kwargs = lambda *_: InitProcessGroupKwargs(
        backend="gloo", timeout=timedelta(seconds=6)
    )
    honest = AveragePoolFamily.encode_moments

    def slowly(self, pipe, pixels):
        time.sleep(2 if os.environ["RANK"] == "0" else 0)
        return honest(self, pipe, pixels)

    AveragePoolFamily.encode_moments = slowly
    return len(
        set(brightest(CachedRun(AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk")))
    )


@pytest.mark.slow
def test_waiting_for_a_slow_process_is_not_ended_by_the_time_limit_of_the_group(tmp_path):
    write_numbered_images(tmp_path, 8)
    assert run_on_ranks(2, slow_on_one, write_dataset_file(tmp_path)) == [8, 8]


def failing_on_one(dataset_file: str) -> str:
    if os.environ["RANK"] == "1":

        def broken(self, pipe, pixels):
            raise UserError("the device is gone")

        AveragePoolFamily.encode_moments = broken
    try:
        CachedRun(AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk")
    except UserError as error:
        return f"{error} {error.is_reported}"
    return "nothing happened"


def test_what_fails_on_one_process_fails_on_all_and_is_told_once(tmp_path):
    write_numbered_images(tmp_path, 8)
    assert run_on_ranks(2, failing_on_one, write_dataset_file(tmp_path)) == [
        "the device is gone True",
        "the device is gone False",
    ]


def without_a_common_disk(dataset_file: str, folder: str) -> tuple[int, int]:
    encoded = EncodedNames()
    mine = str(Path(folder) / os.environ["RANK"])
    kept = CachedRun(
        AveragePoolFamily(), "--dataset_config", dataset_file, "--cache_latents_to_disk", "--cache_dir", mine
    )
    return len(encoded.take()), len(set(brightest(kept)))


def test_processes_without_a_common_disk_each_do_the_whole_work(tmp_path):
    write_numbered_images(tmp_path, 8)
    assert run_on_ranks(2, without_a_common_disk, write_dataset_file(tmp_path), str(tmp_path / "disks")) == [
        (8, 8),
        (8, 8),
    ]


def overflowing(dataset_file: str) -> tuple[list[str], list[float]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("library").addHandler(handler)
    kept = CachedRun(
        AveragePoolFamily(torch.float16), "--dataset_config", dataset_file, "--cache_latents", "--vae_batch_size", "4"
    )
    return [line for line in warnings if "overflows" in line], brightest(kept)


def test_a_picture_on_which_the_vae_overflows_is_named_and_encoded_in_float32(tmp_path):
    (tmp_path / "images").mkdir()
    for number, grey in enumerate((10, 255, 90)):
        Image.new("RGB", (64, 64), (grey, grey, grey)).save(tmp_path / "images" / f"{number}.png")
    ((warnings, values),) = run_on_ranks(1, overflowing, write_dataset_file(tmp_path))
    assert [line.partition(":")[0] for line in warnings] == ["images/1.png"] and "torch.float16" in warnings[0]
    assert values == pytest.approx([10 / 127.5 - 1, 1, 90 / 127.5 - 1])


def with_a_picture_that_breaks(dataset_file: str, on_invalid_images: str) -> Any:

    honest = cache_family.cache_latents

    def breaking(encoders, prepared):
        encoders.strategy.comm.barrier()  # all have looked at the pictures
        (Path(dataset_file).parent / "images" / "03.png").write_bytes(b"broken since")
        return honest(encoders, prepared)

    cache_family.cache_latents = breaking
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
        return error.problems
    names = [sample.key for sample in run.prepared.manifest.samples]
    planned = {sample for bucket in run.plan.batch_plan.buckets for sample in bucket.sample_indices}
    return names, [round(((value + 1) * 127.5 - 20) / 10) for value in brightest(run)], sorted(planned)


@pytest.mark.slow
def test_a_picture_that_broke_in_the_meantime_goes_the_way_of_bad_data_on_every_process(tmp_path):
    write_numbered_images(tmp_path, 8)
    whole = (tmp_path / "images" / "03.png").read_bytes()
    file = write_dataset_file(tmp_path)
    problems = run_on_ranks(2, with_a_picture_that_breaks, file, "fail")
    assert problems[0] == problems[1] and len(problems[0]) == 2
    assert "03.png: was readable at the start of the run, cannot be read now" in problems[0][0]

    (tmp_path / "images" / "03.png").write_bytes(whole)
    results = run_on_ranks(2, with_a_picture_that_breaks, file, "skip")
    names = [f"images/{number:02d}.png" for number in range(8) if number != 3]
    numbers = {f"images/{(number * 7) % 8:02d}.png": number for number in range(8)}
    assert results == [(names, [numbers[name] for name in names], list(range(7)))] * 2
