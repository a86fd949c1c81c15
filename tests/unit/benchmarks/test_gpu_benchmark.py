"""The GPU benchmark on tiny models, and with what a GPU would do in place of the device."""

import json
import time
import warnings
import weakref
from argparse import Namespace
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_on_ranks
from torch._C._autograd import DeviceType
from torch.distributed.pipelining import schedules

from benchmarks import compile as compile_benchmark
from benchmarks.__main__ import main
from benchmarks.gpu import correctness, faults, host_staging, memory, program, training_speed
from benchmarks.gpu.sections import OPEN_SECTIONS, SECTIONS, Section, SectionContext, format_failure
from benchmarks.gpu.training_commands import TrainingCommand, compare_weights, run_commands
from benchmarks.gpu.training_speed import EagerSteps, format_longest_kernels
from benchmarks.synthetic_run import build_run, write_dataset
from library.distributed.step_phases import OutOfMemory
from library.errors import ConfigError
from library.problems import Problem
from library.training import loop

TINY = ("--pretrained_model_name_or_path", "random:sd1:tiny", "--resolution", "64", "--network_dim", "2")

# which sections run


def test_the_list_of_gpu_sections_adds_up_to_calls_within_the_limit(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["gpu", "--list", "--sections", "all", "--output", str(tmp_path / "results.json")])
    lines = capsys.readouterr().out.splitlines()
    seconds = Counter()
    for line in lines[:-1]:
        seconds[line.split()[1]] += int(line.split()[2])
    assert stop.value.code == 0 and len(lines) == len(SECTIONS) + 1
    assert list(seconds) == sorted(seconds) and all(total <= 9 * 60 for total in seconds.values())


def test_what_runs_by_default_takes_a_quarter_of_an_hour_with_the_start_of_the_machine(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["gpu", "--list", "--minutes", "14", "--output", str(tmp_path / "results.json")])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines] == [section.name for section in OPEN_SECTIONS]
    assert last == "1 calls of at most 14 minutes"
    assert {"graphs_sdxl", "block_swap", "flux_cards", "qwen_cards", "matmul_flux", "peers_sdxl"} <= {
        *program.OPEN_NAMES
    }


def test_a_peers_section_that_lacked_its_folder_is_still_to_be_run(tmp_path, capsys):
    unmeasured = {"name": "random:flux beside diffusers", "values": [], "note": "not run: give --diffusers"}
    measured = {"name": "bf16 matmul", "values": [1.0]}
    sections = {
        "device": {"status": "done", "measurements": [measured, unmeasured]},
        "peers_flux": {"status": "done", "measurements": [unmeasured]},
    }
    output = tmp_path / "results.json"
    output.write_text(json.dumps({"sections": sections}))
    with pytest.raises(SystemExit):
        main(["gpu", "--list", "--output", str(output), "--sections", *sections])
    listed = capsys.readouterr().out
    assert "peers_flux" in listed and "device" not in listed


@pytest.mark.programs
@pytest.mark.slow
def test_gpu_sections_run_on_a_cpu_and_a_later_call_goes_on(tmp_path, capsys):
    output = tmp_path / "results.json"
    argv = ["gpu", "--output", str(output), "--sections", "device", "sync", "peers"]
    assert main([*argv, "--minutes", "0.45"]) == 0  # no time for any but the first
    first = json.loads(output.read_text())["sections"]
    assert first["sync"]["status"] == first["peers"]["status"] == "not run: no time left"
    assert main(argv) == 0
    second = json.loads(output.read_text())["sections"]
    assert second["device"] == first["device"] and {each["status"] for each in second.values()} == {"done"}
    assert second["sync"]["measurements"][0]["note"] == "not run: no device"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*argv, "--table"])
    table = capsys.readouterr().out
    assert "| device, tiny models | bf16 matmul |" in table and "not run: no device" in table


