"""Each benchmark runs from end to end on tiny sizes, and its arithmetic is right."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from array import array
from contextlib import redirect_stdout

import numpy as np
import psutil
import pytest
import torch
from original_checkpoints import build_checkpoint
from rank_processes import run_on_ranks
from tiny_pipelines import TINY
from transformers import CLIPTokenizer

from benchmarks import accuracy, data, launches, lora, memory, peers, pipeline, strategies, variants
from benchmarks import compile as compile_benchmark
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.processes import ROOT, run_workers
from benchmarks.report import Measurement, format_json, format_text, measure_interleaved
from benchmarks.step import BareLoop
from benchmarks.synthetic_run import build_run, write_dataset
from library.cli import run_tool
from library.dataloader.batch_plan import Bucket
from library.dataloader.prepare import prepare_data
from library.errors import ConfigError, UserError
from library.estimate.meta_memory_meter import MemoryMeter
from library.models.tokenizers import build_byte_tokenizer
from library.problems import Problem

SMALL = ("--resolution", "64", "--network_dim", "2")


def run_benchmark(*argv):
    """Return the measurements by name."""
    output = io.StringIO()
    with redirect_stdout(output):
        assert main([*argv, "--json"]) == 0
    report = json.loads(output.getvalue()[output.getvalue().index('{\n "command"') :])  # some libraries print to stdout
    assert report["command"] == "python -m benchmarks " + " ".join([*argv, "--json"])
    return {measurement["name"]: measurement for measurement in report["measurements"]}


# command line and report


def test_every_benchmark_is_listed_and_has_help(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in BENCHMARKS)
    for name, (_, description) in BENCHMARKS.items():
        with pytest.raises(SystemExit) as exited:
            main([name, "--help"])
        text = capsys.readouterr().out
        assert exited.value.code == 0 and "--repetitions" in text and description[:40] in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["stap"], "unknown benchmark 'stap'; choose from step, startup"),
        (["step", "--dataset_config", "x"], "--dataset_config: set by the benchmark; remove it"),
        (["step", "--bench_step", "2"], "--bench_step: unknown option"),
        (["memory", "--quantize_base", "int8"], "--quantize_base: set by the benchmark; choose with --switches"),
        (["memory", "--count", "--fsdp"], "--fsdp: this benchmark runs on one device"),
        (["strategies", "--fsdp"], "--fsdp: set by the benchmark; choose with --layouts"),
        (["pipeline"], "--pp_size: a pipeline needs at least 2 stages"),
    ],
)
def test_invalid_options_exit_with_code_2_and_a_message(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_old_command_prints_the_new_one(capsys):
    assert run_tool(["bench", "step"]) == 2
    assert "python -m benchmarks" in capsys.readouterr().err


def test_the_report_has_median_spread_target_and_machine():
    measurements = [
        Measurement("a", [3.0, 1.0, 2.0], "s", 2.5),
        Measurement("b", [1234.0], "MB", 1000.0),
        Measurement("c", [], note="not measured: why"),
    ]
    lines = format_text(["python", "a b"], measurements).splitlines()
    assert lines[0] == "python 'a b'" and lines[1].startswith("machine: ")
    assert [line.split() for line in lines[-3:]] == [
        ["a", "2", "s", "1", "to", "3", "<=", "2.5:", "met"],
        ["b", "1,234", "MB", "<=", "1,000:", "MISSED"],
        ["c", "not", "measured:", "why"],
    ]
    assert json.loads(format_json(["x"], measurements))["measurements"][0]["values"] == [3.0, 1.0, 2.0]


def test_interleaved_variants_alternate():
    calls = []
    seconds = measure_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 3 and {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


# programs that a benchmark starts

SLEEPING_WORKERS = """
import signal, sys
from benchmarks.processes import TORCHRUN, start_python
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told background programs to ignore it
sleep = ["--no-python", sys.executable, "-c", "import time; time.sleep(99)"]
with start_python([*TORCHRUN, "--nproc-per-node=2", *sleep]) as process:
    process.wait()
