"""Rules across the options about time and memory; no torch."""

from collections.abc import Iterator

from .schema import RunConfig

MIN_PROFILE_STEPS = 3
"""One step to time undisturbed, one to warm the profiler up, and one to profile."""


_CHECKPOINTING_OPTIONS = (("gradient_checkpointing_every", 1), ("gradient_checkpointing_budget", 0),
                   ("cpu_offload_checkpointing", False))  # fmt: skip


_BUDGET_BACKENDS = ("inductor", "aot_eager")
"""Backends that decide themselves what is computed again."""


def validate_memory_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot be honoured together."""
    for name, nothing in _CHECKPOINTING_OPTIONS:
        if getattr(config.train, name) != nothing and not config.train.gradient_checkpointing:
            yield (name, "gradient_checkpointing"), "there are no checkpoints; set gradient_checkpointing as well"
    backend = config.distributed.dynamo_backend
    if config.train.gradient_checkpointing_budget and config.distributed.torch_compile and backend not in _BUDGET_BACKENDS:
        yield (
            ("gradient_checkpointing_budget", "dynamo_backend"),
            f"what {backend} compiles has no budget; {' and '.join(_BUDGET_BACKENDS)} have one",
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
        if steps.first < 2 or steps.last - steps.first + 1 < MIN_PROFILE_STEPS:
            yield ("profile_steps",), (f"{steps}: needs at least {MIN_PROFILE_STEPS} steps, from step 2 on, because step 1"
                                       " warms everything up; such as 11:30")  # fmt: skip
        elif train.max_train_epochs is None and steps.last > train.max_train_steps:
            yield ("profile_steps", "max_train_steps"), f"the run ends with step {train.max_train_steps}"
