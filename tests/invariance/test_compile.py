"""torch.compile of blocks: few graphs for many sizes, all compiled before the first step, with the results of eager mode."""

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from compiled_runs import COMPILED, FAMILIES, SIZES, train_compiled, write_dataset
from tiny_pipelines import TINY
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from training_runs import max_relative_difference, write_prompts

from library.dataloader.batch import Moments, PixelBatch
from library.parallel.compile import MAX_RECOMPILES, Compilation, compile_model, find_repeated_blocks


@pytest.mark.parametrize("family", ["flux"])
def test_24_sizes_need_two_graphs_per_block_class_and_no_recompiles(family, tmp_path):
    data = write_dataset(tmp_path / "data", SIZES)
    flags = ("--max_train_epochs", "3", *FAMILIES[family])
    compiled = train_compiled(tmp_path / "compiled", family, data, *flags, *COMPILED)
    eager = train_compiled(tmp_path / "plain", family, data, *flags)

    assert len(SIZES) == 24 and compiled.is_dynamic and not compiled.cudagraph_marks
    assert (
        len(compiled.graph_counts) == 2 and max(compiled.graph_counts.values()) <= 2 and compiled.recompile_count == 0
    )
    assert compiled.unique_graphs == sum(compiled.graph_counts.values()), "only blocks are compiled"
    assert max_relative_difference(eager.lora, compiled.lora) < 1e-4
    assert (
        max(float(tensor.abs().max()) for name, tensor in compiled.lora.items() if "B" in name or "up" in name) > 1e-4
    )


GRAPHS = {
    "sd1": [1, 1],
    "sdxl": [1],
    "sd3": [1, 1],
    "flux": [1, 2],
    "z_image": [1, 1, 2],
    "qwen_image": [1, 1],
}
"""Graphs of each block class for any number of image sizes."""
GRAPHS_WITH_MASKS = {"z_image": [1, 2, 4], "qwen_image": [2, 2]}
"""Batches whose texts differ in length have masks, and others have none."""


@pytest.mark.parametrize(
    ("family", "batch_size"),
    [*((name, 1) for name in GRAPHS), *((name, 2) for name in ("flux", "z_image", "qwen_image"))],
)
def test_12_sizes_need_no_graph_of_their_own(family, batch_size, tmp_path):
    """At batch size 1, dynamo guards the stride of that dimension, which differs between slices of joined tokens."""
    data = write_dataset(tmp_path / "data", SIZES[:12], counts=(batch_size,), batch_size=batch_size)
    result = train_compiled(
        tmp_path / "out", family, data, "--max_train_epochs", "1", *FAMILIES.get(family, ()), *COMPILED
    )
    graphs = (GRAPHS if batch_size == 1 else {**GRAPHS, **GRAPHS_WITH_MASKS})[family]
    assert sorted(result.graph_counts.values()) == graphs and result.recompile_count == 0


def test_quantized_layers_do_not_break_the_graphs(tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:3])
    flags = ("--max_train_epochs", "1", "--quantize_base", "nf4", *FAMILIES["flux"])
    compiled = train_compiled(tmp_path / "compiled", "flux", data, *flags, *COMPILED)
    eager = train_compiled(tmp_path / "plain", "flux", data, *flags)
    assert sorted(compiled.graph_counts.values()) == [1, 2] and compiled.recompile_count == 0
    assert compiled.unique_graphs == sum(compiled.graph_counts.values())
    assert max_relative_difference(eager.lora, compiled.lora) < 1e-4


def test_all_text_lengths_are_compiled_before_the_first_step(tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:3])
    cudagraph_flags = ("--dynamo_mode", "reduce-overhead", "--gradient_accumulation_steps", "2")
    result = train_compiled(tmp_path / "out", "z_image", data, "--max_train_epochs", "2", *COMPILED, *cudagraph_flags)
    assert result.recompile_count == 0 and result.is_dynamic
    assert result.cudagraph_marks == result.forward_count, "each forward pass marks one CUDA graph step"


