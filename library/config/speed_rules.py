"""Rules across the options about time and memory; no torch."""

from collections.abc import Iterator

from .schema import RunConfig

LEAST_PROFILED = 3
"""One step to time undisturbed, one to warm the profiler up, and one to profile."""


_OF_CHECKPOINTS = (("gradient_checkpointing_every", 1), ("gradient_checkpointing_budget", 0),
                   ("cpu_offload_checkpointing", False))  # fmt: skip


_WITH_BUDGET = ("inductor", "aot_eager")
"""Backends that decide themselves what is computed again."""


def speed_conflicts(config: RunConfig, given: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot be honoured together."""
    for name, nothing in _OF_CHECKPOINTS:
        if getattr(config.train, name) != nothing and not config.train.gradient_checkpointing:
            yield (name, "gradient_checkpointing"), "there are no checkpoints; set gradient_checkpointing as well"
    backend = config.distributed.dynamo_backend
    if config.train.gradient_checkpointing_budget and config.distributed.torch_compile and backend not in _WITH_BUDGET:
        yield (
            ("gradient_checkpointing_budget", "dynamo_backend"),
            f"what {backend} compiles has no budget; {' and '.join(_WITH_BUDGET)} have one",
        )
    if config.train.gradient_checkpointing_budget and config.distributed.torch_compile:
        for name, nothing in (("gradient_checkpointing_every", 1), ("cpu_offload_checkpointing", False)):
            if getattr(config.train, name) != nothing:
                yield (name, "gradient_checkpointing_budget"), "where blocks are compiled, the budget alone decides"
    if config.train.blocks_to_swap and config.distributed.torch_compile:
        yield (
            ("blocks_to_swap", "torch_compile"),
            "weights that come and go cannot be compiled; leave it, or --torch_compile, out",
        )
    steps, train = config.train.profile_steps, config.train
    if steps is not None:
        if steps.first < 2 or steps.last - steps.first + 1 < LEAST_PROFILED:
            yield ("profile_steps",), (f"{steps}: needs at least {LEAST_PROFILED} steps, from step 2 on, because step 1"
                                       " warms everything up; such as 11:30")  # fmt: skip
        elif train.max_train_epochs is None and steps.last > train.max_train_steps:
            yield ("profile_steps", "max_train_steps"), f"the run ends with step {train.max_train_steps}"
