"""Parallel strategies with two processes on one device, and alone with NCCL, against one process."""

from collections.abc import Iterator, Mapping, Sequence

from ..report import Measurement
from ..synthetic_run import write_dataset
from .sections import SectionContext
from .training_commands import TrainingCommand, compare_weights, run_commands

MAX_DIFFERENCE, MAX_DIFFERENCE_CUDA = 1e-5, 1e-4
"""Of the largest weight of a tensor, after all steps; cuBLAS chooses other kernels for each shape of a batch."""
SECONDS = 70
"""Of all runs; one that hangs must not take the others' results with it."""
STEPS = 8
MODEL = "--pretrained_model_name_or_path random:flux:tiny --resolution 64 --network_dim 4".split()
SETTINGS = "--optimizer_type SGD --learning_rate 0.5 --mixed_precision no --seed 3".split()
GLOO = "from library.distributed import process_group; process_group.select_backend = lambda *_: 'gloo'"
"""NCCL refuses two processes on one device."""
STAGING = "from benchmarks.gpu.host_staging import stage_point_to_point; stage_point_to_point()"
REFUSALS = ("duplicate gpu", "invalid usage")
LAYOUTS: Mapping[str, Sequence[str]] = {
    "DDP": ("--train_batch_size", "2"),
    "FSDP": ("--train_batch_size", "2", "--fsdp"),
    "TP": ("--train_batch_size", "4", "--tp_size", "2"),
    "CP": ("--train_batch_size", "4", "--cp_size", "2"),
    "PP": ("--train_batch_size", "2", "--gradient_accumulation_steps", "2", "--pp_size", "2"),
}


def compare_layouts(context: SectionContext) -> Iterator[Measurement]:
    """Train the same eight steps in each layout."""
    argv = write_dataset([*MODEL, *SETTINGS], context.directory, STEPS)
    names = ("DDP", "PP") if context.is_tiny else tuple(LAYOUTS)
    runs = {
        "one process": TrainingCommand(
            context.directory / "one", [*argv, "--train_batch_size", "4"], context.environment
        )
    }
    for name in names:
        folder = context.directory / name
        options = [*argv, *LAYOUTS[name]]
        setup = f"{GLOO}\n{STAGING}" if name == "PP" else GLOO
        runs[f"{name}, 2 over gloo"] = TrainingCommand(folder, options, context.environment, 2, setup)
    if context.device_type == "cuda":
        nccl = [*argv, "--train_batch_size", "4"]
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
        for name, options in (("DDP", []), ("FSDP", ["--fsdp"])):
            folder = context.directory / f"{name}_nccl"
            runs[f"{name}, 1 over NCCL"] = TrainingCommand(
                folder, [*nccl, *options], {**alone, "MASTER_PORT": f"2954{len(runs)}"}
            )
        folder = context.directory / "ddp_nccl_2"
        runs["DDP, 2 over NCCL"] = TrainingCommand(folder, [*argv, *LAYOUTS["DDP"]], {"NCCL_DEBUG": "WARN"}, 2)
    run_commands(list(runs.values()), at_once=context.choose(len(runs), 2), seconds=SECONDS)
    reference = runs.pop("one process")
    if reference.failure:
        yield Measurement("one process", [], note=reference.failure)
        return
    expected = reference.load()
    for name, run in runs.items():
        title = f"{name}: largest difference"
        if run.failure:
            is_known = name == "DDP, 2 over NCCL" and any(each in run.log.lower() for each in REFUSALS)
            yield Measurement(title, [], note="NCCL refuses two processes on one device" if is_known else run.failure)
            continue
        _, difference = compare_weights(run.load(), expected)
        limit = MAX_DIFFERENCE_CUDA if context.device_type == "cuda" else MAX_DIFFERENCE
        yield Measurement(title, [difference], at_most=limit)
