"""Device maps: inputs reach the device of every layer, and training equals that on one device."""

import json
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from one_result import write_even_dataset
from peft import LoraConfig, get_peft_model
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from support.fake_devices import DEVICE_TYPE, dispatch_to_fake_devices, move_to_device
from tiny_pipelines import TINY
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from training_runs import max_relative_difference, train

from library.adapters.update_norms import compute_layer_update_norms, find_adapter_layers
from library.config import parse_config
from library.config.types import DeviceMap
from library.distributed.devices import Machine
from library.distributed.validate_launch import validate_device_map_launch
from library.distributed.world import World
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.loading import load_components_on_meta
from library.parallel.device_map import build_device_map, iter_weight_devices
from library.parallel.validate_engines import validate_device_map
from library.training.preflight import RunFacts, check_run_settings

MODELS = ("sd1", "sdxl", "sd3", "flux", "z_image", "qwen_image")


def empty_denoiser(model: str) -> nn.Module:
    config = parse_config(["--pretrained_model_name_or_path", f"random:{model}:tiny"]).config
    part = FAMILIES.get(model).facts.denoiser_name
    return getattr(load_components_on_meta(detect_model(config.model), (part,)), part)


def test_weights_are_balanced_or_placed_sequentially():
    model = empty_denoiser("flux")
    size = sum(tensor.nbytes for tensor in model.parameters())

    def count_bytes(preset: str, free: int) -> list[int]:
        actual = [0, 0]
        for _, tensor, number in iter_weight_devices(model, build_device_map(model, DeviceMap(preset), [free, free])):
            actual[number] += tensor.nbytes
        return actual

    even, first = count_bytes("auto", size), count_bytes("sequential", 2 * size)
    assert sum(even) == sum(first) == size
    assert min(even) > 0.25 * size and first[0] > 0.7 * size
    with pytest.raises(ConfigError, match=r"--device_map sequential: 0\.0 GiB of weights do not fit into 0\.0 \+ 0\.0"):
        count_bytes("sequential", size // 2)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "count"), [*((model, 2) for model in MODELS), ("sdxl", 3), ("flux", 4)])
def test_inputs_of_every_layer_are_on_its_device(model, count):
    tiny = TINY[model]()
    family, batch, first = FAMILIES.get(tiny.family)(), tiny.batch, torch.device(DEVICE_TYPE, 0)
    with dispatch_to_fake_devices(tiny.pipe, family.facts.denoiser_name, count) as devices:
        assert len(devices) == count
        moved = replace(
            batch,
            latents=move_to_device(first, batch.latents),
            cond=move_to_device(first, batch.cond),
            size_conditioning=move_to_device(first, batch.size_conditioning),
            loss_weights=move_to_device(first, batch.loss_weights),
        )
        t = torch.full((len(batch.latents),), 0.5, device=first)
        output = family.predict(tiny.pipe, getattr(tiny.pipe, family.facts.denoiser_name), moved.latents, t, moved)
        assert output.device == first and output.shape == batch.latents.shape
        output.sum().backward()
        weights = getattr(tiny.pipe, family.facts.denoiser_name).named_parameters()
        reached = {weight.device for name, weight in weights if weight.grad is not None}
        assert reached == {torch.device(DEVICE_TYPE, number) for number in range(count)}


def test_update_norms_of_several_devices_are_read_in_one_copy():
    adapted = get_peft_model(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0", "1"])
    )
    layers = find_adapter_layers(adapted)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for number, layer in enumerate(layers.values()):
            for module in layer.modules():
                for name, weight in list(module.named_parameters(recurse=False)):
                    fake = torch.empty(weight.shape, device=torch.device(DEVICE_TYPE, number))
                    module.register_parameter(name, nn.Parameter(fake))
        with pytest.raises(DataDependentOutputException):  # fake tensors have no data, and fail only when they are read
            compute_layer_update_norms(layers)
        assert mode is not None


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        (
            "flux",
            '{"transformer_blocks": 0, "single_transformer_blocks": 1}',
            'parameters have no device, such as time_text_embed.timestep_embedder.linear_1.weight; add "": 0',
        ),
        ("flux", '{"": 0, "blocks": 1}', "'blocks' is no module of this model"),
        (
            "sdxl",
            '{"": 0, "up_blocks.1.resnets": 1}',
            "'up_blocks.1.resnets' is inside of 'up_blocks.1', which cannot be split; map 'up_blocks.1'",
        ),
    ],
)
def test_a_device_map_that_does_not_match_the_model_is_refused(model, text, expected):
    (problem,) = format_lines(validate_device_map(empty_denoiser(model), DeviceMap.parse(text)))
    assert expected in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("even", "expected auto, balanced, sequential, or JSON such as"),
        ("{}", "expected auto, balanced"),
        (
            '{"a": "cpu"}',
            "'a': expected a device index (0, 1, ...), got 'cpu'; to keep weights in CPU memory, use blocks_to_swap",
        ),
        ('{"a": -1}', "'a': expected a device index (0, 1, ...), got -1"),
        ('{"a": true}', "'a': expected a device index (0, 1, ...), got True"),
    ],
)
def test_invalid_device_maps_are_refused(text, expected):
    problems = format_lines(parse_config(["--device_map", text]).problems)
    assert any(expected in problem for problem in problems), problems


