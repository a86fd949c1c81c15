"""What is foretold of a run's memory, beside what real processes hold and what torch's allocator counts."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measured import forecast_of, peak_of_step, peak_on_rank
from ranks import on_ranks
from test_device_map import KIND, in_turn, on, pretended
from torch import nn

from benchmarks.synthetic_run import build_run, load_training_options, write_dataset
from library.config import load_options
from library.config.schema import OptimConfig
from library.distributed.layout import Layout
from library.families import FAMILIES
from library.families.detect import detect
from library.optim.optimizers import Group
from library.training.forecast.cut import Cut
from library.training.forecast.forecast import Devices, Load, forecast
from library.training.forecast.meter import Meter
from library.training.forecast.pace import Assumed
from library.training.forecast.pretence import Pretence, backward
from library.training.forecast.remembered import remembered
from library.training.forecast.stage import waiting
from library.training.forecast.ways import obstacles, ways
from library.training.forecast.ways_out import way_out
from library.training.forecast.weightless import Heaviest, Weightless

MODEL = ("--pretrained_model_name_or_path", "random:sd3:tiny", "--resolution", "64", "--gradient_accumulation_steps",
         "2")  # fmt: skip
SMALL = Heaviest((64, 64), ("a picture",))
ENCODING = ("--no-cache_latents", "--no-cache_text_encoder_outputs")
"""At each step, as training does without these words; a bench keeps what it needs."""
PARTS = ("weights", "adapters", "gradients", "optimizer")


def devices(count: int, memory: int = 2**40) -> Devices:
    return Devices(count, memory, Assumed(1e14, 25e9))


def rows_of(count: int, *words: str, heaviest: Heaviest = SMALL):
    config, given = load_training_options(words)
    return forecast(config, given, detect(config.model), Load(heaviest, 1.0), devices(count))


# weights, gradients and the optimizer


def size(tensors) -> int:
    """Of memory behind tensors, each piece once."""
    local = [getattr(each, "_local_tensor", each) for each in tensors if each is not None]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local
                if not each.is_meta}.values())  # fmt: skip


def held(folder: Path, *words: str) -> dict[str, int]:
    """Bytes on this process when the gradients of the second step are complete."""
    from library.training.loop import train

    folder = folder / os.environ.get("RANK", "0")
    folder.mkdir()
    found: dict[str, int] = {}
    with build_run(write_dataset(words, folder, 2), folder) as run:
        own = run.strategy.clip

        def counted(parameters, longest):
            if run.state.step == 1:
                model, learnt = run.strategy.unwrapped(run.adapter), run.parameters
                frozen = [each for each in model.parameters() if not each.requires_grad]
                frozen += [each.ds_tensor for each in frozen if hasattr(each, "ds_tensor")]
                inner, gradients, masters = run.optimizer, size(each.grad for each in learnt), []
                if (zero := getattr(run.optimizer, "_zero", None)) is not None:
                    flat = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
                    inner, masters = zero.optimizer, next(getattr(zero, name) for name in flat if hasattr(zero, name))
                    # of one tensor, a part of which belongs to another process, the whole may stay
                    gradients = sum(each.nbytes for group in zero.averaged_gradients.values() for each in group)
                state = [each for own in inner.state.values() for each in own.values() if torch.is_tensor(each)]
                found.update(weights=size([*frozen, *model.buffers()]), adapters=size(learnt), gradients=gradients,
                             optimizer=size([*state, *masters]))  # fmt: skip
            return own(parameters, longest)

        run.strategy.clip = counted
        train(run)
    return found


@pytest.mark.parametrize("more", [(), ("--no-network_train_unet_only",)])
def test_what_encodes_at_each_step_is_on_the_device_and_learns_nothing_but_adapters(more):
    words = (*MODEL, "--mixed_precision", "bf16", *ENCODING, *more)
    config, _ = load_training_options(words)
    one, two = (rows_of(1, *each)[0] for each in (words, (*MODEL, "--mixed_precision", "bf16")))
    family = FAMILIES.get("sd3")()
    every = family.load(config.model.pretrained_model_name_or_path, torch.bfloat16).components.values()
    parts = [part for part in every if isinstance(part, nn.Module)]
    frozen = size(each for part in parts for each in (*part.parameters(), *part.buffers()))
    assert one.need.weights == pytest.approx(frozen, rel=0.01) and two.need.weights < 0.9 * frozen
    assert (one.need.adapters > two.need.adapters) is bool(more) and one.need.adapters < frozen / 2


WAYS = {
    "DDP 2": (),
    "FSDP 2": ("--fsdp",),
    "pipeline 2": ("--pp_size", "2"),
    "tensor 2": ("--tp_size", "2"),
    "ZeRO 2, 2": ("--deepspeed", "--zero_stage", "2"),
    "ZeRO 3, 2": ("--deepspeed", "--zero_stage", "3"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("FSDP 2", "pipeline 2") else pytest.mark.long)
                                  for name in WAYS])  # fmt: skip
def test_real_processes_hold_what_was_foretold(name, tmp_path):
    if "ZeRO" in name:
        pytest.importorskip("deepspeed")
    ranks = on_ranks(2, held, tmp_path, *MODEL, *WAYS[name])
    (row,) = (row for row in rows_of(2, *MODEL, *WAYS[name]) if row.way.name == name)

    most = max(ranks, key=lambda rank: rank["weights"])
    assert {part: getattr(row.need, part) for part in PARTS} == pytest.approx(most, rel=0.03)


@pytest.mark.parametrize(("name", "arguments"), [("AdamW", ()), ("SGD", ()), ("SGDNesterov", ()), ("Prodigy", ()),
                                                 ("Adafactor", ("relative_step=False", "scale_parameter=False")),
                                                 ("AdamWScheduleFree", ())])  # fmt: skip
def test_what_an_optimizer_remembers_is_what_it_remembers_of_all_tensors(name, arguments):
    if name in ("Prodigy", "AdamWScheduleFree"):
        pytest.importorskip("pytorch_optimizer")
    config = OptimConfig(optimizer_type=name, optimizer_args=arguments, learning_rate=0.1)
    shapes = [(4, 6), (4, 6), (6, 4), (5,), (4, 6)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    from library.optim.optimizers import make_optimizer

    optimizer = make_optimizer(config, [Group("all", parameters, 0.1)])
    if hasattr(optimizer, "train"):
        optimizer.train()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, torch.Tensor)]

    assert remembered(config, [Group("all", parameters, 0.1)]) == sum(each.nbytes for each in state)


# activations


@pytest.mark.parametrize("words", [
    pytest.param(("random:sd1:tiny", "--train_batch_size", "2"), marks=pytest.mark.long),
    ("random:sd1:tiny", "--train_batch_size", "2", "--gradient_checkpointing"),
    ("random:flux:tiny", "--base_storage", "nf4", "--blocks_to_swap", "1"),
    pytest.param(("random:sd3:tiny", "--gradient_checkpointing", "--gradient_checkpointing_every", "2"),
                 marks=pytest.mark.long),
    pytest.param(("random:flux:tiny", "--gradient_checkpointing", "--gradient_checkpointing_budget", "0.5"),
                 marks=pytest.mark.long),
    pytest.param(("random:sdxl:tiny",), marks=pytest.mark.long),
    pytest.param(("random:z_image:tiny",), marks=pytest.mark.long),
], ids=" ".join)  # fmt: skip
def test_a_step_takes_what_was_foretold(words, tmp_path):
    words = ("--pretrained_model_name_or_path", *words, "--resolution", "128")
    (counted,) = on_ranks(1, peak_of_step, tmp_path, *words)

    assert forecast_of(*words) == pytest.approx(counted, rel=0.2)


@pytest.mark.parametrize(("model", "words"), [
    ("flux", ("--cp_size", "2")),
    pytest.param("sd3", ("--cp_size", "2", "--gradient_checkpointing"), marks=pytest.mark.long),
    pytest.param("z_image", ("--cp_size", "2"), marks=pytest.mark.long),
    pytest.param("flux", ("--fsdp",), marks=pytest.mark.long),
    pytest.param("flux", ("--pp_size", "2", "--gradient_accumulation_steps", "4"), marks=pytest.mark.long),
    pytest.param("flux", ("--tp_size", "2"), marks=pytest.mark.long),
])  # fmt: skip
def test_a_process_of_two_takes_what_was_foretold(model, words, tmp_path):
    words = ("--pretrained_model_name_or_path", f"random:{model}:tiny", "--resolution", "128", *words)
    counted = max(on_ranks(2, peak_on_rank, tmp_path, *words))

    assert forecast_of(*words, processes=2) == pytest.approx(counted, rel=0.2)


@pytest.mark.parametrize("model", ["flux", "sdxl", "sd3"])
def test_each_device_of_a_map_takes_what_was_foretold(model):
    """Beside devices that only pretend, which accelerate's hooks deal out to as to real ones."""
    words = ("--pretrained_model_name_or_path", f"random:{model}:tiny")
    config, _ = load_training_options(words)
    heaviest = Heaviest((256, 256), ("a picture",))
    run = Weightless(config, detect(config.model), heaviest)
    part = run.family.denoiser
    dealt = in_turn(getattr(run.pipe, part), 2)
    config, _ = load_training_options((*words, "--device_map", str(dealt)))
    foretold = Cut(config, detect(config.model), heaviest, Layout(), (2**40, 2**40)).stages

    batch, first = run.task.encode(run.batch, 0), torch.device(KIND, 0)
    with pretended(run.pipe, part, 2):
        batch = replace(batch, **{name: on(first, getattr(batch, name)) for name in ("latents", "cond", "frame",
                                                                                     "weight")})  # fmt: skip
        there = [*run.denoiser.parameters(), *run.denoiser.buffers()]
        with Meter(first, there) as one, Meter(torch.device(KIND, 1), there) as two, Pretence(None):
            said = run.family.predict(run.pipe, run.denoiser, batch.latents, torch.full((1,), 0.5, device=first), batch)
            kept = one.alive, two.alive
            backward((said.sum(),))
    most = 10**12
    assert foretold[0].activations(most) == most > foretold[1].activations(most), "the first encodes"
    assert [stage.chunks[0].kept for stage in foretold] == pytest.approx(kept, rel=0.1)
    assert [stage.activations(0) for stage in foretold] == pytest.approx([one.peak, two.peak], rel=0.2)


