"""Full training with sharded weights (FSDP2, HSDP, ZeRO 3): equal to one process, a part of everything on each rank."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import all_options_run
import pytest
import torch
from killed_runs import train_and_kill
from one_result import save_model_with_four_heads
from PIL import Image, ImageChops
from problem_lines import format_lines
from rank_processes import run_on_ranks
from resumed_runs import copy_as_killed
from safetensors.torch import load_file
from training_runs import even_dataset, train

from library.config import parse_config
from library.distributed.validate_sharding import validate_deepspeed
from library.distributed.world import World
from library.models.families import FAMILIES as FAMILIES_BY_NAME
from library.optim.optimizers import ParamGroup, build_optimizer
from library.optim.validate_optimizer import validate_elementwise_optimizer
from library.parallel.sharded_weights import get_local_shard
from library.training.callbacks import WeightsDiverged, WeightSyncCheck, hash_tensors
from library.training.state import TrainState

__all__ = ["even_dataset"]  # a fixture

SETTINGS = (
    "--train full --max_train_steps 3 --learning_rate 1 --optimizer_type SGD --seed 3 --train_text_encoder"
    " --mixed_precision no"
).split()
FAMILIES = ("sd1", "flux")
BATCHES = {1: ("2", "2"), 2: ("1", "2"), 4: ("1", "1")}
"""The batch size and the accumulation steps that give four images in each step, by the number of ranks."""


def build_flags(dataset: Path, folder: Path, ranks: int, *flags: str) -> tuple[str, ...]:
    batch, accumulation = BATCHES[ranks]
    split = ("--train_batch_size", batch, "--gradient_accumulation_steps", accumulation)
    return (*SETTINGS, *split, "--dataset_config", str(dataset), "--output_dir", str(folder), *flags)


def train_full(dataset: Path, folder: Path, ranks: int, *flags: str, environment: dict[str, str] | None = None) -> Path:
    """Train in full on ``ranks`` ranks with four images in each step; return the folder of the model."""
    run_on_ranks(ranks, train, *build_flags(dataset, folder, ranks, *flags), environment=environment)
    return folder / "lora"


def launch_zero_3_that_keeps_nothing_gathered(folder: Path) -> dict[str, str]:
    """The environment of accelerate launch for a DeepSpeed file of ZeRO 3.

    Its defaults keep weights of up to 100,000 elements gathered, which are all of a tiny model.
    """
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json")}


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Read the weights of all components of a model."""
    found = {}
    for path in sorted(model.rglob("*.safetensors")):
        found |= {f"{path.parent.name}.{name}": tensor for name, tensor in load_file(path).items()}
    return found


def max_difference(one: Path, other: Path) -> float:
    first, second = read_weights(one), read_weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def compute_change(model: Path, family: str) -> float:
    """Compute by how much training changed the weight of the denoiser that it changed most."""
    component = {"sd1": "unet", "flux": "transformer"}[family]
    before = getattr(
        FAMILIES_BY_NAME.get(family)().load(f"random:{family}:tiny", torch.float32), component
    ).state_dict()
    after = load_file(model / component / "diffusion_pytorch_model.safetensors")
    return max(float((after[name].float() - before[name]).abs().max()) for name in after)


@pytest.fixture(scope="module")
def whole_models(even_dataset, tmp_path_factory):
    """The model that one process trains, by family."""
    folder = tmp_path_factory.mktemp("whole")
    models = {
        name: train_full(even_dataset, folder / name, 1, "--pretrained_model_name_or_path", f"random:{name}:tiny")
        for name in FAMILIES
    }
    for name, model in models.items():
        assert compute_change(model, name) > 0.05, "1e-5 is then less than a thousandth of what was learned"
    return models


