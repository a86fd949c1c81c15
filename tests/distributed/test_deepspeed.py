"""DeepSpeed ZeRO: the same adapter, checkpoints that any strategy resumes, and sharded memory."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import all_options_run
import pytest
import torch
from all_options_run import read_validation_losses
from nan_runs import train_with_nan_loss
from PIL import Image, ImageChops
from rank_processes import run_on_ranks
from resumed_runs import copy_as_killed
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config

pytest.importorskip("deepspeed")
ROOT = Path(__file__).resolve().parents[2]
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def build_zero_flags(stage: int) -> tuple[str, ...]:
    return ("--deepspeed", "--zero_stage", str(stage))


def launch_with_config_file(folder: Path, **more) -> dict[str, str]:
    """The environment of accelerate launch for stage 3 with a DeepSpeed config file.

    Without ``stage3_max_reuse_distance`` DeepSpeed keeps all weights of a tiny model gathered.
    """
    (folder / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, **more}})
    )
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json")}


# equal adapters


@pytest.fixture(scope="module")
def even_dataset(tmp_path_factory) -> Path:
    """The dataset file of two buckets that divide evenly into steps of four."""
    return write_images(tmp_path_factory.mktemp("even"), {(96, 64): 8, (64, 96): 4})


def train_adapter(
    folder: Path, data: Path, ranks: int, batch: int, *flags: str, environment: dict[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Train on four images per step, text encoder included."""
    files = run_on_ranks(
        ranks,
        train,
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        "--train_batch_size",
        str(batch),
        "--gradient_accumulation_steps",
        str(4 // (ranks * batch)),
        *"--max_train_steps 3 --network_dim 4 --network_alpha 3 --no-network_train_unet_only".split(),
        *flags,
        environment=environment,
    )
    return load_file(files[0])


OPTIMIZERS = {
    "SGD": ("--optimizer_type", "SGD", "--learning_rate", "0.5"),
    "AdamW": ("--learning_rate", "1e-3", "--optimizer_args", "weight_decay=0.1", "eps=1e-4"),
}


@pytest.fixture(scope="module")
def references(even_dataset, tmp_path_factory):
    return {
        name: train_adapter(tmp_path_factory.mktemp(name), even_dataset, 1, 4, *flags)
        for name, flags in OPTIMIZERS.items()
    }


@pytest.mark.slow
def test_zero_1_and_2_train_the_adapter_of_one_process(even_dataset, references, tmp_path):
    actual = train_adapter(tmp_path, even_dataset, 2, 2, *OPTIMIZERS["AdamW"], *build_zero_flags(1))
    assert max_relative_difference(references["AdamW"], actual) < 1e-4

    actual = train_adapter(
        tmp_path, even_dataset, 2, 1, *OPTIMIZERS["SGD"], *build_zero_flags(2), "--offload_optimizer_device", "cpu"
    )
    assert max_relative_difference(references["SGD"], actual) < 1e-4


def test_zero_3_with_cpu_offload_trains_the_adapter_of_one_process(even_dataset, references, tmp_path):
    actual = train_adapter(
        tmp_path,
        even_dataset,
        2,
        1,
        *OPTIMIZERS["SGD"],
        "--gradient_checkpointing",
        environment=launch_with_config_file(tmp_path, **HOST),
    )

    assert max_relative_difference(references["SGD"], actual) < 1e-4
    assert any(key.startswith("lora_te") and bool(tensor.any()) for key, tensor in actual.items() if "up" in key)


def test_zero_3_with_one_process_trains_the_same_adapter(even_dataset, references, tmp_path):
    actual = train_adapter(
        tmp_path, even_dataset, 1, 4, *OPTIMIZERS["SGD"], environment=launch_with_config_file(tmp_path, **HOST)
    )

    assert max_relative_difference(references["SGD"], actual) < 1e-4


# previews, validation, EMA and NaN steps


@pytest.fixture(scope="module")
def ddp_and_zero_folders(tmp_path_factory) -> dict[str, Path]:
    """The output directories of two runs with all options, with DDP and with ZeRO 3."""
    folder = tmp_path_factory.mktemp("both")
    flags = (
        *all_options_run.build_flags(folder),
        *("--no-network_train_unet_only --optimizer_type AdamW --optimizer_args eps=1e-4 --learning_rate 1e-2").split(),
    )
    for name, environment in {"ddp": {}, "zero": launch_with_config_file(folder)}.items():
        run_on_ranks(2, train, *flags, "--output_dir", str(folder / name), environment=environment)
    return {name: folder / name for name in ("ddp", "zero")}


@pytest.mark.parametrize("name", ["lora", "lora-ema"])
@pytest.mark.slow
def test_max_norm_and_ema_equal_those_of_ddp(ddp_and_zero_folders, name):
    ddp, zero3 = (load_file(folder / f"{name}.safetensors") for folder in ddp_and_zero_folders.values())

    assert max_relative_difference(ddp, zero3) < 1e-3


@pytest.mark.slow
def test_previews_and_validation_losses_equal_those_of_ddp(ddp_and_zero_folders):
    """Up to rounding, which depends on the memory layout of gathered weights."""
    previews = [sorted((folder / "sample").glob("*.png")) for folder in ddp_and_zero_folders.values()]
    assert [len(paths) for paths in previews] == [6, 6]
    for ddp, zero3 in [pair for pair in zip(*previews, strict=True) if "_000000_" in pair[0].name]:
        difference_by_channel = ImageChops.difference(Image.open(ddp), Image.open(zero3)).getextrema()
        assert max(most for _, most in difference_by_channel) <= 2

    ddp, zero3 = (read_validation_losses(folder) for folder in ddp_and_zero_folders.values())
    assert len(ddp) == len(zero3) == 3
    for one, other in zip(ddp, zero3, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_a_nan_step_on_one_rank_is_skipped_on_all(even_dataset, tmp_path):
    """With SGD this equals a learning rate of 0 in that step."""
    flags = (
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path),
        *"--optimizer_type SGD --learning_rate 0.5 --max_train_steps 3 --network_dim 2".split(),
    )
    expected = run_on_ranks(
        1,
        train,
        *flags,
        *(
            "--train_batch_size 2 --output_name expected --lr_scheduler piecewise_constant "
            "--lr_scheduler_args step_rules=1:1,0:2,1"
        ).split(),
    )
    for stage, more, environment in ((1, build_zero_flags(1), {}), (3, (), launch_with_config_file(tmp_path))):
        bad = run_on_ranks(
            2,
            train_with_nan_loss,
            1,
            1,
            False,
            *flags,
            *more,
            "--output_name",
            f"bad{stage}",
            environment=environment,
        )
        assert max_relative_difference(load_file(bad[0]), load_file(expected[0])) < 1e-4


# checkpoints


def test_resume_is_exact_and_works_across_strategies(even_dataset, tmp_path):
    flags = (
        *(
            "--max_train_steps 4 --learning_rate 1e-3 --optimizer_args eps=1e-4 --save_every_n_steps 1 "
            "--save_state --auto_resume"
        ).split(),
    )
    one = train_adapter(tmp_path / "one", even_dataset, 1, 4, *flags)
    two = train_adapter(
        copy_as_killed(tmp_path / "one", tmp_path / "two", 1), even_dataset, 2, 2, *flags, *build_zero_flags(2)
    )
    second = train_adapter(
        copy_as_killed(tmp_path / "two", tmp_path / "again", 2), even_dataset, 2, 2, *flags, *build_zero_flags(2)
    )
    three = train_adapter(
        copy_as_killed(tmp_path / "two", tmp_path / "three", 2),
        even_dataset,
        2,
        2,
        *flags,
        environment=launch_with_config_file(tmp_path),
    )
    ddp = train_adapter(copy_as_killed(tmp_path / "three", tmp_path / "ddp", 3), even_dataset, 2, 2, *flags)

    assert max_relative_difference(two, second) == 0.0
    assert max(max_relative_difference(one, actual) for actual in (two, three, ddp)) < 1e-4


# memory


def measure_memory(stage: int) -> tuple[int, int, int]:
    """Return the bytes of all frozen weights, of those on this rank, and of surplus master weights."""
    from library.distributed.accelerator import prepare_accelerator
    from library.distributed.communicator import Communicator
    from library.distributed.deepspeed_settings import DeepSpeedSettings
    from library.models.families import FAMILIES
    from library.parallel.deepspeed.engine import DeepSpeedStrategy
    from library.parallel.strategy import StrategySettings
    from library.training.trainable_modules import build_trainable_modules

    comm = Communicator(prepare_accelerator(parse_config([]).config))
    strategy = DeepSpeedStrategy(comm, StrategySettings(deepspeed=DeepSpeedSettings(stage)))
    family = FAMILIES.get("flux")()
    trained, _ = build_trainable_modules(
        parse_config(["--network_train_unet_only"]).config, family, family.load("random:flux:tiny", torch.float32)
    )
    own = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in trained.parameters() if not parameter.requires_grad]
    total = sum(parameter.nbytes for parameter in frozen)
    _, optimizer = strategy.wrap(trained, torch.optim.AdamW(own))
    shards = [*frozen, *(parameter.ds_tensor for parameter in frozen)]
    local_bytes = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in shards}.values())
    masters = {piece.flat.data_ptr(): piece.flat.nbytes for piece in optimizer._shards}
    strategy.close()
    strategy.comm.destroy_process_group()
    return (
        total,
        local_bytes,
        sum(masters.values()) - sum(parameter.nbytes for parameter in own) // strategy.comm.world_size,
    )


