"""One process per machine scans the images, however long it takes; the others wait without a timeout."""

import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from problem_lines import format_lines
from rank_processes import build_communicator, run_on_ranks

from library.errors import ConfigError, UserError
from library.problems import report_file


def slow_work(folder: str) -> tuple[bool, bool]:
    from library.distributed import communicator as module

    module.HEARTBEAT_SECONDS = 0.2
    comm = build_communicator(2)
    mark = Path(folder) / "done"

    def work() -> tuple[bool, bool]:
        was_done = mark.exists()
        if not was_done:
            time.sleep(5)
            mark.touch()
        return comm.is_main, was_done

    result = comm.run_local_main_first(work)
    comm.destroy_process_group()
    return result


def test_other_ranks_wait_longer_than_the_group_timeout_for_the_local_main_process(tmp_path):
    assert run_on_ranks(2, slow_work, str(tmp_path)) == [(True, False), (False, True)]


def failing_work() -> tuple[list[str], bool, int]:
    comm = build_communicator(20)
    count = 0

    def work() -> None:
        nonlocal count
        count += 1
        raise ConfigError([report_file("a.png", "is empty"), report_file("b.png", "is truncated")])

    try:
        comm.run_local_main_first(work)
    except ConfigError as error:
        return format_lines(error.problems), error.is_reported, count
    finally:
        comm.destroy_process_group()


def test_an_error_on_one_rank_is_raised_on_all_and_reported_once():
    problems = ["a.png: is empty", "b.png: is truncated"]
    assert run_on_ranks(2, failing_work) == [(problems, False, 1), (problems, True, 0)]


def count_decoded_images(dataset: str, other: str, folder: str) -> tuple[int, str, bool]:
    """Prepare the data of a run and count decoded images; rank 1 may be on another machine with other files."""
    from library.config import parse_config
    from library.dataset import image_inspection, scan
    from library.models.detect import detect_model
    from library.training.setup import prepare_dataset

    comm = build_communicator(20)
    scan.SETTLED_AFTER_NS = -(10**15)
    examined, count = image_inspection.inspect_bytes, []
    image_inspection.inspect_bytes = lambda *given: (count.append(1), examined(*given))[1]
    config = parse_config(["--dataset_config", dataset if comm.is_main else other]).require_valid()
    if dataset != other:
        comm.run_local_main_first = lambda work: work()  # each has local rank 0
    try:
        prepare_dataset(config.data, config.cache, comm, detect_model(config.model))
        return len(count), "", False
    except UserError as error:
        return len(count), str(error), error.is_reported
    finally:
        comm.destroy_process_group()


@pytest.fixture
def datasets(tmp_path) -> tuple[str, str]:
    """Datasets with the same file names that differ in one pixel."""
    for machine in ("one", "two"):
        (tmp_path / machine / "a").mkdir(parents=True)
        for number in range(5):
            shade = 7 if (machine, number) == ("two", 3) else 0
            Image.new("RGB", (64, 64), (number, shade, 0)).save(tmp_path / machine / "a" / f"{number}.png")
        text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{tmp_path}/{machine}/a'\n"
        (tmp_path / machine / "set.toml").write_text(text)
    return str(tmp_path / "one" / "set.toml"), str(tmp_path / "two" / "set.toml")


def test_each_image_is_decoded_by_one_process_per_machine(datasets, tmp_path):
    one, _ = datasets
    assert run_on_ranks(2, count_decoded_images, one, one, str(tmp_path)) == [(5, "", False), (0, "", False)]


def test_machines_with_different_files_are_refused(datasets, tmp_path):
    first, second = run_on_ranks(2, count_decoded_images, *datasets, str(tmp_path))
    assert first[0] == second[0] == 5
    assert first[1] == second[1] and first[1].startswith("images, captions or dataset settings: rank 1 (on")
    assert f"(the first that differs is {tmp_path}/one/a/3.png, image 4; 5 images here, 5 there)" in first[1]
    assert (first[2], second[2]) == (False, True)


def load_tensors_on_main() -> dict[str, tuple]:
    comm = build_communicator(20)
    tensors = {
        "matrix": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).T,
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }
    try:
        read = comm.load_on_main_and_broadcast(lambda: tensors if comm.is_main else pytest.fail("only main reads"))
        return {name: (str(tensor.dtype), list(tensor.shape), tensor.tolist()) for name, tensor in read.items()}
    finally:
        comm.destroy_process_group()


def test_tensors_that_the_main_rank_reads_are_the_same_on_all_ranks():
    main, other = run_on_ranks(2, load_tensors_on_main)
    assert list(main) == ["matrix", "scalar", "flags", "empty"] and main == other
    assert other["matrix"] == ("torch.bfloat16", [3, 2], [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