@pytest.mark.parametrize("model", ["flux", "sdxl", "sd3"])
def test_devices_of_a_map_have_together_what_one_has_and_what_they_hand_on(model):
    words = ("--pretrained_model_name_or_path", f"random:{model}:tiny")
    config, _ = load_training_options(words)
    model, heaviest = detect(config.model), Heaviest((256, 256), ("a picture",))
    whole = Cut(config, model, heaviest, Layout())
    dealt = in_turn(getattr(whole.run.pipe, whole.run.family.denoiser), 2)
    config, _ = load_training_options((*words, "--device_map", str(dealt)))
    parts = Cut(config, model, heaviest, Layout(), (2**40, 2**40))
    (alone,), several = whole.stages[0].chunks, [stage.chunks[0] for stage in parts.stages]

    assert sum(stage.flops for stage in parts.stages) == whole.stages[0].flops
    assert sum(stage.frozen for stage in parts.stages) == whole.stages[0].frozen
    kept = sum(chunk.kept for chunk in several)
    assert alone.kept <= kept <= alone.kept + parts.sent, "what is handed on may be kept once more, on each side"


def test_memory_counts_until_the_last_tensor_in_it_is_gone():
    before = torch.empty(100)
    with Meter(torch.device("cpu"), [before]) as meter:
        one = before.view(10, 10).exp()
        part = one[0]
        del one
        assert meter.alive == 400
        two = part + 1
        assert (meter.alive, meter.peak) == (440, 440)
        del part
        assert (meter.alive, meter.peak) == (40, 440)
        torch.mm(two.view(2, 5), two.view(5, 2))
    assert meter.flops == 2 * 2 * 5 * 2