@pytest.mark.slow
def test_previews_validation_dropout_and_checkpointing_cause_no_recompiles(tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:4])
    result = train_compiled(
        tmp_path / "out",
        "sd1",
        data,
        *(
            "--max_train_epochs 2 --network_dropout 0.2 --gradient_checkpointing --validation_split 0.3 "
            "--sample_every_n_epochs 1"
        ).split(),
        "--sample_prompts",
        write_prompts(tmp_path),
        "--no-network_train_unet_only",
        *COMPILED,
    )

    blocks = [graphs for name, graphs in result.graph_counts.items() if "TransformerBlock" in name]
    assert blocks == [1, 1], "dropout probabilities that differ between modules share graphs"
    assert result.recompile_count == 0 and len(result.graph_counts) == 3


@pytest.mark.slow
def test_an_activation_memory_budget_trains_the_same_lora(tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:3])
    flags = ("--max_train_epochs", "1", "--gradient_checkpointing", "--activation_memory_budget", "0.5")
    compiled = train_compiled(tmp_path / "compiled", "sd1", data, *flags, *COMPILED[:2], "aot_eager")
    eager = train_compiled(tmp_path / "plain", "sd1", data, *flags[:3])
    assert (
        compiled.recompile_count == 0
        and compiled.is_dynamic
        and max_relative_difference(eager.lora, compiled.lora) < 1e-4
    )


@pytest.mark.slow
def test_few_sizes_are_compiled_with_static_shapes_and_two_ranks_train_as_one(tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:2], counts=(4,))
    flags = ("--max_train_steps", "4", "--gradient_accumulation_steps")
    one_rank = train_compiled(tmp_path / "one", "sd1", data, *flags, "2")
    for engine in ((), ("--fsdp",)):
        two_ranks = train_compiled(
            tmp_path / f"two{len(engine)}", "sd1", data, *flags, "1", *COMPILED, *engine, ranks=2
        )

        assert (
            not two_ranks.is_dynamic and set(two_ranks.graph_counts.values()) == {2} and two_ranks.recompile_count == 0
        )
        assert max_relative_difference(one_rank.lora, two_ranks.lora) < 1e-4


@pytest.mark.slow
def test_a_second_run_reads_compiled_graphs_from_the_cache(tmp_path):
    data = write_dataset(tmp_path / "data", SIZES[:1])
    flags = ("--max_train_steps", "1", "--torch_compile", "--compile_cache_dir", str(tmp_path / "compile_cache"))
    first, second = (train_compiled(tmp_path / name, "sdxl", data, *flags) for name in ("first", "second"))

    assert first.cache_counts["miss"] > 0 and first.cache_counts["hit"] == 0
    assert second.cache_counts == {"hit": first.cache_counts["miss"], "miss": 0}
    assert max_relative_difference(first.lora, second.lora) == 0
    assert any((tmp_path / "compile_cache").iterdir())


# ---- models with one block class


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, hidden, scale=None):
        return self.inner(hidden) * (2 if scale is None else scale)


class Model(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self, depth):
        super().__init__()
        self.rows = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, hidden):
        for row in self.rows:
            hidden = row(hidden)
        return hidden