"""


@pytest.mark.slow
def test_no_worker_outlives_an_interrupted_benchmark():
    benchmark = psutil.Popen([sys.executable, "-c", SLEEPING_WORKERS], stderr=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(children := benchmark.children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    benchmark.send_signal(signal.SIGINT)
    benchmark.wait(60)
    assert len(children) == 3 and not [child for child in children if child.is_running()]


@pytest.mark.programs
@pytest.mark.slow
def test_a_worker_returns_its_result_or_why_options_were_rejected(tmp_path):
    argv = write_dataset(SMALL, tmp_path, 2)
    (result,) = run_workers("benchmarks.variants:measure_steps", {"steps": 1}, argv, 1)
    assert result["images"] == 1 and result["seconds"] > 0 and result["peak"] > 0.1
    with pytest.raises(ConfigError, match="network_dim"):
        run_workers("benchmarks.variants:measure_steps", {"steps": 1}, [*argv, "--network_dim", "0"], 1)


@pytest.mark.programs
@pytest.mark.slow
def test_an_error_of_a_worker_is_reported_with_its_traceback(tmp_path):
    argv = write_dataset(SMALL, tmp_path, 2, world_size=2)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        run_workers("benchmarks.variants:measure_steps", {"steps": 0}, argv, 2)


def test_bytes_sent_are_counted():
    before = variants.count_bytes_sent()
    if before is None:
        pytest.skip("this system does not count them")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        client.sendall(bytes(50_000))
        accepted.sendall(bytes(700))
        with accepted:
            assert variants.count_bytes_sent() - before == 50_700


# step


@pytest.mark.slow
def test_our_step_and_the_bare_step_compute_the_same():
    batch = ("--gradient_accumulation_steps", "2", "--train_batch_size", "3")
    options = ("--bench_steps", "2", "--repetitions", "2", *SMALL, *batch)
    (measurements,) = run_on_ranks(1, run_benchmark, "step", *options)
    ours, bare, ratios = (measurements[name]["values"] for name in ("our step", "bare step", "our step / bare step"))
    assert ratios == [one / other for one, other in zip(ours, bare, strict=True)] and len(ratios) == 2
    assert measurements["our throughput"]["values"] == pytest.approx([6 / seconds for seconds in ours])
    for name in ("loss/current", "gradient_norm"):
        difference = measurements[f"relative difference of {name}"]
        assert difference["median"] < difference["at_most"] and len(difference["values"]) == 2
    assert measurements["peak memory, ours"]["median"] > 0.1


def run_step_with_another_loss():
    original = BareLoop.backward

    def backward(self):
        self.batches = [(predict, target + 0.5) for predict, target in self.batches]
        return original(self)

    BareLoop.backward = backward
    return run_benchmark("step", *SMALL, "--bench_steps", "2", "--repetitions", "1")


@pytest.mark.slow
def test_a_different_loss_is_detected():
    (measurements,) = run_on_ranks(1, run_step_with_another_loss)
    for name in ("loss/current", "gradient_norm"):
        difference = measurements[f"relative difference of {name}"]
        assert difference["median"] > difference["at_most"]


# memory and strategies


def test_variants_take_turns_and_are_compared_to_the_first_one_that_runs(monkeypatch):
    calls = []

    def train(function, options, argv, world_size):
        calls.append(argv[0])
        if argv[0] == "rejected":
            raise ConfigError([Problem("pp_size", "too many", value="4")])
        seconds = {"base": 0.5, "other": 0.25}[argv[0]] * len(calls)
        return [{"seconds": seconds / (rank + 1), "images": 8, "sent": 1.5, "peak": 3 - len(argv)} for rank in range(2)]

    monkeypatch.setattr(variants, "run_workers", train)
    jobs = {"no": ["rejected"], "A": ["base"], "B": ["other", "--more"]}
    measurements = variants.compare_variants(jobs, world_size=2, steps=1, repetitions=2)
    assert calls == ["rejected", "base", "other", "base", "other"]
    values = {measurement.name: measurement.values for measurement in measurements[4:]}
    assert measurements[-1].note == "not measured: --pp_size 4: too many" and measurements[-1].values == []
    assert values["B: step time"] == [0.75, 1.25] and values["B: step time / A"] == [0.75 / 1, 1.25 / 2]
    assert values["B: throughput"] == [8 / 0.75, 8 / 1.25] and values["B: bytes on the wire, all ranks"] == [3, 3]
    assert values["B: peak memory per process"] == [1, 1] and measurements[-2].note == "+1.000 GB saved"


def test_every_layout_trains_as_many_images_in_a_step(monkeypatch):
    jobs = {}
    monkeypatch.setattr(strategies, "compare_variants", lambda variants, **options: jobs.update(variants) or [])
    batch = ("--train_batch_size", "2", "--gradient_accumulation_steps", "3")
    run_benchmark("strategies", "--layouts", "DDP", "PP", "TP", "--world_size", "4", *batch)
    common = jobs["DDP"]
    assert jobs["PP"] == [*common, "--pp_size", "4", "--gradient_accumulation_steps", "12"]
    assert jobs["TP"] == [*common, "--tp_size", "4", "--train_batch_size", "8"]


def test_every_memory_switch_is_compared_to_the_baseline(monkeypatch):
    jobs = {}
    monkeypatch.setattr(memory, "compare_variants", lambda variants, **options: jobs.update(variants) or [])
    run_benchmark("memory", *SMALL)
    assert list(jobs) == list(memory.SWITCHES) and jobs["nf4"] == [*jobs["baseline"], "--quantize_base", "nf4"]
    half, every = (int(jobs[name][-1]) for name in ("swap_half", "swap_all"))
    assert 0 < half < every <= 2 * half + 1


def count_flops_of_a_step(directory):
    argv = write_dataset([*SMALL, "--train_batch_size", "2"], directory, 1)
    with build_run(argv, directory) as run, MemoryMeter(torch.device("cpu")) as meter:
        work = next(run.loader.iter_steps(0))
        run.strategy.compute_gradients(run.task, work.micro_batches, work.num_global_samples, 0)
    return meter.flops


@pytest.mark.slow
def test_counted_flops_are_those_of_a_real_step_and_each_switch_saves_what_it_is_for(tmp_path):
    switches = ("checkpointing", "budget_0.5", "int8")
    measurements = run_benchmark("memory", "--count", "--switches", *switches, *SMALL, "--train_batch_size", "2")
    flops, frozen, activations, peak = (
        {name: measurements[f"{name}: {quantity}"]["median"] for name in ("baseline", *switches)}
        for quantity in ("FLOPs", "frozen weights", "activations", "peak")
    )
    assert run_on_ranks(1, count_flops_of_a_step, tmp_path) == [pytest.approx(1e12 * flops["baseline"])]
    assert flops["checkpointing"] > flops["budget_0.5"] > flops["baseline"] == flops["int8"]
    assert activations["checkpointing"] < activations["budget_0.5"] < activations["baseline"]
    assert frozen["checkpointing"] == frozen["baseline"] > frozen["int8"]
    assert all(peak[name] > frozen[name] + activations[name] for name in flops) and peak["int8"] < peak["baseline"]


@pytest.mark.programs
@pytest.mark.slow
def test_real_workers_send_their_gradients_and_a_rejected_layout_is_reported():
    options = ("--bench_steps", "2", "--repetitions", "1", "--network_dim", "4", "--on_oom", "recover")
    measurements = run_benchmark("strategies", "--layouts", "DDP", "FSDP", "--resolution", "64", *options)
    assert "on_oom" in measurements["FSDP"]["note"]
    sent = measurements["DDP: bytes on the wire, all ranks"]["median"]
    assert 0.09 < sent < 0.3, "rank 4: two processes with 0.09 MB of gradients each"
    assert measurements["DDP: throughput"]["median"] > 0


# launches


def test_kernels_are_counted_once_each_and_views_are_not():
    matrix, adapters = torch.ones(8, 8, device="meta"), [torch.ones(2, 2, device="meta") for _ in range(100)]
    with launches.LaunchCounter() as counter:
        (matrix @ matrix).t().reshape(64).relu_().view(8, 8).sum()
        torch.empty(3, device="meta")
        torch.ones(3).relu()  # on the host
    assert counter.launches == 3 + 1  # matmul, a copy as the transposed matrix is reshaped, relu_, sum
    with launches.LaunchCounter() as counter:
        torch._foreach_mul_(adapters, 2.0)
    assert counter.launches == 1
    assert launches.count_fused_launches([adapters] * 4) == 3  # of 36 tensors each
    assert launches.count_fused_launches([[torch.ones(1, device="meta").expand(65536 * 500)]]) == 2


@pytest.mark.slow
def test_fused_layers_launch_fewer_kernels_and_keep_less_than_those_of_peft_and_of_others():
    measured = run_benchmark("launches", "--tiny", "--models", "flux:1")
    counts, saved = {}, {}
    for layers in launches.LAYERS:
        counts[layers], saved[layers] = (
            measured[f"flux, 64 x 64, batch size 1, {layers}: {what}"]["values"][0]
            for what in ("launches", "saved for backward")
        )
    others = [layers for layers in launches.LAYERS if layers not in launches.REPLACED or layers == "peft's layers"]
    assert counts["fused layers"] < 0.6 * min(counts[layers] for layers in others)
    assert counts["fused layers"] < counts["fused LoRA alone"] < counts["norms alone"] < counts["peft's layers"]
    assert saved["fused layers"] < 0.9 * saved["peft's layers"]
    assert saved["fused layers"] <= saved["norms alone"] < saved["fused LoRA alone"]
    assert counts["peft's layers"] < counts["as diffusers' scripts"] < counts["as sd-scripts"]
    assert counts["fused layers"] < counts["shared casts"] < counts["peft's layers"]
    assert counts["as OneTrainer"] < counts["as sd-scripts"] < counts["as ai-toolkit"]


# accuracy


def assert_errors_are_those_of_half_precision(measured, count):
    assert len(measured) == count
    assert all(0.1 < each["median"] < 20 for each in measured.values()), "percent"
    assert all(each["median"] <= each["at_most"] for each in measured.values() if each["at_most"] is not None)


NORMS = (accuracy.PEFT, accuracy.SHARED_CASTS, accuracy.NORMS)


@pytest.mark.slow
def test_errors_of_norms_and_lora_layers_are_measured_against_float64():
    measured = run_benchmark("accuracy", "--models")
    assert_errors_are_those_of_half_precision(measured, 5 * 2 * 3 + 4 * 2)
    output, gradient = (
        [measured[f"LayerNorm and three readers: {part}, {kind}"]["median"] for kind in NORMS]
        for part in ("output", "gradient of the input")
    )
    assert len(set(output)) == 1, "each reader gets the same values"
    assert gradient[0] < gradient[1], "gradients of the readers are added in half precision"


@pytest.mark.slow
def test_errors_of_a_step_are_measured_against_float64():
    measured = run_benchmark("accuracy", "--models", "sd1", "--repetitions", "1")
    assert_errors_are_those_of_half_precision(measured, 5 * 2 * 3 + 4 * 2 + 3 * 5)


# data


@pytest.mark.slow
def test_scan_and_plan_are_measured_and_leave_no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = ("--parts", "scan", "plan", "--images", "100", "--entries", "1000", "--repetitions", "2")
    measurements = run_benchmark("data", *options)
    assert list(tmp_path.iterdir()) == []
    for name in ("cold", "warm", "warm, one image changed"):
        assert len(measurements[f"scan of 100 images, {name}"]["values"]) == 2
    assert measurements["memory of the prepared dataset"]["median"] > 100
    assert measurements["plan of 1,000 samples for 64 ranks: first batch"]["median"] > 0
    assert not any(measurement["at_most"] for name, measurement in measurements.items() if name.startswith("scan"))


def test_scanned_images_are_distinct_and_have_many_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SETTLE_SECONDS", 0.0)
    configs = []
    monkeypatch.setattr(data, "prepare_data", lambda config, step: configs.append(config) or prepare_data(config, step))
    list(data.measure_scan(tmp_path / "scan", 60, 1))
    samples = prepare_data(configs[0], 8).manifest.samples
    assert len({sample.content_hash for sample in samples}) == len({sample.caption for sample in samples}) == 60
    assert len({sample.size for sample in samples}) > 10


def test_every_sample_is_counted_once_in_an_epoch_of_the_plan():
    count = 3 * data.BATCH * data.RANKS
    bucket = Bucket((64, 64), array("q", range(count)), array("q", [1] * count), data.BATCH)
    assert data.count_epoch(data.plan_first_batch([bucket])) == count
    assert sum(len(bucket.sample_indices) for bucket in data.draw_buckets(count)) == count


@pytest.mark.slow
def test_cached_latents_are_compared_to_npz_files():
    (measurements,) = run_on_ranks(1, run_benchmark, "data", "--parts", "cache", "--cached_images", "8", *SMALL)
    names = [name for name in measurements if " / " not in name]
    formats = ["cache, read only", "cache, whole loader", "npz", "compressed npz"]
    assert [name.partition(": ")[2] for name in names] == formats
    assert all(len(measurements[name]["values"]) == 3 for name in names)


def test_npz_files_hold_latents_and_their_mirror_image(tmp_path):
    latents = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    files = data.write_npz(tmp_path / "npz", np.savez, latents, 2)
    batch = data.read_npz(files)
    assert batch[0].tolist() == latents.tolist() and batch[1].tolist() == latents[..., ::-1].tolist()


# pipeline, compile, saves, startup


@pytest.mark.parametrize(
    ("arguments", "expected"), [((2, 4, "gpipe"), 0.2), ((4, 16, "1f1b"), 3 / 19), ((2, 4, "interleaved"), 1 / 9)]
)
def test_the_expected_bubble_fraction(arguments, expected):
    assert pipeline.compute_bubble(*arguments) == pytest.approx(expected)


def test_the_idle_fraction_is_that_of_gpipe_with_two_stages_and_two_micro_batches():
    first = [(0, 1), (1, 2), (4, 5), (5, 6)]
    second = [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert pipeline.compute_idle_fraction([first, second]) == pytest.approx(1 / 3)


@pytest.mark.programs
@pytest.mark.slow
def test_bubbles_are_measured_in_each_step():
    options = ("--pp_size", "2", "--micro_batches", "2", "--simulate_ms", "50", *SMALL)
    measurement = run_benchmark("pipeline", *options)["2 micro-batches: bubble fraction"]
    assert measurement["note"] == "formula: 33.3 %" and len(measurement["values"]) == 3
    assert all(25 < value < 60 for value in measurement["values"])


def test_image_sizes_are_distinct_and_begin_with_the_square():
    sizes = compile_benchmark.choose_sizes(96, 24)
    assert sizes[0] == (96, 96) and len(set(sizes)) == 24 and all(side % 16 == 0 for size in sizes for side in size)


@pytest.mark.programs
@pytest.mark.slow
def test_compiling_is_measured_with_a_cold_and_a_warm_cache():
    options = ("--sizes", "1", "--modes", "dynamic", "--backend", "eager", "--bench_steps", "11", *SMALL)
    measurements = run_benchmark("compile", *options)
    for cache in ("cold", "warm"):
        assert measurements[f"1 sizes, dynamic, {cache} cache: to the first step"]["median"] > 1
        assert measurements[f"1 sizes, dynamic, {cache} cache: compile time"]["note"] == "2 graphs"
    assert measurements["1 sizes, dynamic, cold cache: step time"]["median"] > 0


@pytest.mark.slow
def test_save_times_are_measured():
    options = ("--bench_steps", "12", "--save_interval", "4", *SMALL)
    (measurements,) = run_on_ranks(1, run_benchmark, "saves", *options)
    for kind in ("LoRA file", "checkpoint"):
        assert measurements[f"training blocked by one {kind}"]["median"] > 0
        assert 0 < measurements[f"share of the run blocked by all {kind}s"]["median"] < 100


@pytest.mark.programs
@pytest.mark.slow
def test_both_programs_reach_their_first_step():
    measurements = run_benchmark("startup", "--repetitions", "1", *SMALL)
    ours, bare = measurements["our first step after"]["median"], measurements["bare first step after"]["median"]
    assert measurements["ours / bare"]["median"] == pytest.approx(ours / bare) and min(ours, bare) > 0.5


# beside sd-scripts

OTHER_TRAINER = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--max_train_steps", type=int)
for name in ("pretrained_model_name_or_path", "dataset_config", "tokenizer_cache_dir"):
    parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
options, others = parser.parse_known_args()
folder = pathlib.Path(__file__).parent
json.loads((options.pretrained_model_name_or_path / "unet" / "config.json").read_text())
assert options.dataset_config.is_file() and "networks.lora" in others
for name in ("vocab.json", "merges.txt"):  # all that transformers 4 reads
    assert (options.tokenizer_cache_dir / "openai_clip-vit-large-patch14" / name).is_file()
with (folder / "runs").open("a") as runs:
    runs.write(f"{options.max_train_steps} ")
sum(number * number for number in range(10**6 * options.max_train_steps))
"""