@pytest.mark.slow
def test_a_section_that_fails_or_takes_too_long_keeps_what_it_had_measured(tmp_path):
    peer_options = {"sd_scripts": None, "sd_scripts_python": "", "diffusers": None, "diffusers_python": ""}
    options = Namespace(tiny=True, **peer_options)
    failing = Section("failing", "sections:missing", 5, "")
    result = program._run_section(failing, options, tmp_path / "failing", 60)
    assert result["status"] == "failed with exit code 1" and "has no attribute 'missing'" in result["log"]
    slow = Section("slow", "faults:provoke_faults", 5, "")
    assert program._run_section(slow, options, tmp_path / "slow", 0.5)["status"] == "stopped at its limit of 0 s"


def test_weights_of_runs_are_compared_by_tensor():
    expected = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])}
    assert compare_weights({name: weight.clone() for name, weight in expected.items()}, expected) == (0, 0.0)
    assert compare_weights({**expected, "a": torch.tensor([1.0, 1.5])}, expected) == (1, 0.25)
    with pytest.raises(ValueError, match="different tensors"):
        compare_weights({"a": expected["a"]}, expected)


MEASURED = {"name": "step", "values": [1.0]}


def list_sections(capsys, output, **saved):
    output.write_text(json.dumps({"sections": saved}))
    with pytest.raises(SystemExit):
        main(["gpu", "--list", "--output", str(output), "--sections", "golden", "resume", "sync"])
    return [line.split()[4] for line in capsys.readouterr().out.splitlines()[:-1]]


def test_sections_that_were_never_begun_are_run_before_those_that_failed(tmp_path, capsys):
    failed = {"status": "stopped at its limit of 75 s", "measurements": [MEASURED]}
    untried = {"status": "not run: no time left", "measurements": []}
    assert list_sections(capsys, tmp_path / "results.json", golden=failed, resume=untried) == [
        "resume", "sync", "golden",
    ]  # fmt: skip


def run_sections(monkeypatch, output, results, *argv):
    """Run sections that end at once with ``results``, and write into their folder; return the names of the begun."""
    begun = []

    def run_section(section, options, directory, seconds):
        directory.mkdir()
        assert not [folder for folder in directory.parent.iterdir() if folder != directory]
        begun.append((section.name, seconds))
        return {"seconds": 1.0, "tiny": True, "status": "done", "measurements": [MEASURED], **results}

    monkeypatch.setattr(program, "_run_section", run_section)
    assert main(["gpu", "--output", str(output), *argv]) == 0
    return begun


def test_a_section_is_begun_only_with_the_time_that_it_is_expected_to_take(tmp_path, monkeypatch):
    (expected,) = (section.seconds for section in SECTIONS if section.name == "golden")
    argv = ("--sections", "golden", "--minutes")
    too_few, enough = (str((expected + spare) / 60) for spare in (1, 7))  # 5 s are spare
    assert run_sections(monkeypatch, tmp_path / "results.json", {}, *argv, too_few) == []
    ((name, seconds),) = run_sections(monkeypatch, tmp_path / "results.json", {}, *argv, enough)
    assert name == "golden" and expected <= seconds <= expected + 2


def test_no_section_leaves_its_files_to_the_next(tmp_path, monkeypatch):
    begun = run_sections(monkeypatch, tmp_path / "results.json", {}, "--sections", "device", "golden")
    assert [name for name, _ in begun] == ["device", "golden"]


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({"status": "stopped at its limit of 9 s"}, True),
        ({"status": "failed with exit code 1", "measurements": []}, True),
        ({"status": "stopped at its limit of 9 s", "measurements": [MEASURED] * 3}, False),
        ({"status": "stopped at its limit of 9 s", "tiny": False}, False),
        ({}, False),
    ],
)
def test_a_section_that_did_not_end_replaces_no_result_with_more_measurements(changes, is_kept, tmp_path, monkeypatch):
    output = tmp_path / "results.json"
    before = {"status": "stopped at its limit of 75 s", "tiny": True, "measurements": [MEASURED, MEASURED]}
    output.write_text(json.dumps({"sections": {"golden": before}}))
    assert len(run_sections(monkeypatch, output, changes, "--sections", "golden")) == 1
    assert (json.loads(output.read_text())["sections"]["golden"] == before) == is_kept