def test_device_maps_are_refused_with_other_engines_and_too_few_devices():
    def problems(text: str, **facts: Any) -> list[str]:
        machine = Machine(device_type="cuda", device_count=facts.pop("count", 2))
        config = parse_config(["--device_map", text]).config
        world = World(device_type="cuda", machine=machine, **facts)
        return [*format_lines(validate_device_map_launch(config.parallel.device_map, config.distributed, world))]

    assert "the launcher requests DeepSpeed; use one" in problems("auto", engines=("DeepSpeed",))[0]
    assert "the launcher requests torch.compile" in problems("auto", dynamo_backend="INDUCTOR")[0]
    assert problems("auto") == [] and problems('{"": 0, "a": 1}') == []
    assert "the world size is 2; start one process, or use --pp_size" in problems("auto", world_size=2)[0]
    assert "and this process sees 1; remove it" in problems("auto", count=1)[0]
    assert "there is no device 2; this process sees devices 0 to 1" in problems('{"": 0, "a": 2}')[0]
    both = format_lines(
        parse_config(["--dataset_config", __file__, "--device_map", "auto", "--tp_size", "2", "--fsdp"]).problems
    )
    reported = [f"--device_map: cannot be combined with {other}; remove one of them" for other in ("tp_size", "fsdp")]
    assert both == reported


def train_with_device_map_on_cpu(*flags: str) -> str:
    """Train with a device map of two devices that are both the CPU, with all dispatch hooks."""
    from library.distributed import validate_launch
    from library.parallel import device_map
    from library.training import metrics

    validate_launch.validate_device_map_launch = lambda *_: []
    device_map.list_devices = lambda first: [first, first]
    peaks = cycle([5e9, 7e9])  # parameters of both devices
    metrics.get_peak_memory = lambda device: next(peaks)
    return train(*flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text", "more"),
    [
        pytest.param("sdxl", '{"": 0, "up_blocks": 1}', ("--gradient_checkpointing",), marks=pytest.mark.slow),
        ("flux", '{"": 0, "single_transformer_blocks": 1}', ("--sample_at_first", "--quantize_base", "nf4")),
        pytest.param("sd3", '{"": 0, "transformer_blocks.1": 1}', (), marks=pytest.mark.slow),
    ],
)
def test_training_and_previews_with_a_device_map_equal_those_without(model, text, more, tmp_path):
    (tmp_path / "prompts.txt").write_text("a leaf --w 64 --h 64 --s 2 --d 1\n")
    flags = (
        "--pretrained_model_name_or_path",
        f"random:{model}:tiny",
        "--dataset_config",
        str(write_even_dataset(tmp_path)),
        *(
            "--max_train_steps 4 --optimizer_type SGD --learning_rate 0.5 --mixed_precision no "
            "--train_batch_size 2 --network_dim 2"
        ).split(),
        "--sample_prompts",
        str(tmp_path / "prompts.txt"),
        *more,
    )
    (one,) = run_on_ranks(1, train, *flags, "--output_dir", str(tmp_path / "one"))
    (two,) = run_on_ranks(
        1, train_with_device_map_on_cpu, *flags, "--output_dir", str(tmp_path / "two"), "--device_map", text
    )
    assert max_relative_difference(load_file(one), load_file(two)) == 0.0
    lines = map(json.loads, (tmp_path / "two" / "lora.metrics.jsonl").read_text().splitlines())
    reported = {line["memory/peak_gb"] for line in lines if "memory/peak_gb" in line}
    assert reported == {7}, "the device with the largest peak is reported"
    previews = [[path.read_bytes() for path in (tmp_path / name / "sample").glob("*.png")] for name in ("one", "two")]
    assert previews[0] == previews[1] and len(previews[0]) == more.count("--sample_at_first")


def test_lr_free_optimizers_are_refused_with_a_device_map():
    config = parse_config(
        [
            *(
                "--pretrained_model_name_or_path random:flux:tiny --device_map auto --optimizer_type Prodigy "
                "--learning_rate 1"
            ).split(),
        ]
    ).config
    with pytest.raises(ConfigError, match="Prodigy computes its step size from all parameters"):
        check_run_settings(config, RunFacts(FAMILIES.get("flux")(), detect_model(config.model)))