def test_stages_together_compute_what_the_model_computes_and_a_part_less_than_the_whole():
    config, _ = load_training_options(MODEL)
    model = detect(config.model)
    whole = Cut(config, model, SMALL, Layout()).stages[0]
    halves = Cut(config, model, SMALL, Layout(stages=2)).stages
    cut = Cut(config, model, SMALL, Layout(parts=2))

    assert sum(stage.flops for stage in halves) == pytest.approx(whole.flops, rel=0.15)
    assert whole.flops / 2 < cut.stages[0].flops < 0.75 * whole.flops
    assert halves[0].departing == halves[1].arriving > 0 and cut.sent > 0
    assert all(stage.chunks[0].kept < whole.chunks[0].kept for stage in (*halves, *cut.stages))


def test_stages_that_share_tokens_deal_them_out_before_a_block_is_checkpointed(monkeypatch):
    config, _ = load_training_options((*MODEL, "--gradient_checkpointing"))
    own, kept = Weightless.passage, list[int]()

    def passage(run):
        found = own(run)
        twice = found.checkpoint
        found.checkpoint = lambda block, *given: kept.append(given[0].shape[1]) or twice(block, *given)
        return found

    monkeypatch.setattr(Weightless, "passage", passage)
    Cut(config, detect(config.model), Heaviest((256, 256), ("a picture",)), Layout(stages=2, contexts=2))
    assert set(kept) == {256 // 2}


def test_stages_cut_by_time_are_those_of_which_the_slowest_is_fastest():
    config, _ = load_training_options(("--pretrained_model_name_or_path", "random:flux:tiny"))
    by_weights, by_time = (
        Cut(replace(config, parallel=replace(config.parallel, pp_cut=way)), detect(config.model), SMALL,
            Layout(stages=2)) for way in ("weights", "time"))  # fmt: skip

    def weights(cut: Cut) -> int:
        return max(stage.frozen for stage in cut.stages)

    assert by_time.busy < by_weights.busy and weights(by_weights) < weights(by_time)


@pytest.mark.parametrize(("schedule", "expected"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]),
                                                    ("interleaved", [11, 9, 7, 5])])  # fmt: skip
