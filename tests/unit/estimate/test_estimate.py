"""Estimated memory compared to real processes and torch's allocator; the layout search, and its suggestions."""

import logging
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
from rank_processes import run_on_ranks
from support.fake_devices import DEVICE_TYPE, build_device_map, dispatch_to_fake_devices, move_to_device
from support.measured_memory import (
    PARTS,
    count_bytes,
    estimate,
    estimate_step,
    load_config,
    measure_state,
    measure_step,
    use_fused_rms_norm,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from library.config import parse_config
from library.config.schema_optim import OptimConfig
from library.estimate.layout_search import estimate_layouts, suggest_savings
from library.estimate.memory_estimate import count_in_flight, split_model
from library.estimate.meta_memory_meter import AutocastEmulation, MemoryMeter, MeterReading, run_backward
from library.estimate.meta_run import LargestBatch, MetaRun
from library.estimate.meta_run_cache import MetaRuns, get_partition
from library.estimate.optimizer_memory import measure_optimizer
from library.estimate.parallel_layouts import LayoutFinder
from library.estimate.step_memory import StepMemory
from library.estimate.step_time import Devices
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.optim.optimizers import ParamGroup, build_optimizer
from library.parallel.activation_checkpointing import BlockCheckpointing

SMALL, MEDIUM = LargestBatch((64, 64), ("an image",)), LargestBatch((256, 256), ("an image",))
MODEL = "--pretrained_model_name_or_path"
UNET_ONLY = "--network_train_unet_only"
SD3, FLUX = (MODEL, "random:sd3:tiny", UNET_ONLY), (MODEL, "random:flux:tiny", UNET_ONLY)
RUN = (*SD3, "--resolution", "64", "--gradient_accumulation_steps", "2")


def parse_flags(*values):
    return pytest.param(*values, id=str(values))


def make_long_batch(*values):
    return pytest.param(*values, id=str(values), marks=pytest.mark.slow)


def run_on_meta_device(*flags: str, world_size: int = 1, batch: LargestBatch = SMALL):
    """Return the meta run of the first layout that the flags allow, and its device parts."""
    config, explicit, model = load_config(*flags)
    layout = LayoutFinder(config, explicit, model, world_size).find_layouts()[0][0]
    meta_run = MetaRun(layout.config, model, batch, *get_partition(layout, model))
    return meta_run, split_model(meta_run, layout, world_size, 2**40)


# weights, gradients, optimizer state


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--no-network_train_unet_only",)])
def test_encoders_are_on_the_device_unless_their_outputs_are_cached(more):
    flags = (*RUN, "--mixed_precision", "bf16")
    uncached = (*flags, "--no-cache_latents", "--no-cache_text_encoder_outputs", *more)
    encoding, cached = (estimate(1, *each, batch=SMALL)[0].memory for each in (uncached, flags))
    components = FAMILIES.get("sd3")().load("random:sd3:tiny", torch.bfloat16).components.values()
    models = [part for part in components if isinstance(part, nn.Module)]
    frozen = count_bytes(each for part in models for each in (*part.parameters(), *part.buffers()))

    assert encoding.weights == pytest.approx(frozen, rel=0.01) and cached.weights < 0.9 * frozen
    assert (encoding.adapters > cached.adapters) is bool(more) and encoding.adapters < frozen / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        parse_flags("FSDP 2", ("--fsdp",)),
        parse_flags("PP 2", ("--pp_size", "2")),
        make_long_batch("DDP 2", ()),
        make_long_batch("TP 2", ("--tp_size", "2")),
        make_long_batch("ZeRO-2 2", ("--deepspeed", "--zero_stage", "2")),
        make_long_batch("ZeRO-3 2", ("--deepspeed", "--zero_stage", "3")),
    ],
)
def test_real_processes_hold_the_estimated_weights_gradients_and_optimizer_state(name, flags, tmp_path):
    if "ZeRO" in name:
        pytest.importorskip("deepspeed")
    ranks = run_on_ranks(2, measure_state, tmp_path, *RUN, *flags)
    (actual,) = estimate(2, *RUN, *flags, batch=SMALL, names=(name,))

    largest = max(ranks, key=lambda rank: rank["weights"])
    assert {part: getattr(actual.memory, part) for part in PARTS} == pytest.approx(largest, rel=0.03)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AdamW", ()),
        ("SGD", ()),
        ("SGDNesterov", ()),
        ("Prodigy", ()),
        ("AdamWScheduleFree", ()),
        ("Adafactor", ("relative_step=False", "scale_parameter=False")),
    ],
)
def test_optimizer_state_is_measured_on_one_tensor_of_each_shape(name, arguments):
    if name in ("Prodigy", "AdamWScheduleFree"):
        pytest.importorskip("pytorch_optimizer")
    config = OptimConfig(optimizer_type=name, optimizer_args=arguments, learning_rate=0.1)
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(4, 6), (4, 6), (6, 4), (5,), (4, 6)]]
    optimizer = build_optimizer(config, [ParamGroup("all", parameters, 0.1)])
    if hasattr(optimizer, "train"):
        optimizer.train()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, torch.Tensor)]

    actual = measure_optimizer(config, [ParamGroup("all", parameters, 0.1)])
    assert actual.state == sum(each.nbytes for each in state)


