"""Loader workers do not change batches, persist across epochs, and their shutdown or death is handled."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.batch import PixelBatch
from library.dataloader.batch_plan import BatchPlan, Bucket
from library.dataloader.loader import ImageLoader, MicroBatchDataset
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataloader.worker_pool import PrefetchIterator, _format_worker_death, _ignore_signals
from library.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
PLAN = BatchPlan([Bucket((8, 8), [0, 1], [1, 1], 2)], 1, 1, 0)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a").mkdir()
    for number, size in enumerate([(96, 64), (64, 96), (80, 80), (70, 70), (100, 64), (64, 64), (64, 64)]):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 4), np.uint8)
        Image.fromarray(pixels, "RGBA").save(folder / "a" / f"{number}.png")
        (folder / "a" / f"{number}.txt").write_text(f"number {number}, b, c, d, e, f")
    (folder / "set.toml").write_text(
        "[[datasets]]\nresolution = 64\nbatch_size = 2\nenable_bucket = true\nmin_bucket_reso = 32\n"
        f"bucket_reso_steps = 16\n[[datasets.subsets]]\nimage_dir = '{folder}/a'\nnum_repeats = 3\nrandom_crop = true\n"
        "flip_aug = true\ncolor_aug = true\nalpha_mask = true\nshuffle_caption = true\ncaption_extension = '.txt'\n"
    )
    return folder


@pytest.fixture(scope="module")
def prepared(folder) -> PreparedData:
    return prepare_data(DataConfig(dataset_config=str(folder / "set.toml")), 8)


def by_place(prepared: PreparedData, ranks: int, batch_size: int, steps: int, **loading) -> list[dict]:
    """The samples of each step over all ranks, by global position."""
    buckets = [
        Bucket(bucket.resolution, bucket.sample_indices, bucket.repeats, batch_size) for bucket in prepared.buckets
    ]
    plan = BatchPlan(buckets, ranks, 1, 5)
    actual: list[dict] = [{} for _ in range(steps)]
    for rank in range(ranks):
        reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, rank, 5, 100)
        works = ImageLoader(reader, plan, **loading).iter_steps(0)
        for step, work in enumerate(itertools.islice(works, steps)):
            for batch in work.micro_batches:
                for row, place in enumerate(batch.global_positions):
                    mask = b"" if batch.mask is None else batch.mask[row].numpy().tobytes()
                    actual[step][place] = (
                        batch.sample_keys[row],
                        batch.captions[row],
                        batch.loss_weights[row].item(),
                        batch.size_conditioning[row].tolist(),
                        batch.pixels[row].numpy().tobytes(),
                        mask,
                        work.num_global_samples,
                    )
        works.close()
    return actual


@pytest.fixture(scope="module")
def reference(prepared) -> list[dict]:
    return by_place(prepared, 1, 4, 8, num_workers=0)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (1, 5), (3, 1)])
def test_batches_do_not_depend_on_workers_or_prefetch_factor(prepared, reference, workers, prefetch):
    assert by_place(prepared, 1, 4, 8, num_workers=workers, prefetch_factor=prefetch) == reference


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 1), (4, 0)])
def test_the_ranks_together_get_the_samples_of_a_single_rank(prepared, reference, ranks, workers):
    def without_absent_masks(step: dict) -> dict:
        """A share of a batch without any mask has none, where the whole batch has one that is white."""
        white = {place: b"\xff" * (len(row[4]) // 3) for place, row in step.items()}
        return {place: (*row[:5], row[5] or white[place], row[6]) for place, row in step.items()}

    actual = by_place(prepared, ranks, 4 // ranks, 8, num_workers=workers)
    assert [without_absent_masks(step) for step in actual] == [without_absent_masks(step) for step in reference]


class Numbered(Dataset):
    """A loader whose batches contain the worker's process id."""

    def __getitem__(self, position: int) -> PixelBatch:
        self.before(position)
        pixels = torch.full((1, 3, 8, 8), position % 256, dtype=torch.uint8)
        return PixelBatch(pixels, (str(os.getpid()),), torch.zeros(1, 6), torch.ones(1), (0,), (str(position),))

    def before(self, position: int) -> None:
        pass