# what is not measured


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_the_note_of_one_variant(tmp_path, monkeypatch):
    def measure(argv, folder, turn):
        if "cudnn" in argv:
            raise OutOfMemory("forward", None, "CUDA out of memory. Tried to allocate 2 GiB")
        return 0.5, 1.0

    monkeypatch.setattr(training_speed, "measure_run", measure)
    measured = {
        each.name: each for each in training_speed.compare_variants(SectionContext("cpu", True, tmp_path, TINY))
    }
    assert measured["cudnn: step"].note.startswith("does not fit: out of memory in forward: CUDA out of memory")
    assert measured["cudnn: step"].values == [] and measured["deterministic: step"].values == [0.5]


def test_why_something_was_not_measured_is_one_line():
    assert format_failure(RuntimeError("no kernel\nmore")) == "not measured: no kernel"
    assert format_failure(torch.OutOfMemoryError("CUDA out of memory")) == "does not fit: CUDA out of memory"
    assert format_failure(RuntimeError()) == "not measured: RuntimeError"


def measure_model_with(monkeypatch, directory, options, compiled):
    eager = EagerSteps([0.5, 0.25, 0.5], [0.5] * 3, [1.0], 4, 2e12, 0.005, "longest: x 9 %")
    monkeypatch.setattr(training_speed, "measure_eager_steps", lambda *_: eager)
    monkeypatch.setattr(training_speed, "measure_matmul_speed", lambda *_: 1e13)
    monkeypatch.setattr(training_speed, "measure_compiled_steps", compiled)
    return {each.name: each for each in training_speed.measure_model(SectionContext("cpu", False, directory, options))}


def test_steps_are_reported_where_the_compiled_model_does_not_fit(tmp_path, monkeypatch):
    def fail(*_):
        raise OutOfMemory("backward")

    measured = measure_model_with(monkeypatch, tmp_path, ("--pretrained_model_name_or_path", "random:flux"), fail)
    assert measured["MFU"].median == 0.4 and measured["step"].median == 0.5
    assert measured["share of a step that waits for data"].values == [0.01]
    assert "out of memory in backward" in measured["compiled: step"].note


def test_only_flux_without_checkpointing_has_a_target_of_mfu(tmp_path, monkeypatch):
    """With checkpointing the operations that are counted have the repeated ones among them."""
    limits = {}
    for number, options in enumerate((["flux"], ["sdxl"], ["flux", "--gradient_checkpointing"])):
        argv = ("--pretrained_model_name_or_path", f"random:{options[0]}", *options[1:])
        (folder := tmp_path / str(number)).mkdir()
        measured = measure_model_with(monkeypatch, folder, argv, lambda *_: ([0.25], 9.0, ""))
        (name,) = (name for name in measured if name.startswith("compiled: ") and "FU" in name)
        limits[" ".join(options)] = name, measured[name].at_least
    assert limits == {
        "flux": ("compiled: MFU", 0.45),
        "sdxl": ("compiled: MFU", None),
        "flux --gradient_checkpointing": ("compiled: HFU (with recomputation)", None),
    }


def find_models_left_when_compiling(directory):
    models, left = [], []

    def train(run, original=loop.train):
        models.append(weakref.ref(run.model))
        original(run)

    def compile_model(*_):
        left.extend(model() is not None for model in models)
        return [1.0], 2.0, ""

    loop.train, training_speed.measure_compiled_steps = train, compile_model
    measured = {each.name: each for each in training_speed.measure_model(SectionContext("cpu", True, directory, TINY))}
    return left, measured["share of a step that waits for data"].median


@pytest.mark.slow
def test_the_first_model_is_gone_before_the_compiled_one_is_built(tmp_path):
    ((left, share),) = run_on_ranks(1, find_models_left_when_compiling, tmp_path)
    assert left == [False] and 0 < share < 1


