"""Stochastic rounding: unbiased, so that tiny updates count, and equal for every order, part and layout of weights."""

import weakref

import pytest
import torch
from torch import nn

from library.config import parse_config
from library.config.schema_optim import OptimConfig
from library.optim.fused_backward import FusedBackward, PartialStep
from library.optim.optimizers import ParamGroup, build_optimizer
from library.optim.stochastic_rounding import (
    StochasticRounding,
    hash_positions,
    round_to_bf16,
    split_by_size,
)
from library.parallel.tensor_parallel_weights import WeightLayout, list_part_positions


@pytest.mark.quick
def test_the_mean_over_all_random_bits_is_the_value_itself():
    bits = torch.arange(2**16, dtype=torch.int32)
    values = torch.tensor([1.00001, -0.0123456, 3e-20, 1.5, 0.0, -7e30])
    for value in values:
        rounded = round_to_bf16(value.expand(2**16), bits)
        assert rounded.dtype == torch.bfloat16 and len(rounded.unique()) <= 2
        assert float(rounded.double().mean()) == pytest.approx(float(value), rel=1e-12, abs=0)
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    rounded = round_to_bf16(special, torch.full((3,), -1, dtype=torch.int32))
    assert torch.equal(rounded[:2].float(), special[:2]) and rounded[2].isnan()


@pytest.mark.quick
def test_the_bits_are_uniform_and_differ_between_keys():
    positions = torch.arange(2**18, dtype=torch.int32)
    first, second = (hash_positions(positions, key) & 0xFFFF for key in (12345, 12345 + 2**40))
    for bits in (first, second, (first - second) & 0xFFFF):
        counts = torch.bincount(bits.long() >> 8, minlength=256).double()
        assert float(((counts - 1024) ** 2 / 1024).sum()) < 400, "chi-squared of 255 degrees of freedom"
    assert hash_positions(positions[:3], 7).tolist() == [415870660, 920564995, -938666332], "checkpoints rely on it"


def build_step(optimizer_type: str, weights, seed: int = 1, lr: float = 1e-5, arguments: tuple[str, ...] = ()):
    config = OptimConfig(optimizer_type=optimizer_type, optimizer_args=arguments, learning_rate=lr)
    optimizer = build_optimizer(config, [ParamGroup("all", weights, lr)])
    names = {weight: str(index) for index, weight in enumerate(weights)}
    return optimizer, StochasticRounding(optimizer, seed, names)


def build_weights(*shapes):
    draw = torch.Generator().manual_seed(3)
    return [nn.Parameter((torch.randn(shape, generator=draw) * 0.05).bfloat16()) for shape in shapes]


def test_updates_that_are_too_small_for_bf16_are_not_lost():
    """Each step changes 0.5 by 1e-5; the next values are 0.002 and more away."""
    nearest, rounded = (nn.Parameter(torch.full((100, 100), 0.5, dtype=torch.bfloat16)) for _ in range(2))
    plain = torch.optim.SGD([nearest], lr=1e-5)
    optimizer, rounding = build_step("SGD", [rounded])
    step = PartialStep(optimizer, rounding)
    for number in range(100):
        nearest.grad, rounded.grad = torch.ones_like(nearest), torch.ones_like(rounded)
        plain.step()
        step.start(number)
        step.update([rounded])
        step.finish()
    assert bool((nearest == 0.5).all())
    # 10,000 weights, each with 100 chances of 1e-5 / 2^-9 to fall by 2^-9: the mean is exact within 5 deviations.
    change = 0.5 - float(rounded.detach().double().mean())
    assert change == pytest.approx(100 * 1e-5, abs=5 * 2**-9 * (100 * 1e-5 / 2**-9) ** 0.5 / 100)


def train_weights(optimizer_type: str, arguments, mode: str):
    weights = build_weights((12, 7), (7,), (9, 4))
    optimizer, rounding = build_step(optimizer_type, weights, lr=1e-3, arguments=arguments)
    step, fused = PartialStep(optimizer, rounding), None
    if mode == "fused":
        fused = FusedBackward(optimizer, 0, rounding)
    for number in range(4):
        loss = sum((weight.float() * (number + 1 + index)).sin().sum() for index, weight in enumerate(weights))
        if fused is not None:
            fused.start_step(number)
            with fused.run_micro_batch(loss, is_last=True):
                loss.backward()
            continue
        loss.backward()
        step.start(number)
        for part in [weights] if mode == "together" else [[each] for each in reversed(weights)]:
            step.update(part)
        step.finish()
        optimizer.zero_grad()
    return weights, [optimizer.state[weight] for weight in weights]