def test_workers_persist_across_epochs():
    steps = ImageLoader(Numbered(), PLAN, num_workers=2).iter_steps(0)
    batches = [next(steps).micro_batches[0] for _ in range(40)]  # one step per epoch
    assert PLAN.get_epoch(39) == 39
    steps.close()
    assert [batch.sample_keys[0] for batch in batches] == [str(position) for position in range(40)]
    pids = [batch.captions[0] for batch in batches]
    assert len(set(pids)) == 2 and set(pids[:4]) == set(pids[-4:]) and str(os.getpid()) not in pids


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_closing_the_loader_ends_workers_and_restores_sigchld():
    before = signal.getsignal(signal.SIGCHLD)
    steps = ImageLoader(Numbered(), PLAN, num_workers=3).iter_steps(0)
    pids = {int(next(steps).micro_batches[0].captions[0]) for _ in range(9)}
    assert len(pids) == 3 and all(map(is_running, pids)) and signal.getsignal(signal.SIGCHLD) == before
    steps.close()
    assert not any(map(is_running, pids)) and nobody_is_left()


class Deadly(Numbered):
    """Kill the worker that reads position 12; 3 workers prefetch 4 batches."""

    def __init__(self, number: int):
        self.number = number

    def before(self, position: int) -> None:
        if position == 12:
            os.kill(os.getpid(), self.number)
            time.sleep(60)


def test_a_killed_worker_is_reported_when_its_batch_is_requested():
    steps = ImageLoader(Deadly(signal.SIGKILL), PLAN, num_workers=3, prefetch_factor=4).iter_steps(0)
    next(steps)
    deadline = time.monotonic() + 30
    while len(multiprocessing.active_children()) == 3 and time.monotonic() < deadline:
        time.sleep(0.05)  # torch's SIGCHLD handler would raise here
    assert len(multiprocessing.active_children()) == 2
    with pytest.raises(UserError, match=r"^DataLoader worker \(pid \d+\) was killed, probably because"):
        for _ in range(20):
            next(steps)
    assert nobody_is_left()


class Closing:
    """A worker whose pipes are closed, but whose exit is not known yet."""

    def __init__(self):
        self.sentinel, other = os.pipe()
        os.close(other)
        self.exitcode = None

    def join(self, seconds: float) -> None:
        self.exitcode = -signal.SIGKILL


def test_a_worker_death_is_noticed_even_after_its_pipes_were_closed():
    ahead, worker = PrefetchIterator.__new__(PrefetchIterator), Closing()
    ahead.workers, ahead.is_shut_down = [worker], True
    assert ahead._find_dead_workers() == [worker]
    os.close(worker.sentinel)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            -signal.SIGKILL,
            " was killed, probably because the system ran out of memory; lower X, or give the job more",
        ),
        (-signal.SIGBUS, ": no shared memory left; give the container more (docker run --shm-size 8g"),
        (
            -signal.SIGSEGV,
            " died of SIGSEGV; --max_data_loader_n_workers 0 loads images in the main process and shows where",
        ),
        (3, " exited with code 3; --max_data_loader_n_workers 0 loads images in the main process and shows"),
    ],
)
def test_the_suggested_fix_depends_on_the_exit_code(code, message):
    assert _format_worker_death(77, code, "X").startswith(f"DataLoader worker (pid 77){message}")


class Faulty(Numbered):
    def before(self, position: int) -> None:
        if position == 3:
            raise KeyError("a mistake of ours")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_internal_error_in_a_worker_is_not_a_user_error(workers):
    steps = ImageLoader(Faulty(), PLAN, num_workers=workers).iter_steps(0)
    with pytest.raises(KeyError, match="a mistake of ours"):
        for _ in range(5):
            next(steps)
    assert nobody_is_left()