ZERO_3 = "--deepspeed --zero_stage 3"
LAYOUTS = [
    (2, "--fsdp", FAMILIES),
    (2, "--fsdp --fsdp_offload_params --gradient_checkpointing --no-fsdp_reshard_after_forward", FAMILIES),
    (4, "--fsdp --dp_replicate_size 2", FAMILIES),
    (2, "--deepspeed --zero_stage 1", ("sd1",)),
    (2, "--deepspeed --zero_stage 2 --offload_optimizer_device cpu", ("flux",)),
    (2, f"{ZERO_3} --offload_optimizer_device cpu --offload_param_device cpu --gradient_checkpointing", ("flux",)),
    (2, "--cp_size 2 --train_batch_size 2", ("flux",)),
    (4, "--tp_size 2 --train_batch_size 2", ("flux",)),
    (4, "--tp_size 2 --fsdp --train_batch_size 2", FAMILIES),
    (4, "--cp_size 2 --fsdp --train_batch_size 2", ("flux",)),
    (2, "--pp_size 2 --train_batch_size 1 --gradient_accumulation_steps 4", FAMILIES),
    (4, "--pp_size 2 --train_batch_size 1 --gradient_accumulation_steps 2 --pp_schedule gpipe", ("flux",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "flags"), [(family, *layout) for *layout, families in LAYOUTS for family in families]
)
def test_sharded_training_gives_the_model_of_one_process(family, ranks, flags, even_dataset, whole_models, tmp_path):
    if "--deepspeed" in flags:
        pytest.importorskip("deepspeed")
    model = f"--pretrained_model_name_or_path random:{family}:tiny".split()
    sharded = train_full(even_dataset, tmp_path, ranks, *model, *flags.split())

    assert max_difference(whole_models[family], sharded) < 1e-5


@pytest.mark.slow
def test_a_pipeline_saves_the_frozen_weights_of_all_its_stages(even_dataset, tmp_path):
    """The last block of Qwen-Image has layers without a part in the result, which are not trained."""
    flags = "--pretrained_model_name_or_path random:qwen_image:tiny --max_train_steps 1 --train_modules attn".split()
    whole = train_full(even_dataset, tmp_path / "whole", 1, *flags)
    more = "--pp_size 2 --train_batch_size 1 --gradient_accumulation_steps 4".split()
    sharded = train_full(even_dataset, tmp_path / "sharded", 2, *flags, *more)

    assert max_difference(whole, sharded) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "more"),
    [
        *((name, 2, "--train_batch_size 2") for name in ("flux2_klein", "z_image", "lumina2", "sdxl")),
        ("sd3 with four heads", 4, "--cp_size 2 --train_batch_size 4"),
    ],
)
def test_tensor_parallelism_sums_the_gradients_of_norms_of_heads_wherever_they_are(
    family, ranks, more, even_dataset, tmp_path
):
    """FLUX.2 has them beside one fused projection."""
    model = f"random:{family}:tiny"
    if family == "sd3 with four heads":
        save_model_with_four_heads(tmp_path / "model")
        model = str(tmp_path / "model")
    flags = ("--pretrained_model_name_or_path", model, "--max_train_steps", "2")
    whole = train_full(even_dataset, tmp_path / "whole", 1, *flags)
    sharded = train_full(even_dataset, tmp_path / "sharded", ranks, *flags, "--tp_size", "2", *more.split())

    assert max_difference(whole, sharded) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--mixed_precision bf16", "--mixed_precision bf16 --full_bf16"])
def test_sharded_training_in_bf16_is_that_of_one_process_but_for_rounding(precision, even_dataset, tmp_path):
    flags = ("--pretrained_model_name_or_path", "random:sd1:tiny", *precision.split())
    whole = train_full(even_dataset, tmp_path / "whole", 1, *flags)
    sharded = train_full(even_dataset, tmp_path / "sharded", 2, *flags, "--fsdp", "--gradient_checkpointing")

    assert max_difference(whole, sharded) < 0.1 * compute_change(whole, "sd1")
    dtypes = {tensor.dtype for name, tensor in read_weights(sharded).items() if name.startswith("unet.")}
    assert dtypes == {torch.bfloat16 if "full_bf16" in precision else torch.float32}