@pytest.mark.quick
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_holds_its_shard_of_the_frozen_model(size):
    actual = run_on_ranks(size, measure_memory, 3)

    for total, local_bytes, surplus in actual:
        assert local_bytes < 1.05 * total / size
        assert surplus < 0.01 * total


# DeepSpeed's public functions, as the truth about parameters and state


def compare_with_public_functions(stage: int) -> list[str]:
    """Step, write the parameters and load a state dict; return where DeepSpeed's functions see other values."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from library.distributed.accelerator import prepare_accelerator
    from library.distributed.communicator import Communicator
    from library.distributed.deepspeed_settings import DeepSpeedSettings
    from library.parallel.deepspeed.engine import DeepSpeedStrategy
    from library.parallel.strategy import StrategySettings

    comm = Communicator(prepare_accelerator(parse_config([]).config))
    strategy = DeepSpeedStrategy(comm, StrategySettings(deepspeed=DeepSpeedSettings(stage)))
    model = torch.nn.Module()
    shapes = [(4, 6), (5, 3), (1,), (7, 2), (3, 3)]  # sizes that two ranks do not divide, and one that a rank lacks
    torch.manual_seed(0)
    model.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes)
    model.forward = lambda factor: sum((weight.square().sum() for weight in model.weights), factor)
    groups = [{"params": list(model.weights[:2])}, {"params": list(model.weights[2:]), "lr": 0.1}]
    wrapped, optimizer = strategy.wrap(model, torch.optim.AdamW(groups))
    differences = []

    def compare(moment: str) -> None:
        state, zero = optimizer.state_dict()["state"], strategy._engine.optimizer
        if stage < 3:  # DeepSpeed links the state when only the first group has stepped, and not after a load
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        for index, weight in enumerate(optimizer.parameters):
            pairs = {"fp32": (weight.detach(), safe_get_full_fp32_param(weight))}
            for name in ("exp_avg", "exp_avg_sq"):
                pairs[name] = state[index][name], safe_get_full_optimizer_state(weight, name)
            for name, (ours, theirs) in pairs.items():
                if not (ours.any() and torch.equal(ours, theirs.view_as(ours))):
                    differences.append(f"{moment}: {name} of {tuple(weight.shape)}")

    def run_step() -> None:
        strategy._engine.set_gradient_accumulation_boundary(True)
        strategy._engine.backward(wrapped(torch.ones(())))
        optimizer.clip_in_next_step(1.0)
        optimizer.step()

    run_step()
    compare("after a step")
    saved = optimizer.state_dict()
    with torch.no_grad():
        for weight in optimizer.parameters:
            weight.mul_(3)
    strategy.sync_master_weights()
    compare("after writing parameters")
    run_step()
    optimizer.load_state_dict(saved)
    run_step()
    compare("after loading state")
    strategy.close()
    comm.destroy_process_group()
    return differences


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_and_state_are_those_that_deepspeeds_public_functions_return(stage):
    assert run_on_ranks(2, compare_with_public_functions, stage) == [[], []]


def train_a_weight_without_a_gradient(offload: str | None) -> float:
    """Take a step with two weights, and a step with the first of them; return by how much that changed the second."""
    from library.distributed.accelerator import prepare_accelerator
    from library.distributed.communicator import Communicator
    from library.distributed.deepspeed_settings import DeepSpeedSettings
    from library.parallel.deepspeed.engine import DeepSpeedStrategy
    from library.parallel.strategy import StrategySettings

    comm = Communicator(prepare_accelerator(parse_config([]).config))
    settings = DeepSpeedSettings(3, offload_optimizer_device=offload)
    strategy = DeepSpeedStrategy(comm, StrategySettings(deepspeed=settings))
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(size)) for size in (6, 4))
    model.forward = lambda count: sum(weight.square().sum() for weight in list(model.weights)[:count])
    wrapped, optimizer = strategy.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values = []
    for count in (2, 1):
        strategy._engine.set_gradient_accumulation_boundary(True)
        strategy._engine.backward(wrapped(count))
        optimizer.clip_in_next_step(0.0)
        optimizer.step()
        values.append(model.weights[1].detach().clone())
    assert torch.allclose(values[0], torch.full((4,), 0.8))
    strategy.close()
    comm.destroy_process_group()
    return float((values[1] - values[0]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_weight_without_a_gradient_is_not_updated_by_that_of_a_former_step(offload):
    assert run_on_ranks(2, train_a_weight_without_a_gradient, offload) == [0.0, 0.0]


# optimizer offload


def clip_offloaded_gradient(stage: int) -> tuple[str, list[float]]:
    """Clip an offloaded gradient with DeepSpeed's own function while the run is on another device."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from library.parallel.deepspeed.zero_optimizer import DeepSpeedOptimizer

    weight = torch.nn.Parameter(torch.zeros(2))
    weight._hp_mapping = None
    flat = torch.zeros(2)
    flat.grad = torch.tensor([3.0, 4.0])
    build_zero_flags = SimpleNamespace(
        optimizer=torch.optim.SGD([weight]),
        loss_scale=1.0,
        clip_grad=0.0,
        device="cpu",
        scaled_global_norm=lambda norm_type=2: flat.grad.norm(),
        single_partition_of_fp32_groups=[],
        _get_norm_groups=lambda: [flat.grad.norm()],
        fp32_partitioned_groups_flat=[flat],
        grad_position={0: (0, 0, 0)},
        get_param_id=lambda parameter: 0,
    )
    engine = SimpleNamespace(optimizer=build_zero_flags, global_rank=0, zero_optimization_stage=lambda: stage)
    ours = DeepSpeedOptimizer(engine, [{"params": [weight], "lr": 0.1}], torch.device("meta"))
    norm = ours.clip_in_next_step(1.0)
    if stage == 3:
        (handed,) = build_zero_flags._get_norm_groups()
        DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads(build_zero_flags, 0, handed)
    else:
        DeepSpeedZeroOptimizer.unscale_and_clip_grads(
            build_zero_flags, [flat.grad], build_zero_flags.scaled_global_norm()
        )
    return norm.device.type, flat.grad.tolist()


