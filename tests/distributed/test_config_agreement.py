"""Config agreement and rendezvous: ranks that differ, are missing or hang are reported before anything slow."""

import contextlib
import io
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from problem_lines import format_lines
from rank_processes import find_free_port, run_on_ranks
from training_runs import write_images

from library.cache.distributed_encoding import describe_shared_disks
from library.config import parse_config
from library.config.options import flatten_config, iter_options
from library.config.schema import RunConfig
from library.distributed import config_agreement
from library.distributed.config_agreement import RankReport, find_disagreements, format_rank_placement
from library.distributed.process_group import KeyValueStore
from library.distributed.rendezvous import compute_connect_timeout, join_process_group
from library.distributed.world import World
from library.errors import UserError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    dataset = write_images(tmp_path_factory.mktemp("roll_call"), {(64, 64): 4})
    flags = "--pretrained_model_name_or_path random:sd1:tiny --network_dim 2 --max_train_steps 2 --mixed_precision no"
    return ["--dataset_config", str(dataset), *flags.split(), "--max_data_loader_n_workers", "0"]


def run_with_different_ranks(others: dict[int, list[str]], host: str, *words: str) -> tuple[int, str, float]:
    """Run with other flags on some ranks and another hostname on the last; return exit code, stderr and seconds."""
    import socket

    from library.cli import main

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == size - 1:
        os.environ["LOCAL_RANK"] = "0"  # local rank 0
        config_agreement.socket.gethostname = socket.gethostname = lambda: host
    start = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = main([*words, *others.get(rank, [])])
    return code, text.getvalue(), time.monotonic() - start


@pytest.mark.slow
def test_a_finished_lora_on_the_disk_of_the_main_rank_stops_all_ranks(data, tmp_path):
    """Other machines may have other disks: a file there is of no interest, and its absence does not start a rank."""
    folders = [tmp_path / name for name in ("main", "other")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "mine.safetensors").touch()
    others = {rank: ["--output_dir", str(folder)] for rank, folder in enumerate(folders)}

    ends = run_on_ranks(2, run_with_different_ranks, others, "gpu-b", *data, "--output_name", "mine")

    assert [code for code, _, _ in ends] == [2, 2], ends
    assert "mine.safetensors exists, from an earlier run; add --overwrite" in ends[0][1] and ends[1][1] == ""