@pytest.mark.slow
@pytest.mark.programs
def test_both_trainers_get_the_same_work_in_turn(tmp_path):
    (tmp_path / "train_network.py").write_text(OTHER_TRAINER)
    flags = ("--sd_scripts", str(tmp_path), "--bench_steps", "3", "--repetitions", "1", *SMALL)
    measured = run_benchmark("peers", *flags, "--pretrained_model_name_or_path", "random:sd1:tiny")
    assert (tmp_path / "runs").read_text().split() == ["2", "2", "5"]  # for warmup, the start, and some steps more
    assert all(measured[f"{name}: step"]["values"] for name in ("ours", "sd-scripts"))
    assert measured["step, ours / sd-scripts, processor s"]["at_most"] == 1.0


def test_the_tokenizer_of_sd_scripts_can_be_read_from_its_vocabulary_and_merges_alone(tmp_path):
    tokenizer = build_byte_tokenizer(CLIPTokenizer, {})
    peers.save_clip_tokenizer(tokenizer, tmp_path / "saved")
    (tmp_path / "old").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tmp_path / "saved" / name, tmp_path / "old")
    old = CLIPTokenizer.from_pretrained(tmp_path / "old")
    assert old.get_vocab() == tokenizer.get_vocab()
    assert old("a lorikeet, two")["input_ids"] == tokenizer("a lorikeet, two")["input_ids"]


