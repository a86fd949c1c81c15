"""Memory of full training: real steps take what is estimated, and what is advised changes no more than it has to."""

from dataclasses import replace

import pytest
import torch
from rank_processes import run_on_ranks
from support.measured_memory import estimate_full_step, load_config, measure_full_step
from torch import nn

from library.config.schema_optim import OptimConfig
from library.estimate.advice import estimate_layout
from library.estimate.full_search import CHANGES, FullSearch
from library.estimate.meta_run import LargestBatch
from library.estimate.meta_run_cache import MetaRuns
from library.estimate.optimizer_memory import measure_optimizer
from library.estimate.parallel_layouts import LayoutFinder, format_flags
from library.estimate.step_memory import StepMemory
from library.estimate.step_time import Devices
from library.optim.fused_backward import COLLECTED_SHARE, count_collected_bytes
from library.optim.optimizers import ParamGroup
from library.parallel.frozen_base import find_innermost_blocks, select_spread_indices

FULL = ("--train", "full", "--pretrained_model_name_or_path")
GROUPS = [ParamGroup("all", [nn.Parameter(torch.zeros(64, 80)), nn.Parameter(torch.zeros(5))], 0.1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "flags"),
    [
        ("sd1", "128", ("--train_batch_size", "2")),
        ("flux", "64", ("--fused_backward_pass", "--optimizer_type", "SGD")),
    ],
)
def test_a_step_of_full_training_takes_the_estimated_memory(model, size, flags, tmp_path):
    flags = (*FULL, f"random:{model}:tiny", "--resolution", size, *flags)
    (measured,) = run_on_ranks(1, measure_full_step, tmp_path, *flags)
    memory = estimate_full_step(1, *flags)

    assert memory.total - memory.reserved == pytest.approx(measured, rel=0.05)


def test_gradients_grow_while_activations_of_earlier_parts_are_still_held():
    one = StepMemory(100, 150, 80, gradients=40, growing_peak=90)
    two = StepMemory(20, 30, 5, gradients=500, growing_peak=300)
    both = one + two
    assert both.gradients == 540
    assert both.growing_peak == max(300, 90 - 20 + 500), "the second part's are whole when the first part begins"
    assert both.peak_with_gradients == 120 + 570 and both.peak == 180
    assert (one + StepMemory(20, 30, 5, growing_peak=5)).peak_with_gradients == 100 + 90


def test_collected_gradients_are_those_up_to_the_limit_from_the_end():
    assert count_collected_bytes([320] * 32) == 320
    sizes = [1000, *[10] * 100]  # the limit is 2000 / 32 = 62.5: seven small ones, or the large one after two others
    assert COLLECTED_SHARE == 1 / 32 and count_collected_bytes(sizes) == 1000 + 10 * (100 % 7)


@pytest.mark.parametrize(
    ("name", "dtype", "is_on_gpu", "state", "temporaries"),
    [
        ("AdamW", torch.float32, True, 2 * 4 * 5125 + 8, 0),  # fused; each weight has a count of steps
        ("AdamW", torch.bfloat16, True, 2 * 2 * 5125 + 8, 2 * 5125),  # all square roots at once
        ("AdamW", torch.bfloat16, False, 2 * 2 * 5125 + 8, 2 * 5120),
        ("SGD", torch.float32, True, 0, 0),
        ("Lion", torch.bfloat16, False, 2 * 5125, 2 * 5125),
        ("AdamW8bit", torch.float32, True, 2 * (5120 + 4 * 20 + 4 * 5), 0),
        ("PagedLion8bit", torch.bfloat16, True, 5120 + 4 * 20 + 4 * 5, 0),
    ],
)
def test_an_optimizer_needs_its_state_and_what_its_step_allocates(name, dtype, is_on_gpu, state, temporaries):
    if name == "Lion":
        pytest.importorskip("pytorch_optimizer")
    weights = [nn.Parameter(each.detach().to(dtype)) for each in GROUPS[0].parameters]
    config = OptimConfig(optimizer_type=name, learning_rate=0.1)
    found = measure_optimizer(config, [ParamGroup("all", weights, 0.1)], is_on_gpu=is_on_gpu)

    assert found.state == state
    assert temporaries <= found.temporaries <= 2 * temporaries