@pytest.mark.slow
def test_memory_options_are_compared_to_the_faster_baseline_of_the_first_and_the_last(tmp_path, monkeypatch):
    class Pool:
        def submit(self, function, options):
            future = Future()
            future.set_result(5_000_000)
            return future

    def measure(argv, folder, turn):
        if folder.name == "nf4":
            raise OutOfMemory("forward")
        return {"baseline": 0.5, "swap_half": 0.8, "baseline_again": 0.4}[folder.name], 1.0

    monkeypatch.setattr(memory, "ProcessPoolExecutor", lambda *_, **settings: nullcontext(Pool()))
    monkeypatch.setattr(memory, "measure_run", measure)
    measured = {each.name: each for each in memory.measure_switches(SectionContext("cpu", True, tmp_path, TINY))}
    assert measured["swap_half: step / baseline"].values == [2.0] and "does not fit" in measured["nf4: step"].note
    assert "baseline_again: step" in measured and "baseline: step / baseline" not in measured


@pytest.mark.slow
def test_models_are_trained_within_cards_with_the_first_advised_options_of_one_device(tmp_path, monkeypatch):
    def advise(limit):
        names = {"ZeRO 3": "--zero_stage 3", "one device": "--gradient_checkpointing --blocks_to_swap 3"}
        advice = [SimpleNamespace(layout=SimpleNamespace(name=name), flags=flags, precision="exact weights")
                  for name, flags in names.items()]  # fmt: skip
        return advice if limit > 0.9 * 16 * 2**30 else []

    trained = []
    monkeypatch.setattr(memory, "start_search", lambda options: SimpleNamespace(advise=advise))
    monkeypatch.setattr(memory, "measure_run", lambda argv, folder, turn: (trained.append(argv[-3:]), (0.5, 1.0))[1])
    measured = {each.name: each for each in memory.fit_into_cards(SectionContext("cpu", False, tmp_path, TINY))}
    options = ["--gradient_checkpointing", "--blocks_to_swap", "3"]
    assert trained == [options, options] and measured["12 GB: step"].note == "no options of one device fit"
    assert measured[f"24 GB, {' '.join(options)}: step"].values == measured[f"16 GB, {' '.join(options)}: step"].values


def test_an_interrupted_faults_section_has_the_quick_ones(monkeypatch, tmp_path):
    for name in ("skip_nan_step", "run_out_of_memory", "interrupt_run"):
        monkeypatch.setattr(faults, name, lambda context, name=name: [name])
    context = SectionContext("cpu", True, tmp_path)
    assert list(faults.provoke_faults(context)) == ["skip_nan_step", "interrupt_run", "run_out_of_memory"]


def test_each_training_of_the_compile_benchmark_is_reported_before_the_next(tmp_path, monkeypatch):
    trainings = []

    def measure(argv, output):
        trainings.append(argv)
        return {name: [1.0] for name in ("first step", "step", "compile/seconds", "compile/graphs")}

    monkeypatch.setattr(compile_benchmark, "measure_training", measure)
    measurements = training_speed.compile_sizes(SectionContext("cpu", True, tmp_path, TINY))
    first = next(measurements)
    assert first.name == "2 sizes, dynamic, cold cache: to the first step" and len(trainings) == 1
    assert len(list(measurements)) == 5 and len(trainings) == 2
    assert "--cache_latents_to_disk" in trainings[0]


# commands


@pytest.mark.slow
def test_all_commands_of_a_call_have_one_deadline(tmp_path):
    commands = [
        TrainingCommand(tmp_path / str(number), [], setup="import time; print('begun', flush=True); time.sleep(60)")
        for number in range(4)
    ]
    started = time.monotonic()
    run_commands(commands, at_once=1, seconds=3)
    assert time.monotonic() - started < 9
    assert all("killed at its time limit" in command.failure and command.exit_code for command in commands)
    assert "begun" in commands[0].log


def exchange_tensors():
    """Each rank has a matrix that gloo itself does not take, as it does not take one on a device."""
    dist.init_process_group("gloo")
    host_staging.stage_point_to_point()
    rank = dist.get_rank()
    outcomes = []
    for exchange in (dist.batch_isend_irecv, schedules._batch_p2p):
        received = torch.zeros(3, 2).t()
        send = dist.P2POp(dist.isend, torch.arange(6.0).reshape(3, 2).t() + 10 * rank, 1 - rank)
        receive = dist.P2POp(dist.irecv, received, 1 - rank)
        # A batch of one kind, too, which a pipeline of newer versions of torch sends without the batch's function.
        batches = ([send, receive],) if exchange is dist.batch_isend_irecv else ([send], [receive])
        for work in [work for batch in batches for work in exchange(batch)]:
            work.wait()
        outcomes.append(received.tolist())
    return outcomes