OTHER_SCRIPT = """
import argparse, pathlib, sys
from PIL import Image
from diffusers import DiffusionPipeline
parser = argparse.ArgumentParser()
for name in ("pretrained_model_name_or_path", "instance_data_dir", "instance_prompt", "output_dir", "mixed_precision"):
    parser.add_argument("--" + name, required=True)
for name in ("rank", "lora_alpha", "resolution", "train_batch_size", "seed", "max_train_steps", "lr_warmup_steps"):
    parser.add_argument("--" + name, type=int)
parser.add_argument("--lora_layers")
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--cache_latents", action="store_true")
options = parser.parse_args()
pipe = DiffusionPipeline.from_pretrained(options.pretrained_model_name_or_path)
sizes = [Image.open(path).size for path in pathlib.Path(options.instance_data_dir).iterdir()]
assert sizes and set(sizes) == {(options.resolution, options.resolution)}
with pathlib.Path(__file__).with_name("runs").open("a") as runs:
    runs.write(f"{type(pipe).__name__} {options.max_train_steps} {options.rank} {options.lora_layers is not None}\\n")
sum(number * number for number in range(10**6 * options.max_train_steps))
"""


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize(
    ("family", "pipeline"), [("sdxl", "StableDiffusionXLPipeline False"), ("flux", "FluxPipeline True")]
)
def test_diffusers_scripts_get_the_same_work_in_turn(family, pipeline, tmp_path):
    folder = tmp_path / "examples" / "dreambooth"
    folder.mkdir(parents=True)
    (folder / f"train_dreambooth_lora_{family}.py").write_text(OTHER_SCRIPT)
    model = ("--pretrained_model_name_or_path", f"random:{family}:tiny", "--network_dim", "3")
    flags = ("--diffusers", str(tmp_path), "--bench_steps", "3", "--repetitions", "1", *SMALL)
    measured = run_benchmark("peers", *flags, *model)
    name, has_layers = pipeline.split()
    assert (folder / "runs").read_text().splitlines() == [f"{name} {steps} 3 {has_layers}" for steps in (2, 2, 5)]
    assert all(measured[f"{name}: step"]["values"] for name in ("ours", "diffusers"))


