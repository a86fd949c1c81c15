"""A step of ours beside a bare one: both compute the same, which the bench itself finds out."""

import json

import pytest
import torch
from ranks import on_ranks

from library.errors import ConfigError
from library.estimate.memory_meter import MemoryMeter
from library.tools import bench, bench_memory, bench_step
from library.tools.bench_run import made_up_run, settings, with_pictures

WORDS = ("step", "--resolution", "64", "--bench_steps", "2", "--repetitions", "2", "--network_dim", "2", "--json")
RATIOS = ["ours / bare", "ours / bare, processor time"]
APART = ["loss, ours and bare apart", "gradient, ours and bare apart"]


def measured(*words, is_wrong=False):
    if is_wrong:  # as if somebody had changed what a step computes
        honest = bench_step.Bare._backward
        bench_step.Bare._backward = lambda self, forward, target: honest(self, forward, target + 0.5)
    text, code = bench.run([*WORDS, *words])
    return code, json.loads(text)


def test_a_step_is_measured_beside_a_bare_one_that_computes_the_same():
    ((code, said),) = on_ranks(1, measured, "--gradient_accumulation_steps", "2", "--train_batch_size", "3")
    found = {figure["name"]: figure for figure in said["figures"]}
    assert code == 0 and {"machine", "versions", "device"} < said.keys()
    assert all(len(found[name]["values"]) == 2 and found[name]["target"] == 1.15 for name in RATIOS)
    for name in APART:
        assert found[name]["median"] < found[name]["target"] and len(found[name]["values"]) == 2
    for number, ratio in enumerate(found["ours / bare"]["values"]):
        assert ratio == pytest.approx(found["our step"]["values"][number] / found["bare step"]["values"][number])
    assert found["our peak memory"]["median"] > 0


def test_another_loss_is_found():
    ((_, said),) = on_ranks(1, wrongly_measured)
    found = {figure["name"]: figure for figure in said["figures"]}
    assert all(found[name]["median"] > found[name]["target"] for name in APART)


def wrongly_measured():
    return measured(is_wrong=True)


def test_memory_is_measured_with_every_switch_and_without(monkeypatch):
    asked = []

    def said(words, options):
        asked.append(list(words))
        return {"our step": {"median": 2.0 + len(asked), "values": [2.0 + len(asked)]},
                "our step, processor time": {"median": 1.0 + len(asked), "values": [1.0 + len(asked)]},
                "our peak memory": {"median": 9.0 - len(asked) / 2, "values": [9.0 - len(asked) / 2]}}  # fmt: skip

    monkeypatch.setattr(bench_memory, "_measured", said)
    text, _ = bench.run(["memory", "--resolution", "64", "--json"])
    figures = json.loads(text)["figures"]
    assert len(asked) == len(bench_memory.SWITCHES) and "--json" not in asked[0]
    assert [figure["remark"] for figure in figures[3:6]] == ["1.33 times as long", "1.50 times as long",
                                                             "+0.500 GB saved"]  # fmt: skip
    numbers = {words[words.index("--blocks_to_swap") + 1] for words in asked if "--blocks_to_swap" in words}
    assert len(numbers) == 2 and all(number.isdecimal() and int(number) > 0 for number in numbers)


def test_bytes_and_operations_of_switches_are_counted_and_those_of_a_real_step_are_as_many(monkeypatch, tmp_path):
    names = ["plain", "checkpointing", "base in int8"]
    monkeypatch.setattr(bench_memory, "SWITCHES", {name: bench_memory.SWITCHES[name] for name in names})
    words = ["--resolution", "64", "--network_dim", "2", "--train_batch_size", "2"]
    text, _ = bench.run(["memory", "--count", *words, "--json"])
    figures = json.loads(text)["figures"]
    told = {figures[row]["name"].removesuffix(": operations"): [each["median"] for each in figures[row : row + 4]]
            for row in range(0, len(figures), 4)}  # fmt: skip
    assert [*told] == [*names, "checkpointing, a quarter of the budget", "mixed_precision bf16"]
    operations, frozen, kept, most = (
        dict(zip(told, column, strict=True)) for column in zip(*told.values(), strict=True)
    )
    assert on_ranks(1, operations_of_a_step, tmp_path, words) == [pytest.approx(1e12 * operations["plain"])]
    plain, twice, packed, some, half = told
    assert operations[twice] > operations[some] > operations[plain] == operations[packed]
    assert kept[twice] < kept[some] < kept[plain] and kept[half] < kept[plain]
    assert frozen[twice] == frozen[plain] == 2 * frozen[half] > frozen[packed]
    assert most[twice] < most[plain] and all(most[name] > frozen[name] + kept[name] for name in told)


def operations_of_a_step(folder, words):
    config, given = settings(words, bench_step.Arguments)
    with made_up_run(with_pictures(config, folder, 1), given, folder) as run, MemoryMeter(torch.device("cpu")) as meter:
        work = next(run.loader.steps(0))
        run.strategy.gradients(run.task, work.batches, work.samples, 0)
    return meter.flops


def test_mistakes_are_told():
    for words, problem in ((["step", "--dataset_config", "x"], "--dataset_config: a bench makes its own pictures"),
                           (["memory", "--base_storage", "int8"], "--base_storage: is measured by this bench"),
                           (["memory", "--count", "--fsdp"], "--fsdp: one device is counted"),
                           (["step", "--bench_step", "2"], "--bench_step: unknown option; did you mean --bench_st"),
                           ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            bench.run(words)
        assert caught.value.problems[0].startswith(problem)
    for name in ("step", "startup", "memory"):
        assert "--repetitions INTEGER" in bench.run([name, "--help"])[0]
    said = bench.run(["pipeline", "--help"])[0]
    assert "(4 8 16)" in said and "random:flux:tiny" in said