def test_an_optimizer_of_one_step_size_holds_all_weights_in_float32_while_they_are_rounded():
    pytest.importorskip("pytorch_optimizer")
    weights = [nn.Parameter(torch.zeros(1000, 1000, dtype=torch.bfloat16)) for _ in range(20)]
    found = {
        name: measure_optimizer(OptimConfig(optimizer_type=name), [ParamGroup("all", weights, 1)], is_rounded=True)
        for name in ("Lion", "Prodigy")
    }
    assert 8 * 2**23 <= found["Lion"].count_temporaries() < 8 * 20_000_000
    assert found["Prodigy"].count_temporaries() >= 20_000_000 * 8 + found["Prodigy"].state


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "moments"), [("AdamW", 2), ("Adafactor", 0)])
def test_weights_of_swapped_blocks_and_their_moments_are_not_on_the_device(optimizer, moments):
    """Of a matrix Adafactor has means of rows and columns, which stay."""
    config, explicit, model = load_config(
        *FULL, "random:flux:tiny", "--fused_backward_pass", "--optimizer_type", optimizer
    )
    runs, devices = MetaRuns(model, LargestBatch((64, 64), ("an image",))), Devices(1, 2**40)

    def estimate(blocks_to_swap):
        train = replace(config.train, blocks_to_swap=blocks_to_swap, block_swap_ring_size=2)
        (layout, *_), _ = LayoutFinder(replace(config, train=train), explicit, model, 1).find_layouts()
        run = runs.get(layout)
        return estimate_layout(layout, run, runs, devices, savings={}), run

    (whole, run), (swapped, _) = estimate(0), estimate(3)
    blocks = [sum(each.nbytes for each in block.parameters()) for block in find_innermost_blocks(run.denoiser)]
    chosen = [blocks[index] for index in select_spread_indices(len(blocks), 3)]
    assert whole.memory.adapters - swapped.memory.adapters == sum(chosen)
    assert 2 * max(chosen) <= swapped.memory.gathered < 2.1 * max(chosen)
    assert whole.memory.optimizer - swapped.memory.optimizer == pytest.approx(
        moments * sum(chosen), abs=0.1 * sum(chosen)
    )
    assert swapped.images_per_second < whole.images_per_second and len(runs._runs) == 1


@pytest.mark.slow
def test_what_is_advised_for_full_training_changes_as_little_as_possible():
    config, explicit, model = load_config(*FULL, "random:sdxl:tiny", "--optimizer_type", "AdamW")
    explicit -= {"optimizer_type"}
    finder = LayoutFinder(config, explicit, model, 1)
    runs, devices = MetaRuns(model, LargestBatch((64, 64), ("an image",))), Devices(1, 2**40)
    search = FullSearch(finder, runs, devices, lambda layout: not layout.options)
    smallest = {format_flags(options): found.find_smallest().memory.total for options, found in search._iter_searches()}
    assert len(smallest) >= 6 and [*smallest.values()][:2] == sorted([*smallest.values()][:2], reverse=True)
    for options in CHANGES[:4]:
        limit = smallest[format_flags(options)]
        first, *others = search.advise(limit)
        assert first.memory.total <= limit and (options or not others), "changes are tried where one is needed"
        changed = {name for name in first.options if name in {"fused_backward_pass", "full_bf16", "optimizer_type"}}
        earlier = [set(each) for each in CHANGES if smallest.get(format_flags(each), limit + 1) <= limit]
        assert changed == earlier[0], "nothing that changes less would fit"
    least = search.find_smallest()
    assert least.options["optimizer_type"] == "Adafactor" and least.options["full_bf16"]
    kept = FullSearch(finder, runs, devices, lambda layout: not layout.options, may_change_optimizer=False)
    assert "optimizer_type" not in kept.find_smallest().options


@pytest.mark.slow
def test_an_optimizer_on_the_host_is_slower_and_one_of_a_single_step_size_is_not_fused():
    pytest.importorskip("pytorch_optimizer")
    config, explicit, model = load_config(*FULL, "random:sdxl:tiny", "--optimizer_type", "AdamW")
    runs, devices = MetaRuns(model, LargestBatch((64, 64), ("an image",))), Devices(2, 2**40)
    layouts = {each.name: each for each in LayoutFinder(config, explicit, model, 2).find_layouts()[0]}
    names = ("FSDP 2", "FSDP 2, CPU offload")
    found = [estimate_layout(layouts[name], runs.get(layouts[name]), runs, devices, savings={}) for name in names]
    assert found[0].images_per_second > found[1].images_per_second

    config, explicit, model = load_config(*FULL, "random:sdxl:tiny", "--optimizer_type", "Prodigy")
    search = FullSearch(LayoutFinder(config, explicit, model, 1), runs, Devices(1, 2**40))
    allowed = [options for options, found in search._iter_searches() if found.candidates]
    assert {} in allowed and not any(options.get("fused_backward_pass") for options in allowed)