def test_a_folder_without_the_other_trainer_is_refused(tmp_path, capsys):
    assert main(["peers", "--sd_scripts", str(tmp_path)]) == 2
    assert "has no train_network.py; give the folder of a checkout" in capsys.readouterr().err
    assert main(["peers", "--diffusers", str(tmp_path), "--pretrained_model_name_or_path", "random:sdxl:tiny"]) == 2
    assert "has no train_dreambooth_lora_sdxl.py; give the folder of a checkout" in capsys.readouterr().err
    assert main(["peers", "--sd_scripts", str(tmp_path), "--pretrained_model_name_or_path", "random:sdxl:tiny"]) == 2
    assert "SDXL and FLUX.1 beside diffusers (--diffusers)" in capsys.readouterr().err


def test_the_memory_of_the_gpu_is_asked_for_while_a_program_runs(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 1024\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    usage = peers.measure_usage("other", [sys.executable, "-c", "import time; time.sleep(1)"], 1, tmp_path)
    assert usage.device_memory == 2**30


# LoRA tools and the web page


@pytest.mark.programs
@pytest.mark.slow
def test_the_lora_tools_are_exact_on_a_family_that_shares_its_layer_names_with_another(tmp_path):
    lora.write_model_and_loras("random:chroma:tiny", torch.float32, tmp_path, is_file=False)
    for words in lora.list_commands(tmp_path, "").values():
        assert run_tool(["lora", *words]) == 0
    errors = {each.name.partition(": ")[2]: each.median for each in lora.measure_errors("chroma", tmp_path, "")}
    assert errors["error of the sum"] < 1e-6 and errors["error of the model"] < 1e-4
    assert errors["error of the extracted LoRA"] < 1e-3 < errors["error of rank 4"] < 1


@pytest.mark.programs
@pytest.mark.slow
def test_the_page_is_used_in_a_browser():
    """Every measurement waits for what a person would see: pictures at each place, all runs, complete curves."""
    pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))):
        pytest.skip("no browser: apt install chromium")
    measured = run_benchmark("web", "--pictures", "1500", "--runs", "3", "--lines", "3000")
    assert len(measured["pictures: after a jump"]["values"]) == 4
    assert 0 < measured["pictures: cells in the page"]["median"] <= 200
    assert measured["long run: size of an answer"]["median"] < 1


