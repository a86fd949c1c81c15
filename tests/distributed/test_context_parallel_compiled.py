"""Compiled context-parallel blocks: one graph, all-to-all included, for changing sizes."""

import pytest
import torch
import torch.distributed as dist
from compiled_runs import COMPILED, FAMILIES, SIZES, train_compiled, write_dataset
from rank_processes import run_on_ranks
from torch import nn
from torch.nn import functional
from training_runs import max_relative_difference, write_prompts

from library.adapters.lora_dropout import LoraDropout
from library.parallel.compile import Compilation
from library.parallel.context_parallel import ContextParallel
from library.parallel.parallel_plan import BlockSequence, ParallelPlan
from library.parallel.ulysses import ProcessGroupAllToAll

LONG = pytest.mark.slow
WIDTH, HEADS = 12, 6
FLOW = ("text", "image")
LENGTHS = [(5, 12), (5, 9), (5, 17), (5, 30), (5, 11), (5, 31)]


class Block(nn.Module):
    """Joint attention of text and image, and a second attention of the image (as SD3.5)."""

    def __init__(self):
        super().__init__()
        self.both, self.alone = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, text, image):
        both = torch.cat((text, image), 1)
        output = attention(self.both(both))
        text, image = (both + output).split([text.shape[1], image.shape[1]], 1)
        return text, image + attention(self.alone(image))


def attention(qkv):
    query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in qkv.chunk(3, -1))
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, text, image):
        for block in self.blocks:
            text, image = block(text, image)
        return torch.cat((text, image), 1)


def train_steps(backend: str | None, dynamic: str):
    """Return outputs and mean gradients for several sizes, graphs per block class, and the number of recompiles."""
    if dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, compilation = Model(), None
    dropout = LoraDropout(0.3, 0.0, 0.0)
    dropout.sample_keys = torch.arange(2) * 7919
    structure = ParallelPlan(BlockSequence(tuple(model.blocks), FLOW), layer_token_streams={})
    if backend is not None:
        compilation = Compilation(dynamic, {"backend": backend})
        compilation.compile_blocks(model)
    mark_dynamic = compilation.mark_dynamic if compilation else lambda tensor: None
    context_parallel = ContextParallel(ProcessGroupAllToAll(dist.group.WORLD), mark_dynamic)
    context_parallel.wrap_blocks(model, structure)
    context_parallel.wrap_sequence_ends()
    for block in model.blocks:  # as if all layers were lora_A
        block.both.token_streams, block.alone.token_streams = FLOW, FLOW[1:]
    dropout.get_sharded_tokens = context_parallel.get_sharded_tokens
    dropout.attach(layer for block in model.blocks for layer in (block.both, block.alone))
    if compilation:
        with compilation.record_shapes(), torch.no_grad():
            for lengths in (min(LENGTHS), max(LENGTHS)):
                model(*build_inputs(lengths))
        compilation.choose_dynamic_shapes(len(LENGTHS), texts_vary=False)
    actual = []
    for number, lengths in enumerate(LENGTHS * 2):
        if compilation and number == len(LENGTHS):
            compilation.finish_warmup()
        model.zero_grad()
        output = model(*build_inputs(lengths))
        output.square().mean().backward()
        gradients = torch.cat([item.grad.flatten() for item in model.parameters()])
        dist.all_reduce(gradients)
        actual.append((output.detach(), gradients / dist.get_world_size()))
    graphs = {kind.name: kind.graph_count for kind in compilation.block_compilers.values()} if compilation else {}
    return actual, graphs, compilation.recompile_count if compilation else 0


def build_inputs(lengths):
    draw = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(2, length, WIDTH, generator=draw) for length in lengths]


def compare_with_eager(backend, dynamic):
    """Return the number of graphs and recompiles, and the largest difference to eager outputs and gradients."""
    plain, _, _ = train_steps(None, "")
    actual, graphs, recompiles = train_steps(backend, dynamic)
    max_difference = max(
        (ours - theirs).abs().max().item()
        for one, other in zip(actual, plain, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    )
    return sum(graphs.values()), recompiles, max_difference


@pytest.mark.parametrize(
    ("backend", "dynamic", "ranks", "max_graphs"),
    [
        ("eager", "true", 2, 2),
        pytest.param("aot_eager", "false", 2, 2 * len(set(LENGTHS)), marks=LONG),
    ],
)
def test_a_compiled_context_parallel_block_is_one_graph_and_equals_eager(backend, dynamic, ranks, max_graphs):
    for graphs, recompiles, max_difference in run_on_ranks(ranks, compare_with_eager, backend, dynamic):
        assert 1 <= graphs <= max_graphs and recompiles == 0
        assert max_difference < 1e-6


@LONG
@pytest.mark.parametrize(
    ("family", "backend", "flags"),
    [
        ("sd3", "eager", ()),
        ("flux", "eager", ("--network_dropout", "0.2", "--gradient_checkpointing", "--dynamo_fullgraph")),
    ],
)
def test_six_sizes_need_few_graphs_per_block_class_and_no_recompiles(family, backend, flags, tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:6], counts=(2, 3))
    flags = (
        *"--max_train_epochs 2 --cp_size 2 --sample_every_n_epochs 1".split(),
        "--sample_prompts",
        write_prompts(tmp_path),
        *FAMILIES.get(family, ()),
        *flags,
    )
    actual = train_compiled(tmp_path / "compiled", family, data, *flags, *COMPILED[:2], backend, ranks=2)
    plain = train_compiled(
        tmp_path / "plain", family, data, *(flag for flag in flags if "fullgraph" not in flag), ranks=2
    )
    assert actual.is_dynamic and actual.recompile_count == 0
    assert max(actual.graph_counts.values()) <= (2 if family in ("sd3", "flux") else 4)
    assert actual.unique_graphs == sum(actual.graph_counts.values()), "only blocks are compiled"
    assert max_relative_difference(plain.lora, actual.lora) < 1e-4