def nobody_is_left() -> bool:
    """Two threads that check one dead child at once may both see it alive for a moment."""
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not multiprocessing.active_children()


class WithoutMemory(Numbered):
    """A file size limit makes shared memory fail as if it was full."""

    def before(self, position: int) -> None:
        if position == 3:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


def test_full_shared_memory_is_reported_without_hanging():
    steps = ImageLoader(WithoutMemory(), PLAN, num_workers=1).iter_steps(0)
    with pytest.raises(UserError, match=r"^no shared memory left for prefetched images; give the container"):
        for _ in range(5):
            next(steps)
    assert nobody_is_left()


class Stuck(Numbered):
    """Block as on a disk that does not respond."""

    def before(self, position: int) -> None:
        if position == 3:
            time.sleep(600)


def test_hanging_workers_are_abandoned_after_a_timeout(monkeypatch):
    monkeypatch.setattr("library.dataloader.worker_pool.SHUTDOWN_TIMEOUT_SECONDS", 0.5)
    items: PrefetchIterator = PrefetchIterator(Stuck(), 0, num_workers=2, prefetch_factor=2, pin_memory=False)
    assert [next(items).sample_keys[0] for _ in range(3)] == ["0", "1", "2"]
    items.shutdown()
    assert nobody_is_left()
    items.shutdown()  # a second time, as the interpreter does at exit


def test_workers_are_shut_down_when_no_thread_can_be_started(monkeypatch):
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    items: PrefetchIterator = PrefetchIterator(Numbered(), 0, num_workers=2, prefetch_factor=2, pin_memory=False)
    next(items)
    monkeypatch.setattr(threading.Thread, "start", start)
    items.shutdown()
    assert nobody_is_left()


def test_workers_ignore_signals_for_the_main_process():
    child = os.fork()
    if child == 0:
        _ignore_signals(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_there_are_at_most_as_many_workers_as_usable_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5, 7})
    assert [ImageLoader(Numbered(), PLAN, num_workers=workers).num_workers for workers in (0, 2, 8)] == [0, 2, 3]


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from library.config.schema_data import DataConfig; from library.config.schema import TrainConfig
from library.dataloader.loader import ImageLoader, MicroBatchDataset
from library.dataloader.prepare import prepare_data

if __name__ == "__main__":
    prepared = prepare_data(DataConfig(dataset_config={config!r}), 8)
    plan = prepared.build_batch_plan(1, TrainConfig())
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 5, 100)
    steps = ImageLoader(reader, plan, num_workers=1, multiprocessing_context={method!r}).iter_steps(0)
    first = [next(steps) for _ in range(3)]
    {then}
"""


def script(folder: Path, method: str, then: str) -> subprocess.CompletedProcess:
    path = folder / f"{method}.py"
    path.write_text(SCRIPT.format(root=str(ROOT), config=str(folder / "set.toml"), method=method, then=then))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_spawned_workers_read_the_same_batches(folder, prepared):
    """Workers are spawned, as on Windows and macOS."""
    result = script(
        folder,
        "spawn",
        "batches = [work.micro_batches[0] for work in first]\n"
        "    print([(batch.captions, batch.pixels.sum().item()) for batch in batches]); steps.close()",
    )
    plan = prepared.build_batch_plan(1, TrainConfig())
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 5, 100)
    assert result.stdout.strip() == str([(reader[n].captions, reader[n].pixels.sum().item()) for n in range(3)])
    assert result.returncode == 0 and result.stderr == ""


@pytest.mark.slow
def test_a_crashing_program_with_workers_exits(folder):
    """An uncaught exception keeps the iterator alive until the interpreter exits."""
    result = script(folder, "fork", "raise RuntimeError('the end')")
    assert result.returncode == 1 and result.stderr.endswith("RuntimeError: the end\n")
