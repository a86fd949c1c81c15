"""Context parallelism: sharded attention equals attention over all tokens, and so does the trained adapter."""

import inspect
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from one_result import BOUNDS, REFERENCE, save_model_with_four_heads, train_layout, write_even_dataset
from rank_processes import run_on_ranks
from tiny_pipelines import TINY
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import max_relative_difference

from library.adapters.lora_dropout import LoraDropout
from library.errors import UserError
from library.models.families import FAMILIES
from library.parallel.context_parallel import ContextParallel, SequenceShards, renumber_calls
from library.parallel.parallel_plan import BlockSequence, ParallelPlan, map_layer_token_streams
from library.parallel.ulysses import ProcessGroupAllToAll

LONG, UNET = pytest.mark.slow, ("--network_train_unet_only",)
TRANSFORMERS = ("sd3", "flux", "z_image", "qwen_image")


# equal adapters


@pytest.mark.parametrize(
    ("model", "name", "precision", "flags"),
    [
        ("flux", "CP 2", "no", ("--network_dropout", "0.3", "--gradient_checkpointing")),
        ("z_image", "CP 2", "no", UNET),
        pytest.param("sd3", "CP 2 x DP 2", "no", (), marks=LONG),
        pytest.param("flux", "CP 2 x DP 2", "no", (), marks=LONG),
        pytest.param("sd3", "CP 2", "bf16", (), marks=LONG),
        pytest.param("sd3", "CP 2", "no", ("--quantize_base", "nf4", "--blocks_to_swap", "1"), marks=LONG),
        pytest.param("sd3", "CP 2", "no", (*UNET, "--torch_compile", "--dynamo_backend", "eager"), marks=LONG),
        pytest.param("flux", "CP 2", "no", ("--network_args", "use_dora=True", "in_dims=[2,2,2,2,2]"), marks=LONG),
        pytest.param("flux", "FSDP 2 x CP 2", "no", ("--gradient_checkpointing",), marks=LONG),
        pytest.param("flux", "PP 2 x CP 2", "no", ("--gradient_checkpointing", "--network_dropout", "0.3"), marks=LONG),
        pytest.param("qwen_image", "CP 2", "no", UNET, marks=LONG),
        pytest.param("aura_flow", "CP 2", "no", UNET, marks=LONG),
        pytest.param(
            "anima", "CP 2", "no", (*UNET, "--network_dropout", "0.3", "--gradient_checkpointing"), marks=LONG
        ),
        pytest.param("ovis_image", "CP 2", "no", UNET, marks=LONG),
        pytest.param(
            "kandinsky5_image",
            "CP 2",
            "no",
            (*UNET, "--network_dropout", "0.3", "--gradient_checkpointing"),
            marks=LONG,
        ),
        pytest.param("kandinsky6_video", "CP 2", "no", (*UNET, "--network_dropout", "0.3"), marks=LONG),
        pytest.param("pixart_sigma", "CP 2", "no", (*UNET, "--network_dropout", "0.3"), marks=LONG),
        pytest.param("hunyuan_image", "CP 2", "no", (*UNET, "--network_dropout", "0.3"), marks=LONG),
        pytest.param("hunyuan_video", "CP 2", "no", (*UNET, "--network_dropout", "0.3"), marks=LONG),
        pytest.param("longcat_image", "CP 2", "no", UNET, marks=LONG),
        pytest.param("hunyuan_video15", "CP 2", "no", (*UNET, "--network_dropout", "0.3"), marks=LONG),
        pytest.param("ltx_video", "CP 2", "no", (*UNET, "--network_dropout", "0.3"), marks=LONG),
        pytest.param("qwen_image21", "PP 2 x CP 2", "no", (*UNET, "--gradient_checkpointing"), marks=LONG),
    ],
)
def test_context_parallel_trains_the_adapter_of_one_process(model, name, precision, flags, tmp_path):
    data, flags = write_even_dataset(tmp_path), ("--mixed_precision", precision, *flags)
    (tmp_path / "images" / "03.txt").write_text(
        "a picture " * 30
    )  # one long caption, so that the others are padded and masked
    one = train_layout(REFERENCE, model, data, tmp_path, *flags)
    assert max_relative_difference(one, train_layout(name, model, data, tmp_path, *flags)) < BOUNDS[precision]


@pytest.mark.slow
def test_heads_are_split_by_tensor_and_context_parallel(tmp_path):
    save_model_with_four_heads(tmp_path / "model")
    data, flags = write_even_dataset(tmp_path), ("--pretrained_model_name_or_path", str(tmp_path / "model"))
    one = train_layout(REFERENCE, "sd3", data, tmp_path, *flags)
    assert max_relative_difference(one, train_layout("TP 2 x CP 2", "sd3", data, tmp_path, *flags)) < BOUNDS["no"]


# attention