@pytest.mark.slow
def test_a_different_setting_on_one_rank_stops_all_before_the_model_is_loaded_and_is_reported_once(data, tmp_path):
    others = {2: ["--learning_rate", "2e-4", "--network_dropout", "0.5"]}
    ends = run_on_ranks(
        3, run_with_different_ranks, others, "gpu-b", *data, "--output_dir", str(tmp_path), "--learning_rate", "1e-4"
    )
    assert [code for code, _, _ in ends] == [2, 2, 2], ends
    assert ends[0][1].splitlines()[0] == "train_lora: stopped. 2 problems:"
    assert "  --learning_rate: 0.0002 on rank 2 (on gpu-b), 0.0001 on most others; start all of them" in ends[0][1]
    assert "  --network_dropout: 0.5 on rank 2 (on gpu-b), 0.0 on most others" in ends[0][1]
    assert ends[1][1] == ends[2][1] == "" and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_paths_may_differ_between_ranks_but_not_the_contents(data, tmp_path):
    for name, text in (("one", "a b --d 1\n"), ("other", "a c --d 1\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    prompts = ["--output_dir", str(tmp_path), "--sample_prompts", str(tmp_path / "one.txt")]
    ends = run_on_ranks(
        2, run_with_different_ranks, {1: ["--sample_prompts", str(tmp_path / "other.txt")]}, "gpu-b", *data, *prompts
    )
    assert (
        "prompts: rank 1 (on gpu-b): not the same as on rank 0; use the same --sample_prompts file on every machine"
        in ends[0][1]
    )
    assert [code for code, _, _ in ends] == [2, 2] and not ends[1][1]


@pytest.mark.slow
def test_a_rank_that_cannot_start_reports_its_problem_to_the_others(data, tmp_path):
    others = {1: ["--mixed_precision", "fp16"]}
    ends = run_on_ranks(2, run_with_different_ranks, others, "gpu-b", *data, "--output_dir", str(tmp_path))
    assert [code for code, _, _ in ends] == [2, 2] and not ends[1][1]
    assert "rank 1 (on gpu-b): --mixed_precision fp16: not supported on a CPU" in ends[0][1]


def hang_in_test_all_reduce(data: list[str], folder: str) -> tuple[int, str]:
    """Rank 1 never reaches the test all-reduce."""
    from library.distributed import rendezvous, watchdog

    read, write = os.pipe()
    child = os.fork()
    if child:  # the run is in its own process, because it exits without cleanup
        os.close(write)
        with open(read) as text:
            message = text.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message
    os.dup2(write, 2)
    rendezvous.CONNECT_TIMEOUT_SECONDS, watchdog.REPORTER_GRACE_SECONDS = 1.0, 0.2
    if os.environ["RANK"] == "1":
        rendezvous.measure_all_reduce_seconds = lambda *_: time.sleep(30)
    from library.cli import main

    os._exit(main([*data, "--output_dir", folder]))


@pytest.mark.slow
def test_a_hanging_test_all_reduce_is_aborted_with_suggestions_reported_once(data, tmp_path):
    start = time.monotonic()
    ends = run_on_ranks(2, hang_in_test_all_reduce, data, str(tmp_path))
    assert [code for code, _ in ends] == [2, 2] and time.monotonic() - start < 25
    message = "".join(text for _, text in ends)
    assert message.count("a test all-reduce did not finish within 1 s") == 1, message
    assert "GLOO_SOCKET_IFNAME" in message and "firewall" in message and "Traceback" not in message


def test_the_connect_timeout_grows_with_the_world_size():
    assert compute_connect_timeout(2) == 60 and compute_connect_timeout(512) > 180


def build_reports(*says: dict) -> list[RankReport]:
    return [RankReport("ab"[rank // 2], item) for rank, item in enumerate(says)]


def test_the_majority_is_the_reference_and_rank_0_in_a_tie():
    one, other = {"seed": 1, "code": "x"}, {"seed": None, "code": "y"}
    assert format_lines(find_disagreements(build_reports(one, one, one))) == []
    assert format_lines(find_disagreements(build_reports(other, one, one, one))) == [
        "--seed: not set on rank 0 (on a), 1 on most others; start all of them with the same value",
        "code: rank 0 (on a): not the same as on most others; "
        "install the same version of this program on every machine",
    ]
    assert (
        "not set on ranks 2, 3 (on b), 1 on most"
        in format_lines(find_disagreements(build_reports(one, one, other, other)))[0]
    )
    assert "not set on rank 1 (on a), 1 on rank 0;" in format_lines(find_disagreements(build_reports(one, other)))[0]
    assert format_rank_placement(["a", "a", "b", "b"]) == (
        "4 processes on 2 machines: ranks 0, 1 on a; ranks 2, 3 on b"
    )


def test_missing_ranks_are_reported_after_the_timeout():
    store = dist.HashStore()
    with pytest.raises(Exception, match=r"3 of 4 processes have not connected: ranks 0, 2, 3 within 0 s") as caught:
        config_agreement.exchange_rank_reports(KeyValueStore("x", store), 1, 4, RankReport("a", {}), 0.3)
    assert not caught.value.is_reported


def test_rank_0_opens_the_store_before_the_others_start_and_reports_who_is_missing(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(find_free_port()))
    world = World(world_size=2, rank=0, local_rank=0, local_world_size=2)
    with pytest.raises(UserError, match="1 of 2 processes have not connected: rank 1 within 1 s"):
        join_process_group(world, 1 / 60, RankReport("a", {}))


def test_every_setting_is_compared_except_paths_and_per_machine_options(data, tmp_path):
    config = parse_config([*data, "--output_dir", str(tmp_path)]).config
    settings = config_agreement.collect_agreed_settings(flatten_config(config))
    options = list(iter_options(RunConfig))
    assert (
        set(settings) == {option.name for option in options if not option.is_per_machine} < set(flatten_config(config))
    )
    folders = [option for option in options if option.name.endswith(("_dir", "_path", "_file", "_dirs"))]
    assert len(folders) > 8 and all(option.is_path or option.is_per_machine for option in folders)
    assert settings["output_dir"] is True and settings["sample_prompts"] is False and settings["network_dim"] == 2


def test_the_code_version_depends_on_the_source_but_not_on_line_endings(tmp_path, monkeypatch):
    monkeypatch.setattr(config_agreement, "PACKAGE_DIR", tmp_path)
    source = Path(tmp_path / "a.py")
    source.write_bytes(b"one\ntwo\n")
    before = config_agreement.compute_code_version()
    source.write_bytes(b"one\r\ntwo\r\n")
    assert config_agreement.compute_code_version() == before
    source.write_bytes(b"one\nthree\n")
    assert config_agreement.compute_code_version() != before


def test_a_rank_report_contains_no_paths(data, tmp_path):
    config = parse_config([*data, "--output_dir", str(tmp_path)]).config
    assert str(tmp_path) not in str(
        config_agreement.build_rank_report(flatten_config(config), World(world_size=2)).settings
    )


def test_machines_that_share_a_disk_are_described():
    folders = [Path("/data/a"), Path("/data/b")]
    assert describe_shared_disks([0, 1], ["a", "a"], folders) == describe_shared_disks([0, 1], ["a", "b"], []) == ""
    assert describe_shared_disks([0, 1], ["a", "b"], folders) == (
        "all machines share the disk of /data/a and 1 more: the work is divided among them"
    )
    message = describe_shared_disks([0, 1], ["a", "a", "b"], folders[:1])
    assert message.startswith("/data/a is not shared between a and the other machines: each disk gets a full cache")