@pytest.mark.slow
def test_half_precision_saves_less_and_swapped_or_quantized_weights_are_not_on_the_device():
    plain, half, quantized, swapped = (
        estimate(1, *FLUX, *flags, batch=SMALL)[0].memory
        for flags in ((), ("--mixed_precision", "bf16"), ("--quantize_base", "nf4"), ("--blocks_to_swap", "2"))
    )
    assert half.weights == plain.weights / 2 and half.activations < plain.activations
    assert quantized.weights < plain.weights and swapped.weights < plain.weights
    assert plain.adapters == half.adapters == quantized.adapters == swapped.adapters


# activations

CHECKPOINTING = "--gradient_checkpointing"
BUDGET = (CHECKPOINTING, "--activation_memory_budget", "0.5")
UNCACHED = ("--no-cache_latents", "--max_data_loader_n_workers", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "model", "flags"),
    [
        parse_flags(1, "sd1", ("--train_batch_size", "2", CHECKPOINTING)),
        parse_flags(1, "flux", ("--quantize_base", "nf4", "--blocks_to_swap", "1")),
        parse_flags(2, "flux", ("--cp_size", "2")),
        make_long_batch(1, "sd1", ("--train_batch_size", "2")),
        make_long_batch(1, "sd3", (CHECKPOINTING, "--gradient_checkpointing_every", "2")),
        make_long_batch(1, "flux", BUDGET),
        make_long_batch(1, "sd1", (*UNCACHED, "--mixed_precision", "bf16", CHECKPOINTING)),
        make_long_batch(1, "sdxl", ()),
        make_long_batch(1, "z_image", ()),
        make_long_batch(2, "sd3", ("--cp_size", "2", CHECKPOINTING)),
        make_long_batch(2, "z_image", ("--cp_size", "2")),
        make_long_batch(2, "flux", ("--fsdp",)),
        make_long_batch(2, "flux", ("--pp_size", "2", "--gradient_accumulation_steps", "4")),
        make_long_batch(2, "sdxl", ("--pp_size", "2", "--gradient_accumulation_steps", "4", CHECKPOINTING)),
        make_long_batch(2, "flux", ("--tp_size", "2")),
    ],
)
def test_a_step_takes_the_estimated_memory(world_size, model, flags, tmp_path):
    flags = (MODEL, f"random:{model}:tiny", "--resolution", "128", *flags)
    measured = max(run_on_ranks(world_size, measure_step, tmp_path, *flags))

    assert estimate_step(world_size, *flags) == pytest.approx(measured, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["128", "512"])
def test_only_the_position_tables_of_qwen_image_are_overestimated(size, tmp_path):
    """The tables move to an accelerator, but are already in host memory on a CPU."""
    flags = (MODEL, "random:qwen_image:tiny", "--resolution", size, "--train_batch_size", "1")
    (measured,) = run_on_ranks(1, measure_step, tmp_path, *flags)
    positions = FAMILIES.get("qwen_image")().load("random:qwen_image:tiny", torch.float32).transformer.pos_embed
    tables = positions.pos_freqs.nbytes + positions.neg_freqs.nbytes

    estimated = estimate_step(1, *flags)
    assert estimated - tables == pytest.approx(measured, rel=0.05)
    if size == "512":
        assert estimated == pytest.approx(measured, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["flux", "sdxl", "sd3"])