# refused settings


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Adafactor", " (it averages over the rows and columns of each matrix)"),
        ("Prodigy", " (it computes its step size from all weights)"),
        ("AdamW8bit", " (it quantizes its state in blocks of whole tensors)"),
        ("torchao.optim.AdamW8bit", " (it quantizes its state in blocks of what each process holds)"),
        ("Muon", " (it orthogonalizes whole matrices)"),
        ("AdamWScheduleFree", " (it switches between two sets of whole weights)"),
        ("torch.optim.ASGD", ""),
    ],
)
def test_optimizers_that_need_whole_weights_are_refused_by_name_with_the_reason(name, reason):
    optim = parse_config(["--optimizer_type", name]).config.optim
    assert format_lines(validate_elementwise_optimizer(optim, "FSDP")) == [
        f"--optimizer_type {name}: needs whole tensors{reason}, but FSDP shards them over processes; use AdamW, Adam,"
        " SGD or Lion, or train lora"
    ]


@pytest.mark.quick
def test_offloading_to_files_needs_zero_stage_3_and_a_folder(tmp_path):
    files = "--offload_optimizer_device nvme --offload_optimizer_nvme_path"
    for flags, expected in {
        f"--train full {ZERO_3} --offload_optimizer_device nvme": "--offload_optimizer_device nvme: set"
        " --offload_optimizer_nvme_path, a directory on a fast disk of each machine",
        f"--train full {ZERO_3} {files} {tmp_path}/missing": f"--offload_optimizer_nvme_path {tmp_path}/missing: not a"
        " writable directory on this machine",
        f"--train full --deepspeed --zero_stage 2 {files} {tmp_path}": "--offload_optimizer_device nvme: checkpoints of"
        " ZeRO stages 1 and 2 need the optimizer state in memory; set --zero_stage 3, or use cpu",
    }.items():
        assert format_lines(validate_deepspeed(parse_config(flags.split()).config, World())) == [expected]
    for more in ("", "--offload_param_device cpu", f"{files} {tmp_path}"):
        assert not [*validate_deepspeed(parse_config(f"--train full {ZERO_3} {more}".split()).config, World())]


def build_sharded_model(*flags: str):
    """Build a small model twice, and shard the second one over two ranks; return both with the strategy."""
    from library.distributed.accelerator import prepare_accelerator
    from library.distributed.communicator import Communicator
    from library.distributed.fsdp_settings import FSDPSettings
    from library.parallel.fsdp import FSDPStrategy
    from library.parallel.strategy import StrategySettings

    config = parse_config([*flags, "--learning_rate", "0.01", "--mixed_precision", "no"]).config
    settings = StrategySettings(fsdp=FSDPSettings(1, 2), trains_base=True)
    strategy = FSDPStrategy(Communicator(prepare_accelerator(config)), settings)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        block = type("Block", (torch.nn.Sequential,), {})(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        child = type("Model", (torch.nn.Sequential,), {"_no_split_modules": ["Block"]})(block, torch.nn.Linear(3, 1))
        models.append(torch.nn.Sequential(child))
    groups = [[ParamGroup("unet", list(model.parameters()), 0.01)] for model in models]
    whole = build_optimizer(config.optim, groups[0])
    _, sharded = strategy.wrap(models[1], build_optimizer(config.optim, groups[1], is_sharded=True))
    return strategy, models, (whole, sharded)


def compute_difference(models) -> float:
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((one - other.full_tensor()).detach().abs().max()) for one, other in pairs)