def make_tensor(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def compile_and_warm_up(model, dynamic="true"):
    """Compile the model, warm it up for dynamic lengths; return the compilation and a backend that counts graphs."""
    backend = CompileCounterWithBackend("eager")
    compilation = Compilation(dynamic, {"backend": backend})
    compilation.compile_blocks(model)
    with compilation.record_shapes():
        for length in (4, 6):
            model(make_tensor(2, length, 3))
    compilation.choose_dynamic_shapes(2, texts_vary=False)
    return compilation, backend


@pytest.mark.quick
def test_equal_blocks_share_graphs_even_if_the_first_input_is_square():
    model = Model(12)
    compilation, backend = compile_and_warm_up(model)
    expected = [row.inner(make_tensor(2, 3, 3)) * 2 for row in model.rows]
    for length in (3, 2, 7, 9):
        model(make_tensor(2, length, 3)).sum().backward()
    assert (backend.frame_count, compilation.graph_count, compilation.recompile_count) == (
        2,
        2,
        0,
    )  # the first block's input has no gradient
    assert all(torch.equal(row(make_tensor(2, 3, 3)), output) for row, output in zip(model.rows, expected, strict=True))


class AttentionBlock(Block):
    """As diffusers' attention: calls a processor object, and inspects its signature."""

    class Processor:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, hidden, scale=None):
            return hidden * self.factor

    def __init__(self, factor):
        super().__init__()
        self.processor = self.Processor(factor)

    def forward(self, hidden):
        assert "scale" in inspect.signature(self.processor.__call__).parameters
        return self.processor(super().forward(hidden))


def test_blocks_with_different_attention_processors_have_their_own_graphs():
    model = Model(12)
    model.rows = nn.ModuleList(AttentionBlock(5 if number == 7 else 3) for number in range(12))
    model._repeated_blocks = ("AttentionBlock",)
    expected = [row(make_tensor(2, 3, 3)) for row in model.rows]
    compilation, backend = compile_and_warm_up(model)
    for length in (3, 2, 7, 9):
        model(make_tensor(2, length, 3)).sum().backward()
    assert (
        backend.frame_count == compilation.graph_count == 3 and compilation.recompile_count == 0
    )  # the first, the others, and the odd one
    assert all(torch.equal(row(make_tensor(2, 3, 3)), output) for row, output in zip(model.rows, expected, strict=True))


def test_parameter_names_stay_and_hooks_run_outside_of_graphs():
    model = Model(2)
    names, calls = list(model.state_dict()), []
    for row in model.rows:
        row.register_forward_hook(lambda *_: calls.append(1))
    _, backend = compile_and_warm_up(model)
    calls.clear()
    model(make_tensor(2, 4, 3))
    assert list(model.state_dict()) == names and len(calls) == 2 and backend.frame_count == 2


@pytest.mark.quick
def test_recompiles_are_logged_and_too_many_fall_back_to_eager(caplog):
    model = Model(1)
    compilation, backend = compile_and_warm_up(model)
    model(make_tensor(2, 4, 3))
    compilation.finish_warmup()
    with caplog.at_level(logging.WARNING, logger="library"):
        for count in range(3, 3 + MAX_RECOMPILES + 3):
            torch.testing.assert_close(
                model(make_tensor(count, 4, 3)), model.rows[0].inner(make_tensor(count, 4, 3)) * 2
            )
    lines = [record.message for record in caplog.records if record.name.startswith("library")]
    assert len(lines) == MAX_RECOMPILES + 1
    assert "Block rows.0" in lines[0] and "'hidden' size mismatch at index 0. expected 2, actual 3" in lines[0]
    assert (
        "its blocks run eagerly" in lines[-1]
        and backend.frame_count == 1 + compilation.recompile_count == 2 + MAX_RECOMPILES
    )


def test_eval_mode_is_not_compiled():
    model = Model(2)
    _, backend = compile_and_warm_up(model)
    with torch.no_grad():
        model.eval()(make_tensor(5, 4, 3))
    assert backend.frame_count == 0


def test_slices_of_longer_tensors_do_not_cause_recompiles():
    model = Model(1)
    backend = CompileCounterWithBackend("eager")
    compilation = Compilation("false", {"backend": backend})
    compilation.compile_blocks(model)
    with compilation.record_shapes():
        for length in (4, 6):
            model(make_tensor(2, length, 3)[:, :2])
    compilation.choose_dynamic_shapes(1, texts_vary=False)
    for length in (4, 6, 8):
        model(make_tensor(2, length, 3)[:, :2])
    assert backend.frame_count == 1