@pytest.mark.parametrize("stage", [2, 3])
def test_an_offloaded_gradient_is_clipped_in_host_memory(stage):
    ((device, gradient),) = run_on_ranks(1, clip_offloaded_gradient, stage)

    assert device == "meta" and gradient == pytest.approx([0.6, 0.8], rel=1e-5)


# accelerate launch


def test_accelerate_launch_with_a_deepspeed_config_file(even_dataset, tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
            }
        )
    )
    launch = shlex.split(
        "launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 2 --num_machines 1"
        " --mixed_precision no --dynamo_backend no --main_process_port 0"
    )
    words = [
        str(Path(sys.executable).parent / "accelerate"),
        *launch,
        str(ROOT / "train_lora.py"),
        "--dataset_config",
        str(even_dataset),
        "--pretrained_model_name_or_path",
        "random:flux:tiny",
        "--output_dir",
        str(tmp_path / "out"),
        *"--network_train_unet_only --max_train_steps 1 --train_batch_size 2".split(),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_", "DS_"))}
    result = subprocess.run(
        words,
        cwd=tmp_path,
        timeout=300,
        capture_output=True,
        text=True,
        env={**clean, "HF_HOME": str(tmp_path / "home"), "ACCELERATE_USE_CPU": "true"},
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "DeepSpeed: ZeRO stage 2, world size 2, optimizer offloaded to host memory" in result.stdout + result.stderr
