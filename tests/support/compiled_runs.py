"""Compiled training runs and what was compiled for them."""

from types import SimpleNamespace

import torch
from PIL import Image
from rank_processes import on_ranks
from safetensors.torch import load_file

from library.config import parse_config

SIZES = [(16 * width, 16 * height) for width in range(2, 9) for height in range(2, 9) if 9 < width * height < 29][:24]


def dataset(folder, sizes, pictures=(1, 2)):
    """Write a dataset with images of each size, alternating between these counts; the batch size is 2."""
    text = ["[general]\ncaption_extension = '.txt'\n"]
    for number, (width, height) in enumerate(sizes):
        place = folder / f"{number:02d}"
        place.mkdir(parents=True)
        for count in range(pictures[number % len(pictures)]):
            colour = (9 * number, 40 * count, 128)
            Image.linear_gradient("L").resize((width, height)).convert("RGB").point(lambda v, c=colour: v ^ c[0]).save(
                place / f"{count}.png"
            )
            (place / f"{count}.txt").write_text(f"picture {number}, " + "very " * count + "blue", "utf-8")
        text.append(
            f"[[datasets]]\nresolution = [{width}, {height}]\nbatch_size = 2\n[[datasets.subsets]]\n"
            f"image_dir = '{place}'\n"
        )
    path = folder / "sizes.toml"
    path.write_text("".join(text))
    return path


def counted(*flags):
    """Train in this process; return the LoRA file and what was compiled."""
    from library.training import run as running
    from library.training import warmup

    jobs, honest, tried, marks = [], running.train, [], []
    running.train = lambda job: (jobs.append(job), honest(job))
    rehearsed = warmup.run_forward_backward
    warmup.run_forward_backward = lambda *given: (tried.append(given), rehearsed(*given))[1]
    torch.compiler.cudagraph_mark_step_begin = lambda: marks.append(len(marks))
    settings = parse_config(
        [*flags, "--quiet", "--max_data_loader_n_workers", "0", "--learning_rate", "0.1", "--optimizer_type", "SGD"]
    ).require_valid()
    running.run_training(settings)
    found = jobs[0].compilation
    graph_counts = (
        {} if found is None else {compiler.name: compiler.graph_count for compiler in found.block_compilers.values()}
    )
    counters = torch._dynamo.utils.counters
    hits = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    lora = f"{settings.save.output_dir}/{settings.save.output_name}.safetensors"
    return SimpleNamespace(
        kinds=graph_counts,
        late=found.recompile_count if found else 0,
        is_dynamic=found and found.has_dynamic_shapes,
        begun=len(tried) + jobs[0].state.step,
        marks=len(marks),
        graphs=counters["stats"]["unique_graphs"],
        lora=lora,
        hits=hits,
    )


def trained(folder, family, data, *flags, ranks=1):
    (found, *_) = on_ranks(
        ranks,
        counted,
        "--pretrained_model_name_or_path",
        f"random:{family}:tiny",
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        *flags,
    )
    found.lora = load_file(found.lora)
    return found


COMPILED = ("--torch_compile", "--dynamo_backend", "eager")


FAMILIES = {"sd1": (), "flux": ("--t5xxl_max_token_length", "24")}