@pytest.mark.parametrize("name", ["sd1", "sdxl", "sd3", "flux", "z_image", "qwen_image"])
def test_the_repeated_blocks_of_every_family_are_found(name):
    """diffusers does not declare the repeated blocks of SD3."""
    pipe = TINY[name]().pipe
    blocks = dict(find_repeated_blocks(pipe.unet if hasattr(pipe, "unet") else pipe.transformer))
    assert len(blocks) > 1 and all(type(block).__name__.endswith("TransformerBlock") for block in blocks.values())
    texts = {
        name for name, part in pipe.components.items() if "text_encoder" in name and dict(find_repeated_blocks(part))
    }
    assert texts == {name for name in pipe.components if "text_encoder" in name}


@pytest.mark.parametrize(("regional", "compiler_count"), [(True, 1), (False, 1)])
def test_the_whole_model_is_compiled_without_regional_compilation(regional, compiler_count):
    model = Model(3)
    plugin = SimpleNamespace(
        backend=SimpleNamespace(value="EAGER"),
        dynamic=True,
        use_regional_compilation=regional,
        to_kwargs=lambda: {"backend": "eager"},
    )
    compilation = compile_model([model], model, plugin, "auto")
    assert len(compilation.block_compilers) == compiler_count and compilation.dynamic == "true"
    assert ("forward" in vars(model)) != regional and ("forward" in vars(model.rows[0])) == regional


# ---- dummy batches


def make_batch(**changes):
    frame = torch.tensor([[80.0, 120, 0, 0, 64, 96]] * 2)
    return PixelBatch(
        **{
            "pixels": None,
            "captions": ("a", "b"),
            "size_conditioning": frame,
            "loss_weights": torch.tensor([1.0, 0]),
            "global_positions": (4, 5),
            "sample_keys": ("x", "y"),
        }
        | changes
    )


def test_a_dummy_batch_has_the_shapes_of_its_size():
    moments, ends = Moments(torch.randn(2, 2, 4, 8, 12)), [make_tensor(2, 3), make_tensor(2, 3)]
    cond = {"embeds": [make_tensor(5, 3), make_tensor(9, 3)], "fixed_end": ends}
    tokens = {"tokens": torch.ones(2, 1, 1, 8, 12, dtype=torch.int)}
    dummy = make_batch(moments=moments, cond=cond, frame_cond=tokens).build_dummy_batch((32, 128), 3)
    assert dummy.frame_cond["tokens"].shape == (3, 1, 1, 16, 4) and dummy.frame_cond["tokens"].dtype == torch.int
    assert dummy.moments.mean_and_std.shape == (3, 2, 4, 16, 4) and dummy.pixels is None
    assert dummy.size_conditioning[0].tolist() == [80, 120, 0, 0, 128, 32] and dummy.loss_weights.tolist() == [1, 1, 1]
    assert (dummy.captions, dummy.sample_keys, dummy.global_positions) == (("a", "b", "a"), ("x", "y", "x"), (0, 1, 2))
    assert [len(row) for row in dummy.cond["embeds"]] == [5, 9, 5]
    varied = dummy.vary_text_lengths(["same", "longer", "shorter"]).cond
    assert [len(row) for row in varied["embeds"]] == [5, 69, 2] and [len(row) for row in varied["fixed_end"]] == [2] * 3
    assert make_batch(pixels=torch.ones(2, 3, 64, 96)).build_dummy_batch((32, 128), 1).pixels.shape == (1, 3, 128, 32)


@pytest.mark.quick
def test_the_gradient_probe_gets_a_corner_of_the_first_image():
    moments = Moments(torch.randn(2, 2, 4, 8, 12))
    crop = make_batch(moments=moments).crop_first_image(80)
    assert torch.equal(crop.moments.mean_and_std, moments.mean_and_std[:1, ..., :10])
    assert crop.size_conditioning[0].tolist() == [80, 120, 0, 0, 64, 80] and crop.sample_keys == ("x",)
    pixels = torch.randn(2, 3, 64, 96)
    assert torch.equal(make_batch(pixels=pixels).crop_first_image(64).pixels, pixels[:1, :, :, :64])