def step_on_shards(name: str) -> float:
    """Take three steps with sharded and with whole weights; return the largest difference of the weights."""
    strategy, models, optimizers = build_sharded_model("--optimizer_type", name)
    for step in range(3):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model in models:
            (100 * model(inputs)).square().sum().backward()
        parameters = optimizers[1].param_groups[0]["params"]
        norms = [
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0),
            strategy.clip_grad_norm(parameters, 1.0),
        ]
        assert torch.allclose(*norms, rtol=1e-6) and norms[0] > 1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    difference = compute_difference(models)
    strategy.comm.destroy_process_group()
    return difference


@pytest.mark.slow
@pytest.mark.parametrize("name", "SGD SGDNesterov Adam AdamW Adamax NAdam RAdam RMSprop Adadelta Lion".split())
def test_elementwise_optimizers_and_clipping_give_the_same_weights_on_shards(name):
    if name == "Lion":
        pytest.importorskip("pytorch_optimizer")
    assert max(run_on_ranks(2, step_on_shards, name)) < 1e-6


def step_with_infinite_gradient(infinite_on: int) -> tuple[bool, float]:
    """Return whether an fp16 step changed the weights, and the loss scale, if a shard of one rank is infinite."""
    strategy, models, optimizers = build_sharded_model("--optimizer_type", "AdamW")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(models[1](torch.ones(1, 6)).sum()).backward()
    if strategy.comm.rank == infinite_on:
        get_local_shard(next(models[1].parameters()).grad).fill_(float("inf"))
    scaler.step(optimizers[1].optimizer)
    scaler.update()
    result = compute_difference(models) > 0, scaler.get_scale()
    strategy.comm.destroy_process_group()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("infinite_on", "expected"), [(1, (False, 2.0)), (-1, (True, 4.0))])
def test_an_infinite_gradient_in_one_shard_skips_the_step_on_all_ranks(infinite_on, expected):
    assert run_on_ranks(2, step_with_infinite_gradient, infinite_on) == [expected, expected]


@pytest.mark.quick
@pytest.mark.parametrize(("flipped", "diverged"), [(None, None), (3, "ranks? 3"), (2, "ranks? 2")])
def test_ranks_are_compared_with_those_that_hold_the_same_part(flipped, diverged):
    """Three replicas of a model that two ranks share; the ranks of a part hold equal bits."""
    weights = [torch.full((3,), float(rank % 2)) for rank in range(6)]
    if flipped is not None:
        weights[flipped][1] += 1e-6
    found = [(rank % 2, hash_tensors([weight])) for rank, weight in enumerate(weights)]
    comm = SimpleNamespace(world_size=6, all_gather_object=lambda own: found, hostnames=["a"] * 6)
    strategy = SimpleNamespace(comm=comm, shard_rank=0, shard_group=object())
    run = SimpleNamespace(strategy=strategy, ema=None, parameters=[weights[0]], state=TrainState(step=4))
    check = WeightSyncCheck(None, [])
    if diverged is None:
        check.check(run)
        assert check.last_equal_step == 4
        return
    with pytest.raises(WeightsDiverged, match=f"the weights of {diverged} .*differ from those of ranks that hold the"):
        check.check(run)


# memory