def test_so_many_micro_batches_wait_in_each_stage(schedule, expected):
    assert [waiting(schedule, 4, stage, 8) for stage in range(4)] == expected


@pytest.mark.long
def test_half_precision_keeps_less_and_swapped_or_packed_weights_are_not_on_the_device():
    flux = ("--pretrained_model_name_or_path", "random:flux:tiny")
    plain, half, packed, swapped = (rows_of(1, *flux, *words)[0].need for words in (
        (), ("--mixed_precision", "bf16"), ("--base_storage", "nf4"), ("--blocks_to_swap", "2")))  # fmt: skip

    assert half.weights == plain.weights / 2 and half.activations < plain.activations
    assert packed.weights < plain.weights and swapped.weights < plain.weights
    assert plain.adapters == half.adapters == packed.adapters == swapped.adapters


# which ways there are, and what is told


def names(count: int, *words: str) -> set[str]:
    loaded = load_options(["--dataset_config", "dataset_configs/demo.toml", *words])
    return {way.name for way in ways(loaded.config, frozenset(loaded.places), count, detect(loaded.config.model))}


def whys(*words: str) -> list[str]:
    loaded = load_options(["--dataset_config", "dataset_configs/demo.toml", *words])
    return obstacles(loaded.config, frozenset(loaded.places), 2, detect(loaded.config.model))


