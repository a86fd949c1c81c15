"""Images on an S3 server train the same LoRA as local copies, to the bit, also with faults, workers and resuming."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from remote_servers import S3Server, run_s3_server
from resumed_runs import SETTINGS, build_flags, copy_as_killed, dataset, read_metrics, uninterrupted_run  # noqa: F401
from safetensors.torch import load_file
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import max_relative_difference


@pytest.fixture(scope="module")
def server(dataset) -> Iterator[tuple[S3Server, dict[str, str], Path]]:  # noqa: F811
    """A server with the images, what clients need in the environment, and the dataset file with their URL."""
    environment: dict[str, str] = {}
    with run_s3_server(environment) as s3:
        url = s3.upload_folder(dataset.parent / "images", "resume/pictures of #1")
        path = dataset.with_name("remote.toml")
        path.write_text(dataset.read_text().replace(str(dataset.parent / "images"), url))
        yield s3, environment, path


def train_with_workers(num_workers: int, *flags: str) -> str:
    """Train in this process with data loader workers; return the error, if there is one for the user."""
    from library.config import parse_config
    from library.errors import UserError
    from library.training.run import run_training

    multiprocessing.current_process()._config["daemon"] = False  # so that it may have workers
    os.sched_getaffinity = lambda pid: {0, 1, 2}  # type: ignore[assignment]  # workers are limited to the CPUs
    model = ("--network_train_unet_only", "--pretrained_model_name_or_path", get_tiny_sd1_folder())
    workers = ("--max_data_loader_n_workers", str(num_workers))
    try:
        run_training(parse_config([*model, *flags, "--quiet", *workers]).require_valid())
    except UserError as error:
        return str(error)
    return ""


def run_remotely(server, folder: Path, *flags: str, ranks: int = 1, num_workers: int = 2) -> list[str]:
    _, environment, path = server
    environment = {**environment, "XDG_CACHE_HOME": f"{folder}-xdg"}
    return run_on_ranks(
        ranks, train_with_workers, num_workers, *build_flags(path, folder, *flags), environment=environment
    )


def assert_equal_runs(one: Path, other: Path) -> None:
    tensors, others = (load_file(folder / "lora.safetensors") for folder in (one, other))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert read_metrics(one) == read_metrics(other)


def test_a_run_on_s3_is_the_local_run(server, uninterrupted_run, tmp_path):  # noqa: F811
    s3 = server[0]
    s3.proxy.requests.clear()
    assert run_remotely(server, tmp_path / "run") == [""]
    assert_equal_runs(uninterrupted_run, tmp_path / "run")
    assert s3.proxy.count(r"[.]png bytes=") == 8  # each image once
    # Nothing is kept: workers read from the server, which fails now and then.
    s3.proxy.faults += [f"{kind} [.]png bytes" for kind in ("503", "cut", "reset", "slow")] * 4
    assert run_remotely(server, tmp_path / "uncached", "--remote_cache_size", "0.00001GB") == [""]
    assert_equal_runs(uninterrupted_run, tmp_path / "uncached")
    assert not s3.proxy.faults and s3.proxy.count(r"[.]png bytes=") > 50


def test_a_local_run_is_resumed_on_s3(server, uninterrupted_run, tmp_path):  # noqa: F811
    folder = copy_as_killed(uninterrupted_run, tmp_path / "run", 6)
    assert run_remotely(server, folder, "--resume", "latest", num_workers=0) == [""]
    assert_equal_runs(uninterrupted_run, folder)


def test_two_ranks_and_latents_cached_on_disk(server, dataset, tmp_path):  # noqa: F811
    flags = ("--cache_latents_to_disk", "--gradient_accumulation_steps", "1")
    run_on_ranks(1, train_with_workers, 0, *build_flags(dataset, tmp_path / "local", *flags, "--train_batch_size", "2"))
    assert run_remotely(server, tmp_path / "remote", *flags, ranks=2) == ["", ""]
    one, two = (load_file(tmp_path / name / "lora.safetensors") for name in ("local", "remote"))
    assert max_relative_difference(one, two) < 1e-4
    caches = [
        path.parent for path in (tmp_path / "remote-xdg" / "lorikeet" / "remote" / "folders").rglob("latents/*.index")
    ]
    assert caches, "cached latents are in the folder that stands for the remote one"


def test_a_server_that_goes_away_stops_the_run_with_a_checkpoint(server, uninterrupted_run, tmp_path):  # noqa: F811
    s3 = server[0]
    flags = ("--remote_cache_size", "0.00001GB", "--remote_retry_seconds", "1")
    s3.proxy.requests.clear()
    s3.proxy.failing_after = (r"[.]png bytes", 24)
    (error,) = run_remotely(server, tmp_path / "run", *flags)
    s3.proxy.failing_after = None
    first, second = error.splitlines()
    assert first.startswith("s3://training-data/resume/pictures of #1/") and "png: the server fails" in first
    assert "--remote_retry_seconds" in first and second.startswith("the checkpoint after step"), error
    assert 0 < len(read_metrics(tmp_path / "run"))
    assert run_remotely(server, tmp_path / "run", *flags, "--resume", "latest") == [""]
    assert_equal_runs(uninterrupted_run, tmp_path / "run")