def count_local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of the memory that this rank holds for the tensors."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in map(get_local_shard, tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def train_and_measure(*flags: str) -> dict[str, float]:
    """Train; return the bytes on this rank of weights, gradients and optimizer state, by those of one process."""
    from library.training import loop

    shares = dict[str, float]()
    accumulate_gradients, clip_gradients = loop.accumulate_gradients, loop._clip_gradients

    def measure_between_steps(run, batches) -> torch.Tensor:
        weights = [*run.strategy.unwrap_model(run.model).parameters()]
        whole = sum(run.strategy.get_stand_in(each).nbytes for each in weights)
        if hasattr(weights[0], "ds_tensor"):  # of ZeRO 3, whose optimizer could have copies
            weights += [*(each.ds_tensor for each in weights), *run.parameters]
        shares["weights"] = count_local_bytes(weights) / whole
        return accumulate_gradients(run, batches)

    def measure_gradients(run) -> torch.Tensor:
        norm = clip_gradients(run)
        whole = sum(each.nbytes for each in run.parameters)
        gradients = [each.grad for each in run.parameters if each.grad is not None]
        gradients = gradients or [run.optimizer._zero.grad_partitions_flat_buffer]
        shares["gradients"] = count_local_bytes(gradients) / whole
        state = [value for each in run.optimizer.state.values() for value in each.values() if value.dim()]
        if state:
            shares["state"] = count_local_bytes(state) / sum(each.nbytes for each in state)
        return norm

    loop.accumulate_gradients, loop._clip_gradients = measure_between_steps, measure_gradients
    train(*flags)
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["--fsdp", "--deepspeed"])
def test_each_rank_holds_its_part_of_weights_gradients_and_optimizer_state(strategy, even_dataset, tmp_path):
    optimizer = "--optimizer_type AdamW --optimizer_args weight_decay=0 --learning_rate 1e-4".split()
    environment = launch_zero_3_that_keeps_nothing_gathered(tmp_path) if strategy == "--deepspeed" else {}
    flags = build_flags(even_dataset, tmp_path, 2, strategy, *optimizer)
    for shares in run_on_ranks(2, train_and_measure, *flags, environment=environment):
        assert shares.keys() == {"weights", "gradients", "state"}
        assert all(0.97 / 2 < share < 1.03 / 2 for share in shares.values()), shares


# checkpoints

RESUMED = (
    "--optimizer_type SGD --optimizer_args momentum=0.9 --learning_rate 0.3 --lr_scheduler cosine --ema_decay 0.9"
    " --max_train_steps 4 --save_every_n_steps 2 --save_state --auto_resume"
).split()


def assert_equal_to_the_bit(one: Path, other: Path) -> None:
    first, second = read_weights(one), read_weights(other)
    assert first and first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.slow
def test_a_killed_sharded_run_resumes_to_the_bit_and_on_other_ranks_with_the_same_result(even_dataset, tmp_path):
    whole = train_full(even_dataset, tmp_path / "whole", 2, *RESUMED, "--fsdp").parent
    assert max_difference(whole / "lora", whole / "lora-ema") > 1e-3
    assert len(list((whole / "lora-step00000002-state" / "shards").glob("*.safetensors"))) == 2

    killed = tmp_path / "killed"
    with pytest.raises(AssertionError):
        run_on_ranks(2, train_and_kill, (1,), 3, *build_flags(even_dataset, killed, 2, *RESUMED, "--fsdp"))
    assert (killed / "lora-step00000002-state").is_dir() and not (killed / "lora").exists()
    for name in ("alone", "more"):
        shutil.copytree(killed, tmp_path / name)

    train_full(even_dataset, killed, 2, *RESUMED, "--fsdp")
    for name in ("lora", "lora-ema", "lora-state"):
        assert_equal_to_the_bit(whole / name, killed / name)

    train_full(even_dataset, tmp_path / "alone", 1, *RESUMED)
    train_full(even_dataset, tmp_path / "more", 4, *RESUMED, "--fsdp", "--dp_replicate_size", "2")
    for name in ("alone", "more"):
        for model in ("lora", "lora-ema"):
            assert max_difference(whole / model, tmp_path / name / model) < 1e-5, (name, model)


@pytest.mark.slow
def test_a_run_of_zero_2_goes_on_from_its_checkpoint_to_the_bit(even_dataset, tmp_path):
    pytest.importorskip("deepspeed")
    zero = (*RESUMED, "--deepspeed", "--zero_stage", "2")
    whole = train_full(even_dataset, tmp_path / "whole", 2, *zero).parent
    copies = [copy_as_killed(whole, tmp_path / name, 2) for name in ("resumed", "alone")]
    for folder in copies:
        for name in ("lora", "lora-ema"):
            shutil.rmtree(folder / name)

    train_full(even_dataset, copies[0], 2, *zero)
    for name in ("lora", "lora-ema", "lora-state"):
        assert_equal_to_the_bit(whole / name, copies[0] / name)
    train_full(even_dataset, copies[1], 1, *RESUMED)
    assert max_difference(whole / "lora", copies[1] / "lora") < 1e-5


