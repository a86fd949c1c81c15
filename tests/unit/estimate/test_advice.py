"""Options that are advised for a memory: derived estimates equal those of real steps, and nothing better is left."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.measured_memory import load_config

from library.estimate.advice import MARGIN, SAME_SPEED, Candidate, GridSearch, add_free_savings, select_candidates
from library.estimate.layout_search import estimate_layouts, search_layouts
from library.estimate.meta_run import LargestBatch, MetaRun
from library.estimate.parallel_layouts import LayoutFinder
from library.estimate.step_time import Devices
from library.parallel.quantize import RELATIVE_ERRORS

BATCH, LARGE_BATCH = (LargestBatch((512, 512), ("an image",) * count) for count in (1, 256))
FLUX = ("--pretrained_model_name_or_path", "random:flux:tiny", "--network_train_unet_only", "--mixed_precision", "bf16")
SDXL = ("--pretrained_model_name_or_path", "random:sdxl:tiny", *FLUX[2:])


def build_candidate(kind: str, total: int, speed: float, number_of_options: int = 1) -> Candidate:
    layout = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(quantize_base=kind)))
    return Candidate(dict.fromkeys(map(str, range(number_of_options))), layout, total, speed)


candidates = st.builds(
    build_candidate, st.sampled_from([*RELATIVE_ERRORS]), st.integers(1, 20), st.floats(0.1, 10), st.integers(0, 3)
)


@given(st.lists(candidates, max_size=20), st.integers(1, 20))
def test_nothing_that_fits_is_faster_and_more_exact_than_what_is_advised(found, limit):
    selected = select_candidates(found, limit)
    fitting = [each for each in found if each.total <= limit]

    assert bool(selected) == bool(fitting) and all(each in fitting for each in selected)
    for each in selected:
        assert not any(
            other.error < each.error and other.images_per_second >= each.images_per_second for other in fitting
        )
    assert [each.error for each in selected] == sorted({each.error for each in selected}, reverse=True)
    if fitting:
        assert selected[0].images_per_second >= (1 - SAME_SPEED) * max(each.images_per_second for each in fitting)
        assert selected[-1].error == min(each.error for each in fitting), "the most exact is always among them"


def test_exact_weights_are_preferred_at_about_the_same_speed():
    exact, quantized = build_candidate("none", 5, 0.95, 2), build_candidate("nf4", 4, 1.0)

    assert select_candidates([exact, quantized], 5) == [exact]
    assert select_candidates([replace(exact, images_per_second=0.5), quantized], 5)[0] == quantized


def build_search(flags, memory=2**40):
    config, explicit, model = load_config(*flags)
    finder, _ = add_free_savings(LayoutFinder(config, explicit, model, 1))
    layout = next(each for each in finder.find_layouts()[0] if each.name == "one device")
    return finder, GridSearch(finder, layout, BATCH, Devices(1, memory))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [FLUX, SDXL], ids=["flux", "sdxl"])
def test_derived_estimates_are_those_of_real_steps_or_a_little_more(flags):
    finder, search = build_search(flags)
    found = [*search.estimate_candidates()]
    kinds = {(each.layout.config.model.quantize_base, bool(each.options.get("blocks_to_swap"))) for each in found}
    assert kinds >= {(kind, is_swapped) for kind in RELATIVE_ERRORS for is_swapped in (False, True)}
    for each in found[:: max(1, len(found) // 6)]:
        (real,) = estimate_layouts([each.layout], finder.model, BATCH, Devices(1, 2**40))
        derived, expected = (total - real.memory.reserved for total in (each.total, real.memory.total))
        # A layer with a converted weight saves less than torch's: up to 6 % of this tiny UNet, 2 % of the published one.
        assert 0.99 * expected <= derived <= 1.08 * expected, each.options


def test_checkpointing_every_second_block_is_put_together_from_two_steps():
    config, _, model = load_config(*FLUX, "--gradient_checkpointing", "--gradient_checkpointing_every", "2", *CACHES)
    real = MetaRun(config, model, BATCH).step.total
    plain, checkpointed = (
        MetaRun(load_config(*FLUX, *more, *CACHES)[0], model, BATCH).step
        for more in ((), ("--gradient_checkpointing",))
    )
    mixed = plain.mix_blocks(checkpointed, 2).total

    assert (mixed.peak, mixed.flops, mixed.kernels) == (real.peak, real.flops, real.kernels)
    assert mixed.saved == pytest.approx(real.saved, rel=0.02), (
        "what all blocks share is saved by the first that needs it"
    )
    assert checkpointed.total.saved < mixed.saved < plain.total.saved


CACHES = ("--cache_latents", "--cache_text_encoder_outputs")


def test_checkpointing_is_advised_where_without_it_only_offloading_everything_fits():
    config, explicit, model = load_config(*FLUX)
    finder = LayoutFinder(config, explicit, model, 1)
    totals = {}
    for estimate in estimate_layouts(finder.find_layouts()[0], model, LARGE_BATCH, Devices(1, 2**40)):
        totals[estimate.layout.name] = estimate.memory.total
    memory = (totals["one device"] + totals["ZeRO-3 1, full offload"]) // 2
    report = search_layouts(finder, LARGE_BATCH, Devices(1, memory))
    text = report.format_text()

    assert [each.layout.name for each in report.estimates if report.fits(each)] == ["ZeRO-3 1, full offload"]
    assert report.advice and report.suggestion is None
    first = report.advice[0]
    assert first.layout.name == "one device" and "deepspeed" not in first.savings
    assert all(each.memory.total <= (1 - MARGIN) * memory for each in report.advice)
    assert "faster on one device" in text and first.flags in text
    assert report.export_json()["advice"][0]["options"] == first.flags


def test_options_that_the_user_set_stay_as_they_are():
    finder, search = build_search((*FLUX, "--no-gradient_checkpointing", "--quantize_base", "fp8"))

    assert {each.layout.config.model.quantize_base for each in search.estimate_candidates()} == {"fp8"}
    assert not any("gradient_checkpointing" in each.options for each in search.estimate_candidates())
    assert {"quantize_base", "gradient_checkpointing"} <= finder.explicit