def test_each_device_of_a_device_map_takes_the_estimated_memory(model):
    """Compared to fake devices with accelerate's dispatch hooks."""
    flags = (MODEL, f"random:{model}:tiny")
    meta_run, (whole,) = run_on_meta_device(*flags, batch=MEDIUM)
    part = meta_run.family.facts.denoiser_name
    device_map = str(build_device_map(getattr(meta_run.pipe, part), 2))
    _, devices = run_on_meta_device(*flags, "--device_map", device_map, world_size=2, batch=MEDIUM)
    chunks = [chunk for device in devices for chunk in device.chunks]

    config, _, detected = load_config(*flags)
    real = MetaRun(config, detected, MEDIUM)  # the blocks are no longer recorded
    batch, first = real.task.encode(real.batch, 0), torch.device(DEVICE_TYPE, 0)
    with dispatch_to_fake_devices(real.pipe, part, 2):
        moved = {
            name: move_to_device(first, getattr(batch, name))
            for name in ("latents", "cond", "size_conditioning", "loss_weights")
        }
        batch, t = replace(batch, **moved), torch.full((1,), 0.5, device=first)
        allocated = [*real.denoiser.parameters(), *real.denoiser.buffers()]
        meters = [MemoryMeter(torch.device(DEVICE_TYPE, number), allocated) for number in range(2)]
        with meters[0], meters[1], AutocastEmulation(None):
            prediction = real.family.predict(real.pipe, real.denoiser, batch.latents, t, batch)
            saved = [meter.live for meter in meters]
            run_backward(prediction.sum())

    assert [chunk.saved for chunk in chunks] == pytest.approx(saved, rel=0.1)
    assert [chunk.peak for chunk in chunks] == pytest.approx([meter.peak for meter in meters], rel=0.2)
    encoding_peak = 10**12
    activations = [device.count_activation_bytes(encoding_peak) for device in devices]
    assert activations[0] == encoding_peak > activations[1], "the first device encodes"

    assert sum(device.flops for device in devices) == whole.flops
    assert sum(device.frozen_bytes for device in devices) == whole.frozen_bytes
    assert sum(device.trainable_share for device in devices) == pytest.approx(1)
    assert (received := sum(device.received_bytes for device in devices)) > 0
    assert sum(chunk.saved for chunk in chunks) == whole.chunks[0].saved + received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_saves_its_input_and_a_number_per_row(dtype):
    """In the published size of FLUX.1, 3.2 GB less than in single operations, as an H100 confirmed."""
    states = torch.empty(6, 5, 8, dtype=dtype, device="meta", requires_grad=True)
    norm = torch.nn.RMSNorm(8, device="meta", dtype=dtype).requires_grad_(False)
    with MemoryMeter(torch.device("meta"), [states, *norm.parameters()]) as meter, AutocastEmulation(None):
        output = norm(states)
        assert meter.live == states.nbytes + 6 * 5 * 4
        run_backward(output.sum())
    assert states.grad.shape == states.shape


def test_the_fused_rms_norm_of_the_measured_runs_is_torchs():
    states, weight = torch.randn(3, 4, 8, requires_grad=True), torch.rand(8)
    results = []
    for context in (nullcontext(), use_fused_rms_norm()):
        with context:
            output = torch.nn.functional.rms_norm(states, (8,), weight, 1e-5)
        results.append((output, *torch.autograd.grad(output.square().sum(), states)))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*results, strict=True))


def test_memory_counts_until_its_last_tensor_is_freed():
    before = torch.empty(100)
    with MemoryMeter(torch.device("cpu"), [before]) as meter:
        one = before.view(10, 10).exp()
        part = one[0]
        del one
        assert meter.live == 400
        two = part + 1
        assert (meter.live, meter.peak) == (440, 440)
        del part
        assert (meter.live, meter.peak) == (40, 440)
        torch.mm(two.view(2, 5), two.view(5, 2))
    assert meter.flops == 2 * 2 * 5 * 2
    assert meter.read_and_reset() == MeterReading(live=40, peak=440, flops=40, kernels=3), "views launch nothing"
    assert meter.read_and_reset() == MeterReading(40, 40, 0, 0)