@pytest.mark.slow
def test_a_run_of_zero_3_goes_on_to_the_bit_and_with_another_strategy_with_the_same_result(even_dataset, tmp_path):
    pytest.importorskip("deepspeed")
    environment = launch_zero_3_that_keeps_nothing_gathered(tmp_path)
    whole = train_full(even_dataset, tmp_path / "whole", 2, *RESUMED, "--deepspeed", environment=environment).parent
    copies = {name: copy_as_killed(whole, tmp_path / name, 2) for name in ("resumed", "alone", "fsdp")}
    for folder in copies.values():
        for name in ("lora", "lora-ema"):
            shutil.rmtree(folder / name)

    train_full(even_dataset, copies["resumed"], 2, *RESUMED, "--deepspeed", environment=environment)
    for name in ("lora", "lora-ema", "lora-state"):
        assert_equal_to_the_bit(whole / name, copies["resumed"] / name)
    train_full(even_dataset, copies["alone"], 1, *RESUMED)
    train_full(even_dataset, copies["fsdp"], 2, *RESUMED, "--fsdp")
    for name in ("alone", "fsdp"):
        for model in ("lora", "lora-ema"):
            assert max_difference(whole / model, copies[name] / model) < 1e-5, (name, model)


def train_in_files(*flags: str) -> tuple[str, int]:
    """Train with even small tensors in files; return the file that was saved, and the bytes that are in files."""
    from library.parallel.deepspeed import mapped_memory
    from library.training import loop

    mapped_memory.MIN_BYTES, clip, sizes = 1, loop._clip_gradients, [0]

    def measure(*args):
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").open() if "/lorikeet-memory-" in line]
        sizes.append(sum(int(end, 16) - int(start, 16) for start, end in ranges))
        return clip(*args)

    loop._clip_gradients = measure
    return train(*flags), sizes[-1]


@pytest.mark.slow
def test_offloading_to_files_is_offloading_to_memory_to_the_bit_and_is_resumed(even_dataset, tmp_path):
    pytest.importorskip("deepspeed")
    environment = launch_zero_3_that_keeps_nothing_gathered(tmp_path)
    (tmp_path / "disk").mkdir()
    kinds = ("optimizer", "param")
    memory = [word for kind in kinds for word in (f"--offload_{kind}_device", "cpu")]
    files = [word for kind in kinds for word in (f"--offload_{kind}_device", "nvme")]
    files += [word for kind in kinds for word in (f"--offload_{kind}_nvme_path", str(tmp_path / "disk"))]
    adamw = (*RESUMED, "--optimizer_type", "AdamW", "--optimizer_args", "weight_decay=0.01", "--learning_rate", "1e-3")

    def run(name: str, *flags: str) -> list[tuple[str, int]]:
        words = build_flags(even_dataset, tmp_path / name, 2, *adamw, "--deepspeed", *flags)
        return run_on_ranks(2, train_in_files, *words, environment=environment)

    assert all(size == 0 for _, size in run("memory", *memory))
    sizes = [size for _, size in run("files", *files)]
    trained = load_file(tmp_path / "files" / "lora" / "unet" / "diffusion_pytorch_model.safetensors")
    weights = sum(each.nbytes for each in trained.values())
    # Weights, their copy that is updated, its gradients twice, and two moments, of which each rank has half.
    assert all(size > 5.5 * weights / 2 for size in sizes), (sizes, weights)
    for name in ("lora", "lora-ema", "lora-state"):
        assert_equal_to_the_bit(tmp_path / "memory" / name, tmp_path / "files" / name)
    resumed = copy_as_killed(tmp_path / "files", tmp_path / "resumed", 2)
    for name in ("lora", "lora-ema"):
        shutil.rmtree(resumed / name)
    run("resumed", *files)
    for name in ("lora", "lora-ema", "lora-state"):
        assert_equal_to_the_bit(tmp_path / "memory" / name, resumed / name)
    assert not [*(tmp_path / "disk").glob("lorikeet-memory-*")]