def test_tensors_are_sent_and_received_through_host_memory():
    first, second = run_on_ranks(2, exchange_tensors)
    expected = [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert second == [expected] * 2 and first == [[[value + 10 for value in row] for row in expected]] * 2


# comparisons


def test_the_loss_of_a_repeated_step_is_recorded_once(monkeypatch):
    values = iter([1.0, 2.0, 3.0])
    strategy = SimpleNamespace(compute_gradients=lambda task, batches, count, step: torch.tensor(next(values)))

    def train(run):
        for step in (0, 1, 1):
            run.strategy.compute_gradients(None, [], 4, step)

    monkeypatch.setattr(loop, "train", train)
    assert correctness.record_losses(SimpleNamespace(strategy=strategy)) == [1.0, 3.0]


def test_tf32_is_ruled_out_where_losses_have_to_be_those_of_the_cpu(tmp_path):
    precisions = correctness.list_precisions(SectionContext("cuda", False, tmp_path))
    overrides = {name: values.get("NVIDIA_TF32_OVERRIDE") for name, (values, _) in precisions.items()}
    assert overrides.pop("fp32") == "0" and set(overrides.values()) == {None} and "tf32" in overrides
    assert "tf32" not in correctness.list_precisions(SectionContext("cpu", True, tmp_path))


def test_a_model_whose_waits_cannot_be_counted_has_a_note(tmp_path, monkeypatch):
    def count(function, options, argv, world_size, environment):
        if "random:flux:tiny" in argv:
            raise ConfigError([Problem("x", "wrong")])
        return [{"file.py:3": 2}]

    monkeypatch.setattr(correctness, "run_workers", count)
    measurements = list(correctness.count_synchronizations(SectionContext("cuda", False, tmp_path)))
    assert [each.values for each in measurements] == [[2], [2], [], [2]]
    assert measurements[2].note == "failed: --x: wrong"


def test_only_waits_are_counted_and_not_the_warning_of_the_debug_mode(monkeypatch):
    def train(run):
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(loop, "train", train)
    assert list(correctness.find_synchronizations(SimpleNamespace()).values()) == [1]


def test_a_log_keeps_its_first_error_and_its_end():
    log = "Traceback: the cause\n" + "frame\n" * 5000 + "Aborted"
    shown = program._cut_middle(log)
    assert shown.startswith("Traceback: the cause") and shown.endswith("Aborted") and len(shown) < len(log) / 3
    assert program._cut_middle("short") == "short"


@pytest.mark.slow
def test_a_run_after_a_compiled_one_is_not_compiled(tmp_path):
    (tmp_path / "data").mkdir()
    argv = write_dataset(TINY, tmp_path / "data", 2)
    compiled = []
    for options in (["--torch_compile", "--dynamo_backend", "eager"], []):
        folder = tmp_path / str(len(compiled))
        folder.mkdir()
        with build_run([*argv, *options], folder) as run:
            compiled.append(run.compilation is not None)
    assert compiled == [True, False]


def test_only_kernels_are_named_as_the_longest():
    def build_event(key, device_type, microseconds, is_user_annotation=False):
        return SimpleNamespace(key=key, device_type=DeviceType(device_type), self_device_time_total=microseconds,
                               is_user_annotation=is_user_annotation)  # fmt: skip

    cpu, cuda = int(DeviceType.CPU), int(DeviceType.CUDA)
    events = [
        build_event("aten::mm", cpu, 100),
        build_event("gemm", cuda, 75),
        build_event("copy", cuda, 25),
        build_event("phase/forward", cuda, 100, True),
        build_event("cudaLaunchKernel", cpu, 0),
    ]
    assert format_longest_kernels(events) == "longest: gemm 75 %; copy 25 %"
