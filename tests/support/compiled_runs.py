"""Training runs with torch.compile, and counts of compiled graphs, recompilations and cache hits."""

from types import SimpleNamespace

import torch
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file

from library.config import parse_config

SIZES = [(16 * width, 16 * height) for width in range(2, 9) for height in range(2, 9) if 9 < width * height < 29][:24]


def write_dataset(folder, sizes, counts=(1, 2), batch_size=2):
    """Write a dataset with images of each size, alternating between these counts."""
    lines = ["[general]\ncaption_extension = '.txt'\n"]
    for number, (width, height) in enumerate(sizes):
        image_folder = folder / f"{number:02d}"
        image_folder.mkdir(parents=True)
        for count in range(counts[number % len(counts)]):
            color = (9 * number, 40 * count, 128)
            Image.linear_gradient("L").resize((width, height)).convert("RGB").point(lambda v, c=color: v ^ c[0]).save(
                image_folder / f"{count}.png"
            )
            (image_folder / f"{count}.txt").write_text(f"picture {number}, " + "very " * count + "blue", "utf-8")
        lines.append(
            f"[[datasets]]\nresolution = [{width}, {height}]\nbatch_size = {batch_size}\n[[datasets.subsets]]\n"
            f"image_dir = '{image_folder}'\n"
        )
    path = folder / "sizes.toml"
    path.write_text("".join(lines))
    return path


def train_and_count_graphs(*flags):
    """Train in this process; return the path of the LoRA file and the counts of compiled graphs."""
    from library.training import run as run_module
    from library.training import trial_steps

    runs, train, trial_calls, marks = [], run_module.train, [], []
    run_module.train = lambda run: (runs.append(run), train(run))
    run_forward_backward = trial_steps.run_forward_backward
    trial_steps.run_forward_backward = lambda *args: (trial_calls.append(args), run_forward_backward(*args))[1]
    torch.compiler.cudagraph_mark_step_begin = lambda: marks.append(len(marks))
    settings = parse_config(
        [
            "--network_train_unet_only",
            *flags,
            *"--quiet --max_data_loader_n_workers 0 --learning_rate 0.1 --optimizer_type SGD".split(),
        ]
    ).require_valid()
    run_module.run_training(settings)
    compilation = runs[0].compilation
    graph_counts = (
        {}
        if compilation is None
        else {compiler.name: compiler.graph_count for compiler in compilation.block_compilers.values()}
    )
    counters = torch._dynamo.utils.counters
    cache_counts = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    lora = f"{settings.save.output_dir}/{settings.save.output_name}.safetensors"
    return SimpleNamespace(
        graph_counts=graph_counts,
        recompile_count=compilation.recompile_count if compilation else 0,
        is_dynamic=compilation and compilation.has_dynamic_shapes,
        forward_count=len(trial_calls) + runs[0].state.step,
        cudagraph_marks=len(marks),
        unique_graphs=counters["stats"]["unique_graphs"],
        lora=lora,
        cache_counts=cache_counts,
    )


def train_compiled(folder, family, data, *flags, ranks=1):
    (result, *_) = run_on_ranks(
        ranks,
        train_and_count_graphs,
        "--pretrained_model_name_or_path",
        f"random:{family}:tiny",
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        *flags,
    )
    result.lora = load_file(result.lora)
    return result


COMPILED = ("--torch_compile", "--dynamo_backend", "eager")


FAMILIES = {"sd1": (), "flux": ("--t5xxl_max_token_length", "24")}