@pytest.mark.slow
def test_a_tensor_parallel_run_goes_on_from_its_checkpoint_to_the_bit_and_one_process_from_it(even_dataset, tmp_path):
    flags = (*RESUMED, *"--pretrained_model_name_or_path random:flux:tiny --train_modules attn".split())
    parallel = (*flags, *"--tp_size 2 --train_batch_size 2".split())
    whole = train_full(even_dataset, tmp_path / "whole", 2, *parallel).parent
    copies = {name: copy_as_killed(whole, tmp_path / name, 2) for name in ("resumed", "alone")}
    for folder in copies.values():
        for name in ("lora", "lora-ema"):
            shutil.rmtree(folder / name)

    train_full(even_dataset, copies["resumed"], 2, *parallel)
    for name in ("lora", "lora-ema", "lora-state"):
        assert_equal_to_the_bit(whole / name, copies["resumed"] / name)
    train_full(even_dataset, copies["alone"], 1, *flags)
    for name in ("lora", "lora-ema"):
        assert max_difference(whole / name, copies["alone"] / name) < 1e-5


@pytest.mark.slow
def test_a_sharded_run_goes_on_from_the_checkpoint_of_one_process(even_dataset, tmp_path):
    flags = (*RESUMED, "--train_modules", "attn")  # blocks then have trained and frozen weights
    whole = train_full(even_dataset, tmp_path / "whole", 1, *flags).parent
    resumed = copy_as_killed(whole, tmp_path / "resumed", 2)
    for name in ("lora", "lora-ema"):
        shutil.rmtree(resumed / name)

    train_full(even_dataset, resumed, 2, *flags, "--fsdp")
    for name in ("lora", "lora-ema"):
        assert max_difference(whole / name, resumed / name) < 1e-5


# between the steps


@pytest.mark.slow
def test_validation_previews_and_averaged_weights_are_those_of_ddp(tmp_path):
    """Weights that were gathered for one of them are freed before the next step, and before the average is taken."""
    flags = all_options_run.build_flags(tmp_path / "data")
    flags = (*flags, *"--optimizer_type SGD --learning_rate 1 --ema_decay 0.5 --clip_skip 2".split())
    flags = tuple(flag for flag in flags if flag not in ("--scale_weight_norms", "0.05"))
    strategies = {"ddp": "", "fsdp": "--fsdp --no-fsdp_reshard_after_forward", "zero": ZERO_3}
    for name, more in strategies.items():
        run_on_ranks(2, train, *SETTINGS, *flags, "--output_dir", str(tmp_path / name), *more.split())

    for sharded in ("fsdp", "zero"):
        folders = tmp_path / "ddp", tmp_path / sharded
        for name in ("lora", "lora-ema"):
            assert max_difference(*(folder / name for folder in folders)) < 1e-5
        losses = [all_options_run.read_validation_losses(folder) for folder in folders]
        assert len(losses[0]) == len(losses[1]) == 3
        for one, other in zip(*losses, strict=True):
            assert other == pytest.approx(one, rel=1e-4)
        previews = [sorted((folder / "sample").glob("*.png")) for folder in folders]
        assert len(previews[0]) == len(previews[1]) == 6
        for pair in zip(*previews, strict=True):
            if "_000000_" in pair[0].name:  # DeepSpeed's gathered weights have other addresses, and other rounding
                extrema = ImageChops.difference(*map(Image.open, pair)).getextrema()
                assert max(most for _, most in extrema) <= (2 if sharded == "zero" else 0)