def test_a_single_file_of_the_lora_benchmark_has_the_keys_of_the_original_code():
    """All of them, which the conversion of the tests writes by other rules, and which diffusers loads."""
    pipe = TINY["sd1"]().pipe
    expected = build_checkpoint("sd1", pipe)
    found = lora.collect_original_tensors(pipe)

    names = {key for key in expected if not key.startswith(("model_ema.", "alphas_cumprod"))}
    assert found.keys() == names
    assert all(torch.equal(found[key], expected[key]) for key in names)


@pytest.mark.slow
def test_many_clips_are_planned_cached_and_read():
    found = run_benchmark("clips", "--clips", "12", "--cached_clips", "4", "--windows", "2", "--repetitions", "1")
    values = {name: each["median"] for name, each in found.items()}
    first, later = (values[f"plan of 12 clips, {when}: processor time"] for when in ("first", "later"))
    assert first > 0 and later > 0 and values["peak memory"] > 50
    moments = 2 * 4 * 5 * 8 * 8 * 4  # of 17 frames of 64 x 64 pixels, in four channels of a tiny Wan
    assert moments < 1e6 * values["cache on disk"] < 2 * moments
    one, both = (values[f"window of 832x480x81, {each}: size"] for each in ("musubi-tuner's files", "cache"))
    assert one == pytest.approx(16 * 21 * 60 * 104 * 2 / 1e6, rel=0.01) and both == pytest.approx(2 * one, rel=0.01)