def compare_sharded_attention(lengths: dict[str, int], streams: list[str], masked: bool) -> tuple[float, float]:
    """Return the largest difference of output and of gradients to attention on one process, for six heads."""
    context_parallel = ContextParallel(ProcessGroupAllToAll(dist.group.WORLD))
    context_parallel._shards = SequenceShards(lengths, context_parallel.rank, context_parallel.size)
    context_parallel.parallel_plan = ParallelPlan(BlockSequence((), tuple(lengths)))
    context_parallel._token_maps = {
        each: context_parallel._shards.build_token_map(each, torch.device("cpu"))
        for each in context_parallel._list_attended_streams()
    }
    draw, count = torch.Generator().manual_seed(3), sum(lengths[stream] for stream in streams)
    full = [torch.randn(2, 6, count, 4, generator=draw, requires_grad=True) for _ in range(3)]
    target = torch.randn(2, 6, count, 4, generator=draw)
    mask = torch.rand(2, 1, 1, count, generator=draw) > 0.4 if masked else None
    output = functional.scaled_dot_product_attention(*full, attn_mask=mask)
    gradients = torch.autograd.grad((output * target).sum(), full)

    own = context_parallel.shards.compute_token_positions(streams, torch.device("cpu"))
    parts = [each.detach()[:, :, own].requires_grad_() for each in full]
    ours, _ = context_parallel.compute_sharded_attention(
        None, *parts, attn_mask=None if mask is None else mask[..., own]
    )
    actual = torch.autograd.grad((ours * target[:, :, own]).sum(), parts)
    gradient_difference = max(
        (a - b[:, :, own]).abs().max().item() for a, b in zip(actual, gradients, strict=True) if len(own)
    )
    return (ours - output[:, :, own]).abs().max().item() if len(own) else 0.0, gradient_difference


CASES = [
    ({"text": 5, "image": 7}, ["text", "image"], True),
    ({"text": 5, "image": 7}, ["image"], False),
    ({"text": 1, "image": 4}, ["text", "image"], True),
]


def compare_gathered_attention() -> tuple[float, float]:
    """Return these differences for queries that every rank has, where each rank has a loss of its own."""
    group, length = ProcessGroupAllToAll(dist.group.WORLD), 7
    context_parallel = ContextParallel(group)
    context_parallel._shards = shards = SequenceShards({"image": length}, group.rank, group.size)
    context_parallel.parallel_plan = ParallelPlan(BlockSequence((), ("image",)))
    context_parallel._token_maps = {("image",): shards.build_token_map(("image",), torch.device("cpu"))}
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 6, count, 4, generator=draw) for count in (4, length, length))
    targets = torch.randn(group.size, 2, 6, 4, 4, generator=draw)
    full = [each.clone().requires_grad_() for each in (query, key, value)]
    output = functional.scaled_dot_product_attention(*full)
    gradients = torch.autograd.grad((output * targets.sum(0)).sum(), full)
    own = shards.compute_token_positions(("image",), torch.device("cpu"))
    parts = [query.clone().requires_grad_(), *(each[:, :, own].clone().requires_grad_() for each in (key, value))]
    ours, _ = context_parallel.compute_gathered_attention(None, *parts)
    actual = list(torch.autograd.grad((ours * targets[group.rank]).sum(), parts))
    dist.all_reduce(actual[0])
    expected = gradients[0], gradients[1][:, :, own], gradients[2][:, :, own]
    difference = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
    return float((ours - output).abs().max()), difference


def compare_all_cases() -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    return [*(compare_sharded_attention(*case) for case in CASES), compare_gathered_attention()]


@pytest.mark.quick
def test_sharded_attention_is_attention_over_all_tokens():
    for actual in run_on_ranks(3, compare_all_cases):
        for ours, case in zip(actual, (*CASES, "gathered"), strict=True):
            assert max(ours) < 1e-5, case


def test_a_block_with_its_own_attention_kernel_is_refused():
    context_parallel, block = ContextParallel.__new__(ContextParallel), nn.Linear(2, 2)
    context_parallel.size, context_parallel.parallel_plan = 2, ParallelPlan()
    with pytest.raises(UserError, match="DIFFUSERS_ATTN_BACKEND"):
        context_parallel._run_block(inspect.signature(block.forward), block, (torch.ones(1, 2),), {})


def test_calls_after_a_skipped_one_are_counted_without_it():
    assert renumber_calls((1, 2, 3, 4), {0, 1}) == (0, 1, 2)
    assert renumber_calls((5,), {0, 1}) == (3,) and renumber_calls((1, 4), ()) == (1, 4)


# the tokens of each rank


