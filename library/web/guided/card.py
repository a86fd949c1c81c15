"""The card of this machine, and in words what fits on it: the devices, and the advice of the planner.

``python -m library.web.guided.card`` prints the devices as JSON, in a process of its own: the page itself holds no
memory of a card.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

GB = 2**30
OPTION_WORDS: Mapping[str, str] = {
    "gradient_checkpointing": "activations are computed twice instead of kept (gradient_checkpointing)",
    "gradient_checkpointing_every": "some activations are computed twice (gradient_checkpointing_every)",
    "activation_memory_budget": "cheap activations are computed twice (activation_memory_budget)",
    "cpu_offload_checkpointing": "activations wait in the memory of the computer (cpu_offload_checkpointing)",
    "quantize_base": "the model is kept in fewer bits (quantize_base)",
    "blocks_to_swap": "a part of the model waits in the memory of the computer (blocks_to_swap)",
    "train_batch_size": "fewer pictures at once (train_batch_size)",
    "gradient_accumulation_steps": "steps are put together from several parts (gradient_accumulation_steps)",
    "cache_latents": "pictures are encoded once (cache_latents)",
    "cache_text_encoder_outputs": "captions are encoded once (cache_text_encoder_outputs)",
    "mixed_precision": "computing in half precision (mixed_precision)",
}
"""What the planner's options mean for a run."""

QUALITY_OPTIONS = ("quantize_base",)
"""Options that change the weights, and so the result a little."""


def describe_devices() -> dict[str, Any]:
    """Describe the accelerators of this machine, and its own memory."""
    import torch

    from ...distributed.device_memory import get_free_memory, get_total_memory
    from ...distributed.devices import HOST, detect_machine, get_device_name

    machine = detect_machine(os.environ)
    cards = []
    for index in range(machine.device_count):
        device = torch.device(machine.device_type, index)
        cards.append(
            {"name": get_device_name(device), "total": get_total_memory(device), "free": get_free_memory(device)}
        )
    return {"cards": cards, "cores": machine.usable_cpus, "memory": get_total_memory(HOST)}


def format_devices(devices: Mapping[str, Any]) -> tuple[str, str]:
    """Return a sentence about the cards of this machine, and the memory of the first as a setting."""
    cards = devices["cards"]
    if not cards:
        text = f"No graphics card was found; this computer has {devices['cores']} processor cores"
        text += f" and {devices['memory'] / GB:.0f} GB of memory. The demo model trains well on that; others take days."
        return text, ""
    names = [
        f"{each['name'] or 'a card'} with {each['total'] / GB:.0f} GB, {each['free'] / GB:.0f} free" for each in cards
    ]
    # The planner's limit: what the driver reports is a little below the size on the box.
    return f"This computer has {' and '.join(names)}.", f"{max(1, int(cards[0]['total'] / GB))}GB"


def describe_plan(plan: Mapping[str, Any], memory_text: str) -> list[str]:
    """Put a plan (``library plan --json --gpu_memory``) into sentences: whether it fits, and by what."""
    lines = [_describe_steps(plan)]
    layouts = [each for each in plan.get("layouts", ()) if each["fits"]]
    advice, suggestion = plan.get("advice", ()), plan.get("suggestion")
    limit = plan.get("gpu_memory", 0)
    if layouts:
        total = layouts[0]["bytes"]["total"]
        lines.append(f"It fits on a card with {memory_text}: it needs {total / GB:.1f} GB, {total / limit:.0%} of it.")
        if advice:
            speed = advice[0]["relative_speed"]
            lines.append(f"It can be {speed:.2g} times as fast: {_join(_describe_options(advice[0]['options']))}.")
    elif advice:
        first = advice[0]
        lines.append(
            f"It does not fit as it is, but it does on {memory_text} when {_join(_describe_options(first['options']))}."
        )
        lines.append(f"Then it needs {first['bytes']['total'] / GB:.1f} GB. {_describe_quality(first['options'])}")
        for each in advice[1:]:
            share = each["relative_speed"] / (first["relative_speed"] or 1)
            lines.append(f"More exact, at {share:.0%} of that speed: {_join(_describe_options(each['options']))}.")
    elif suggestion is not None:
        missing = (suggestion["bytes"]["total"] - limit) / GB
        lines.append(f"It does not fit on a card with {memory_text}: even at the least it lacks {missing:.1f} GB.")
        lines.append("Choose a smaller model or smaller pictures.")
    return lines


def _describe_steps(plan: Mapping[str, Any]) -> str:
    steps, epochs = plan["steps"], plan["steps"] / max(1, plan["steps_per_epoch"])
    return f"{steps:,} steps; every picture is seen about {epochs * _get_repeats(plan):.0f} times."


def _get_repeats(plan: Mapping[str, Any]) -> float:
    return float(plan["samples_per_epoch"] / max(1, plan["images_per_epoch"]))


def _describe_options(flags: str) -> list[str]:
    names = [word[2:].partition("=")[0].removeprefix("no-") for word in flags.split() if word.startswith("--")]
    words = [OPTION_WORDS.get(name, name) for name in names]
    return words or ["nothing is changed"]


def _describe_quality(flags: str) -> str:
    if any(f"--{name}" in flags for name in QUALITY_OPTIONS):
        return "The model is rounded for that, which changes the pictures a little."
    return "The result is the same as without."


def _join(words: Sequence[str]) -> str:
    return ", ".join(words)


def describe_duration(seconds: float) -> str:
    """Format a time as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    minutes = seconds / 60
    return f"{round(minutes)} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe_devices()) + "\n")