@pytest.mark.parametrize(
    ("optimizer_type", "arguments"),
    [("AdamW", ()), ("SGD", ("momentum=0.9",)), ("Adafactor", ("relative_step=False", "scale_parameter=False"))],
)
def test_the_order_and_the_parts_of_a_step_do_not_change_it(optimizer_type, arguments):
    expected, state = train_weights(optimizer_type, arguments, "together")
    assert any(
        bool((one != other).any()) for one, other in zip(expected, build_weights((12, 7), (7,), (9, 4)), strict=True)
    )
    for mode in ("parts", "fused"):
        weights, other_state = train_weights(optimizer_type, arguments, mode)
        assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
        for mine, theirs in zip(state, other_state, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(value, theirs[key])
                is_moment = (
                    isinstance(value, torch.Tensor) and value.dim() > 0 and key in ("exp_avg", "momentum_buffer")
                )
                assert not is_moment or value.dtype == torch.bfloat16, "moments take no more memory than before"


def test_another_step_seed_or_weight_has_other_bits_and_an_equal_one_the_same():
    def round_once(seed, step, index):
        weights = build_weights((64, 64), (64, 64))
        optimizer, rounding = build_step("SGD", weights, seed)
        for weight in weights:
            weight.data.fill_(0.5)
            weight.grad = torch.ones_like(weight)
        partial_step = PartialStep(optimizer, rounding)
        partial_step.start(step)
        partial_step.update(weights)
        return weights[index].detach()

    first = round_once(1, 5, 0)
    assert torch.equal(first, round_once(1, 5, 0)) and bool((first != 0.5).any())
    assert not any(torch.equal(first, round_once(*other)) for other in ((2, 5, 0), (1, 6, 0), (1, 5, 1)))


@pytest.mark.parametrize("is_divisible", [True, False])
def test_copies_in_float32_are_freed_when_the_weights_are_rounded(is_divisible):
    weights = build_weights((12, 7), (7,))
    optimizer, rounding = build_step("SGD", weights, arguments=("momentum=0.9",))
    copies = list[weakref.ref[torch.Tensor]]()
    optimizer.register_step_pre_hook(
        lambda *_: copies.extend(weakref.ref(each) for group in optimizer.param_groups for each in group["params"])
    )
    step = PartialStep(optimizer, rounding, is_divisible=is_divisible)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    step.start(0)
    step.update(weights)
    step.finish()
    assert len(copies) == 2 and all(copy() is None for copy in copies), "they would stay until the next step"


@pytest.mark.quick
def test_state_that_bitsandbytes_pages_to_host_memory_stays_there():
    (weight,) = build_weights((12, 7))
    optimizer, rounding = build_step("SGD", [weight], arguments=("momentum=0.9",))
    step, paged = PartialStep(optimizer, rounding), torch.zeros(12, 7)
    paged.is_paged = True  # as bitsandbytes marks its buffers
    optimizer.state[weight]["momentum_buffer"] = paged
    weight.grad = torch.full_like(weight, 1 / 3)
    step.start(0)
    step.update([weight])
    assert optimizer.state[weight]["momentum_buffer"] is paged and bool((paged == weight.grad).all())


@pytest.mark.quick
def test_positions_of_a_part_are_those_in_the_whole_weight():
    whole = torch.arange(6 * 4).view(6, 4)
    for layout in (WeightLayout(0, ((1, 2), (4, 1)), whole.shape), WeightLayout(1, ((2, 2),), whole.shape)):
        assert torch.equal(list_part_positions(layout, torch.device("cpu")).long(), layout.take(whole))


@pytest.mark.quick
def test_weights_are_split_into_parts_of_limited_size():
    sizes = (5, 4, 30, 1, 2, 8)
    weights = [torch.zeros(size) for size in sizes]
    assert [[each.numel() for each in part] for part in split_by_size(weights, sizes, 10)] == [
        [5, 4],
        [30],
        [1, 2],
        [8],
    ]


@pytest.mark.quick
def test_rounding_is_on_for_weights_in_bf16_and_named_where_it_has_no_effect():
    base = ["--dataset_config", "pyproject.toml", "--train", "full"]
    assert parse_config([*base, "--full_bf16"]).config.full.stochastic_rounding
    assert not parse_config([*base, "--full_bf16", "--no-stochastic_rounding"]).config.full.stochastic_rounding
    unused = parse_config([*base, "--no-stochastic_rounding"]).unused
    assert any("stochastic_rounding" in str(place) for place, _ in unused)