def test_modulations_that_are_as_many_as_the_tokens_are_whole_on_each_rank():
    """A clip of Wan 2.2 TI2V of 64 x 96 pixels has six tokens, and each block six modulations."""
    facts, seen = FAMILIES.get("wan22_ti2v").facts.blocks, []
    context_parallel = ContextParallel.__new__(ContextParallel)
    context_parallel._shards = SequenceShards({"hidden_states": 6}, 0, 2)
    context_parallel.parallel_plan = ParallelPlan(
        block_token_args=facts.token_args, token_arg_dims=facts.token_arg_dims, text_attention_calls=(0,)
    )

    def run(hidden_states, temb):
        seen.append(temb.shape)
        return functional.scaled_dot_product_attention(*[hidden_states] * 3)

    for temb in (torch.ones(1, 6, 8), torch.ones(1, 6, 6, 8)):  # one time for all tokens, and one for each
        context_parallel._run_block(inspect.signature(run), run, (torch.ones(1, 3, 8), temb), {})
    assert seen == [(1, 6, 8), (1, 3, 6, 8)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_tokens_are_sharded_evenly_and_completely(size):
    lengths = {"text": 5, "image": 26}
    rows = torch.arange(31).view(1, 31)
    for streams in (["text"], ["image"], ["text", "image"]):
        count = sum(lengths[stream] for stream in streams)
        shares = [SequenceShards(lengths, rank, size) for rank in range(size)]
        positions = [share.compute_token_positions(streams, torch.device("cpu")).tolist() for share in shares]
        assert sorted(chain(*positions)) == list(range(count))
        assert [len(each) for each in positions] == shares[0].count_tokens_per_rank(streams)
        assert max(map(len, positions)) - min(map(len, positions)) <= len(streams)
        for share, each in zip(shares, positions, strict=True):
            assert share.slice_shard(rows[:, :count], 1, streams)[0].tolist() == each


class CreatedTensors(TorchDispatchMode):
    """Records tensors that operations create, except copies of lists to a device."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.tensors.append(function(*arguments, **(named or {})))
        return self.tensors[-1]


def test_token_positions_are_created_on_the_device():
    with CreatedTensors() as created:
        positions = (
            SequenceShards({"text": 5, "image": 26}, 1, 2)
            .build_token_map(("text", "image"), torch.device("meta"))
            .positions
        )
    assert positions.shape == (16,) and any(each is positions for each in created.tensors)


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_map_layer_token_streams_covers_every_layer(model):
    tiny = TINY[model]()
    family, pipe = FAMILIES.get(model)(), tiny.pipe
    denoiser = getattr(pipe, family.facts.denoiser_name)
    token_streams = map_layer_token_streams(
        denoiser,
        family.facts.blocks.lists,
        family.facts.blocks.activation_args,
        family.facts.blocks.single_stream_lists,
        family.facts.blocks.text_attention_layers,
    )
    first = BlockSequence.from_lists(denoiser, family.facts.blocks.lists, family.facts.blocks.activation_args).blocks[0]
    lengths, token_counts, inputs = {}, {}, {}

    def begin(block, args, named):
        inputs.update(inspect.signature(block.forward).bind(*args, **named).arguments)
        lengths.update({name: inputs[name].shape[1] for name in family.facts.blocks.activation_args})

    first.register_forward_pre_hook(begin, with_kwargs=True)
    for name, layer in denoiser.named_modules():
        if isinstance(layer, nn.Linear) and name in token_streams:
            layer.register_forward_hook(
                lambda _, inputs, created, name=name: token_counts.update({name: inputs[0].shape})
            )
    with torch.no_grad():
        family.predict(pipe, denoiser, tiny.batch.latents, torch.full((2,), 500.0), tiny.batch)

    assert len(set(lengths.values())) == len(lengths) and len(token_counts) > 10
    counts = {*lengths.values(), sum(lengths.values())}
    for name, value in inputs.items():
        values = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, torch.Tensor)]
        actual = [(axis, size) for each in values for axis, size in enumerate(each.shape) if size in counts]
        expected = [
            (axis, sum(lengths[stream] for stream in streams))
            for axis, streams in family.facts.blocks.token_args.get(name, ((1, (name,)),) if name in lengths else ())
        ]
        assert actual == (expected if values else []), name
    for name, shape in token_counts.items():
        if len(shape) == 3:
            assert shape[1] == sum(lengths[stream] for stream in token_streams[name]), name


def test_dropout_depends_on_the_position_of_a_token_in_the_full_sequence():
    dropout, output = LoraDropout(0.5, 0.3, 0.3), torch.ones(4, 9, 3)
    dropout.sample_keys = torch.arange(4) * 7919
    full, positions = dropout.apply(output, 5, -1), torch.tensor([1, 2, 6, 7, 8])
    assert torch.equal(dropout.apply(output[:, positions], 5, -1, positions), full[:, positions])
    assert not torch.equal(dropout.apply(output[:, positions], 5, -1), full[:, positions])


def test_layers_outside_of_the_blocks_see_all_tokens():
    context_parallel, down = ContextParallel.__new__(ContextParallel), nn.Linear(2, 2)
    down.token_streams = ("image",)
    context_parallel._token_maps = {
        down.token_streams: SequenceShards({"image": 5}, 1, 2).build_token_map(("image",), torch.device("cpu"))
    }
    assert context_parallel.get_sharded_tokens(nn.Linear(2, 2)) is None
    assert context_parallel.get_sharded_tokens(down).positions.tolist() == [2, 3, 4]
    assert context_parallel.get_sharded_tokens(down).num_tokens == 5
    assert context_parallel._token_maps[down.token_streams].owner_ranks.tolist() == [0, 0, 1, 1, 1]