class ExecutedOps(TorchDispatchMode):
    """Counts the calls that reach the device."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket] += 1
        return function(*args, **(kwargs or {}))


def test_equal_ops_on_the_meta_device_count_like_the_first_and_are_not_executed_again():
    def run(meter):
        x = torch.empty(4, 8, device="meta")
        y = torch.nn.functional.layer_norm(x @ x.T, (4,)).transpose(0, 1)
        z = torch.cat([y, y + 1.0]).softmax(0)
        assert (z.shape, z.dtype, (z > 0).dtype, (y + 1).stride()) == ((8, 4), torch.float32, torch.bool, (1, 4))
        del x, y, z
        return meter.read_and_reset()

    with ExecutedOps() as executed, MemoryMeter(torch.device("meta")) as meter:
        first, second = run(meter), run(meter)
    assert executed.counts[torch.ops.aten.mm] == executed.counts[torch.ops.aten._softmax] == 1
    assert first == second and first.live == 0 and first.peak > 0 and first.flops == 2 * 4 * 4 * 8


@pytest.mark.slow
def test_runs_with_other_cached_outputs_share_a_step():
    uncached, cached = ((*RUN, f"--{no}cache_latents", f"--{no}cache_text_encoder_outputs") for no in ("no-", ""))
    runs, found = MetaRuns(load_config(*RUN)[2], SMALL), []
    for flags in (uncached, cached):
        config, explicit, model = load_config(*flags)
        layouts, _ = LayoutFinder(config, explicit, model, 1).find_layouts()
        found.append(estimate_layouts(layouts[:1], model, SMALL, Devices(1, 2**40), runs=runs)[0].memory)
    assert len(runs._runs) == 1 and found[1] == estimate(1, *cached, batch=SMALL)[0].memory
    assert found[0].weights > found[1].weights and found[0].activations > found[1].activations


def test_a_model_whose_single_blocks_take_no_text_is_estimated():
    (layout,) = run_on_meta_device(MODEL, "random:bria_fibo:tiny", "--resolution", "64")[1]
    assert layout.flops > 0 and len({chunk.saved > 0 for chunk in layout.chunks}) == 1


def test_the_peaks_of_parts_add_up_to_the_peak_of_the_step():
    one, two = StepMemory(100, 150, 80, 1, 7), StepMemory(20, 30, 5, 2, 4)
    assert (one + two) == StepMemory(120, 150, 60, 3, 11)
    assert (one + two).peak == 180, "in the backward pass of the first part"
    assert (two + one) == StepMemory(120, 170, 80, 3, 11) and (two + one).peak == 200
    assert (one + two) + one == one + (two + one)


@pytest.mark.slow
def test_pipeline_stages_together_have_the_flops_of_the_model_and_a_tp_rank_more_than_half():
    whole, halves, cut = (
        run_on_meta_device(*RUN, *more, world_size=size)
        for size, more in ((1, ()), (2, ("--pp_size", "2")), (2, ("--tp_size", "2")))
    )
    (one,), stages, (rank,) = whole[1], halves[1], cut[1]

    assert sum(stage.flops for stage in stages) == pytest.approx(one.flops, rel=0.15)
    assert one.flops / 2 < rank.flops < 0.75 * one.flops
    assert stages[0].sent_bytes == stages[1].received_bytes > 0 and cut[0].sent_bytes > 0 == whole[0].sent_bytes
    assert all(part.chunks[0].saved < one.chunks[0].saved for part in (*stages, rank))
    assert stages[0].frozen_bytes < one.frozen_bytes and rank.frozen_bytes < one.frozen_bytes


def test_context_parallel_stages_split_tokens_before_a_block_is_checkpointed(monkeypatch):
    call, lengths = BlockCheckpointing.__call__, list[int]()

    def checkpoint(self, block, *args, **kwargs):
        lengths.append(args[0].shape[1])
        return call(self, block, *args, **kwargs)

    monkeypatch.setattr(BlockCheckpointing, "__call__", checkpoint)
    run_on_meta_device(*RUN, CHECKPOINTING, "--pp_size", "2", "--cp_size", "2", world_size=4, batch=MEDIUM)
    assert set(lengths) == {256 // 2}


@pytest.mark.parametrize(
    ("schedule", "expected"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("interleaved", [11, 9, 7, 5])]
)
def test_the_schedule_determines_how_many_micro_batches_are_in_flight(schedule, expected):
    assert [count_in_flight(schedule, 4, stage, 8) for stage in range(4)] == expected


def test_the_meta_batch_has_the_sizes_of_images_and_captions():
    config = parse_config([MODEL, "random:z_image:tiny"]).config
    batch = LargestBatch((64, 96), ("short", "a much longer caption"))
    batch = MetaRun(config, detect_model(config.model), batch).batch
    short, long_one = batch.cond["embeds"]
    assert batch.moments.mean_and_std.shape[-2:] == (12, 8) and len(short) < len(long_one)


@pytest.mark.slow
def test_a_budget_of_the_compiler_reduces_the_estimate():
    saved = {}
    for budget in ("", "1", "0.5"):
        flags = ("--activation_memory_budget", budget) if budget else ()
        run, _ = run_on_meta_device(*FLUX, "--torch_compile", *flags, batch=MEDIUM)
        saved[budget] = run.step.total.saved
    assert saved["0.5"] < saved["1"] < saved[""]


# layouts

ZERO = {f"ZeRO-{stage} 2" for stage in (1, 2, 3)} | {f"ZeRO-{stage} 2, optimizer offload" for stage in (1, 2, 3)}
ZERO |= {"ZeRO-3 2, full offload"}
DATA_PARALLEL = {"DDP 2", "FSDP 2", "FSDP 2, CPU offload"}
MODEL_PARALLEL = {"PP 2", "TP 2", "CP 2", "device map 2"}
EVERY_LAYOUT = DATA_PARALLEL | ZERO | MODEL_PARALLEL
LOHA = ("--network_module", "lycoris.kohya", "--network_args", "algo=loha")
COMPILED = ("--torch_compile", "--cp_size", "2")
NVME = ("--deepspeed", "--zero_stage", "3", "--offload_optimizer_device", "nvme")


def find_layouts(world_size: int, *flags: str) -> tuple[set[str], list[str]]:
    loaded = parse_config(["--dataset_config", "dataset_configs/demo.toml", UNET_ONLY, *flags])
    model = detect_model(loaded.config.model)
    layouts, reasons = LayoutFinder(loaded.config, frozenset(loaded.locations), model, world_size).find_layouts()
    return {layout.name for layout in layouts}, reasons


@pytest.mark.parametrize(
    ("world_size", "flags", "names"),
    [
        (1, (), {"one device", "ZeRO-3 1, full offload"}),
        (1, ("--fsdp",), set()),
        (2, (), EVERY_LAYOUT),
        (2, ("--tp_size", "2"), {"TP 2"}),
        (2, ("--fsdp",), {"FSDP 2", "FSDP 2, CPU offload"}),
        (2, ("--cp_size", "2"), {"CP 2"}),
        (2, ("--device_map", "sequential"), {"device map 2"}),
        (2, ("--quantize_base", "int8"), {name for name in EVERY_LAYOUT if "ZeRO-3" not in name}),
        (2, ("--blocks_to_swap", "1"), {name for name in ZERO if "ZeRO-3" not in name} | {"DDP 2", "CP 2"}),
        (2, COMPILED, {"CP 2"}),
        (2, (*COMPILED, "--dynamo_mode", "max-autotune"), set()),
        (2, (*COMPILED, *BUDGET), set()),
        (2, ("--optimizer_type", "Adafactor"), DATA_PARALLEL | MODEL_PARALLEL),
        (2, LOHA, DATA_PARALLEL | ZERO | MODEL_PARALLEL - {"TP 2"}),
        (2, NVME, set()),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value),
)
def test_layouts_are_those_that_training_would_accept(world_size, flags, names):
    assert find_layouts(world_size, *SD3, *flags)[0] == names


def test_layouts_are_combined_and_follow_the_model():
    combined = {
        "DDP 2 x TP 2",
        "FSDP 2 x TP 2",
        "PP 2 x TP 2",
        "DDP 2 x PP 2",
        "HSDP 2x2",
        "FSDP 2, CPU offload x TP 2",
    }
    assert combined < find_layouts(4, *SD3)[0]
    assert not any("TP" in name and "CP" in name and "PP" in name for name in find_layouts(8, *SD3)[0])
    assert len(find_layouts(1, *SD3, "--deepspeed")[0]) == 7
    assert "CP 2" not in find_layouts(2, MODEL, "random:sdxl:tiny")[0]


def test_reasons_against_layouts_are_given_once_with_their_names():
    (reason,) = find_layouts(2, *SD3, "--tp_size", "2", "--blocks_to_swap", "1")[1]
    assert str(reason).startswith(
        "--blocks_to_swap: not available in runs that shard the frozen weights over processes"
    )
    _, device_map = find_layouts(2, *SD3, "--blocks_to_swap", "1")[1]
    assert str(device_map) == "device map 2: --device_map: cannot be combined with blocks_to_swap; remove one of them"


@pytest.mark.slow
def test_layouts_that_partition_the_model_alike_share_one_meta_run(caplog):
    with caplog.at_level(logging.INFO, logger="library"):
        actual = estimate(4, MODEL, "random:sdxl:tiny", batch=SMALL)
    steps = [record.getMessage() for record in caplog.records]
    assert steps == [
        "estimating memory: a step on the meta device (DDP 4, 1 of 3)",
        "estimating memory: a step on the meta device (DDP 2 x TP 2, 2 of 3)",
        "estimating memory: a step on the meta device (TP 4, 3 of 3)",
    ]
    assert {"PP 4", "DDP 2 x PP 2", "PP 2 x TP 2", "device map 4"} < {each.layout.name for each in actual}
    speeds = [each.images_per_second for each in actual]
    assert speeds == sorted(speeds, reverse=True)
    for each in actual:
        memory = each.memory
        assert memory.total == sum(getattr(memory, part.name) for part in fields(memory))


@pytest.mark.slow
def test_layouts_that_send_more_are_slower_on_slow_links():
    speeds = [
        {each.layout.name: each.images_per_second for each in estimate(2, *FLUX, batch=SMALL, link_speed=link_speed)}
        for link_speed in (
            1e6,
            1e15,
        )  # of a model so small, the host launches kernels for longer than 1 GB/s would take
    ]
    slow, fast = ({name: speed / actual["DDP 2"] for name, speed in actual.items()} for actual in speeds)
    assert all(slow[name] < fast[name] for name in ("TP 2", "CP 2", "FSDP 2", "FSDP 2, CPU offload", "ZeRO-3 2"))
    assert slow["FSDP 2, CPU offload"] < slow["FSDP 2"] < slow["DDP 2"] == 1
    assert fast["FSDP 2"] == pytest.approx(1) and fast["device map 2"] == pytest.approx(0.5, rel=0.01)
    assert fast["PP 2"] < 0.5, "with one micro-batch, stages are idle while others run"


# suggestions


def suggest_options(
    *flags: str, world_size: int = 1, memory=lambda smallest: smallest.total - smallest.activations // 2
):
    """Suggest options for devices with as much memory as ``memory`` computes from the first layout's."""
    batch = LargestBatch((512, 512), ("an image",))
    config, explicit, model = load_config(*FLUX, "--resolution", "128", *flags)
    finder = LayoutFinder(config, explicit, model, world_size)
    layouts, _ = finder.find_layouts()
    estimates = estimate_layouts(layouts[:1], model, batch, Devices(world_size, 2**40))
    devices = Devices(world_size, memory(estimates[0].memory))
    return suggest_savings(finder, batch, devices, estimates), devices


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "flags", "name"), [(1, (), "one device"), (2, ("--cp_size", "2"), "CP 2")])
def test_if_nothing_fits_options_are_added_until_a_layout_fits(world_size, flags, name):
    suggestion, devices = suggest_options(*flags, world_size=world_size)
    assert suggestion.layout.name == name and suggestion.memory.total <= devices.memory
    assert set(suggestion.savings) <= {"mixed_precision", "gradient_checkpointing"} and suggestion.savings


@pytest.mark.slow
def test_options_that_contradict_the_run_are_not_suggested():
    trains_texts = "--no-cache_text_encoder_outputs", "--no-network_train_unet_only"
    suggestion, _ = suggest_options(*trains_texts, "--network_args", "train_t5xxl=True")
    assert suggestion is not None and "cache_text_encoder_outputs" not in suggestion.savings
    suggestion, _ = suggest_options(*trains_texts)
    assert suggestion is not None and suggestion.savings["cache_text_encoder_outputs"], "of T5, which is not trained"


@pytest.mark.slow
def test_if_no_option_suffices_all_that_reduce_memory_are_suggested():
    suggestion, devices = suggest_options(memory=lambda memory: memory.reserved + memory.adapters)
    assert suggestion.memory.total > devices.memory
    assert "--quantize_base nf4" in suggestion.flags and "int8" not in suggestion.flags
    assert suggest_options(memory=lambda memory: memory.reserved + memory.adapters - 1)[0] is None