def test_ways_are_those_that_training_would_take():
    sd3 = ("--pretrained_model_name_or_path", "random:sd3:tiny")
    zero = {"ZeRO 1, 2", "ZeRO 2, 2", "ZeRO 3, 2", "ZeRO 3, 2, all in host memory"}
    zero |= {f"ZeRO {stage}, 2, optimizer in host memory" for stage in (1, 2, 3)}
    everywhere = {"DDP 2", "FSDP 2", "FSDP 2 from host memory"}

    assert names(1, *sd3) == {"one device", "ZeRO 3, 1, all in host memory"}
    cut = {"pipeline 2", "tensor 2", "context 2", "device map 2"}
    assert names(2, *sd3) == {*everywhere, *zero, *cut}
    assert names(2, *sd3, "--tp_size", "2") == {"tensor 2"}
    assert names(2, *sd3, "--fsdp") == {"FSDP 2", "FSDP 2 from host memory"}
    assert names(2, *sd3, "--cp_size", "2") == {"context 2"}
    assert names(2, *sd3, "--device_map", "sequential") == {"device map 2"}
    assert names(2, *sd3, "--base_storage", "int8") == {"DDP 2", "context 2"}
    compiled = (*sd3, "--torch_compile", "--cp_size", "2")
    assert names(2, *compiled) == {"context 2"}
    assert names(2, *compiled, "--dynamo_mode", "max-autotune") == set()
    assert names(2, *compiled, "--gradient_checkpointing", "--gradient_checkpointing_budget", "0.5") == set()
    assert names(2, *sd3, "--optimizer_type", "Adafactor") == {*everywhere, *cut}
    loha = ("--network_module", "lycoris.kohya", "--network_args", "algo=loha")
    assert names(2, *sd3, *loha) == {*everywhere, *zero, *(cut - {"tensor 2"})}
    assert "context 2" not in names(2, "--pretrained_model_name_or_path", "random:sdxl:tiny")
    nowhere = ("--deepspeed", "--zero_stage", "3", "--offload_optimizer_device", "nvme")
    assert names(2, *sd3, *nowhere) == set()
    assert whys(*sd3, *nowhere) == [
        "--deepspeed, --zero_stage, --offload_optimizer_device: no way that can be foretold"
        " is asked for like this; leave out what says how the run is spread"
    ]
    assert names(1, *sd3, "--fsdp") == set()
    assert len(names(1, *sd3, "--deepspeed")) == 7
    (packed,) = whys(*sd3, "--tp_size", "2", "--base_storage", "nf4")
    assert packed.startswith("--base_storage: this run spreads the frozen weights over processes")
    small, whole = whys(*sd3, "--deepspeed", "--base_storage", "nf4", "--torch_compile")
    assert small.startswith("ZeRO 1, 2, ZeRO 1, 2, optimizer in host memory, ZeRO 2, 2,") and "torch_compile" in whole
    together = {"DDP 2 x tensor 2", "FSDP 2 x tensor 2", "pipeline 2 x tensor 2", "DDP 2 x pipeline 2", "HSDP 2 x 2"}
    assert together < names(4, *sd3)


def test_where_nothing_fits_switches_are_named_until_it_does():
    config, given = load_training_options(
        ("--pretrained_model_name_or_path", "random:flux:tiny", "--resolution", "128")
    )
    model, load = detect(config.model), Load(Heaviest((512, 512), ("a picture",)), 1.0)
    (row,) = forecast(config, given, model, load, devices(1), ["one device"])
    tight = replace(devices(1), memory=row.need.total - row.need.activations // 2)
    out = way_out(config, given, model, load, tight, [row])

    assert out is not None and out.row.need.total <= tight.memory
    assert set(out.words.split()) <= {"--mixed_precision", "bf16", "--gradient_checkpointing"}


def test_switches_are_named_for_the_way_that_was_asked_for():
    config, given = load_training_options(("--pretrained_model_name_or_path", "random:flux:tiny", "--cp_size", "2"))
    model, load = detect(config.model), Load(Heaviest((512, 512), ("a picture",)), 1.0)
    rows = forecast(config, given, model, load, devices(2))
    tight = replace(devices(2), memory=rows[0].need.total - rows[0].need.activations // 2)
    out = way_out(config, given, model, load, tight, rows)

    assert out is not None and out.row.way.name == "context 2" and out.row.need.total <= tight.memory


@pytest.mark.long
def test_where_no_switch_is_enough_all_are_named_with_what_still_lacks():
    config, given = load_training_options(
        ("--pretrained_model_name_or_path", "random:flux:tiny", "--resolution", "128")
    )
    model, load = detect(config.model), Load(Heaviest((512, 512), ("a picture",)), 1.0)
    (row,) = forecast(config, given, model, load, devices(1), ["one device"])
    fixed = row.need.reserve + row.need.adapters
    hopeless = way_out(config, given, model, load, devices(1, memory=fixed), [row])
    assert hopeless is not None and hopeless.row.need.total > fixed
    assert "--base_storage nf4" in hopeless.words and "int8" not in hopeless.words
    assert way_out(config, given, model, load, devices(1, memory=fixed - 1), [row]) is None


def test_a_batch_without_numbers_has_the_sizes_of_pictures_and_captions():
    config = load_options(["--pretrained_model_name_or_path", "random:z_image:tiny"]).config
    weightless = Weightless(config, detect(config.model), Heaviest((64, 96), ("short", "a much longer caption")))
    assert weightless.batch.moments.both.shape[-2:] == (12, 8)
    short, long = weightless.batch.cond["embeds"]
    assert len(short) < len(long)
