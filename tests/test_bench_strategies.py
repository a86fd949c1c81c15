"""The bench that compares strategies: each way is asked for with the same work."""

import json

import pytest

from library.errors import ConfigError
from library.tools import bench, bench_strategies
from library.tools.bench_strategies import Measured

WORDS = ("strategies", "--resolution", "64", "--bench_steps", "2", "--repetitions", "1", "--json")


def test_ways_take_turns_with_the_same_pictures_in_a_step_and_one_that_is_refused_is_told(monkeypatch):
    asked = []

    def told(name, words, folder, options):
        asked.append((name, words[2:]))
        if name == "PP":
            return "--pp_size 4: too many"
        return Measured({"DDP": 0.5, "TP": 0.25}[name] * len(asked), 3.0, 1.0)

    monkeypatch.setattr(bench_strategies, "_together", told)
    text, _ = bench.run([*WORDS, "--repetitions", "2", "--ways", "DDP", "PP", "TP", "--world_size", "4",
                         "--train_batch_size", "2", "--gradient_accumulation_steps", "3"])  # fmt: skip
    said = json.loads(text)
    assert asked == [("DDP", []), ("PP", ["--pp_size", "4", "--gradient_accumulation_steps", "12"]),
                     ("TP", ["--tp_size", "4", "--train_batch_size", "8"]), ("DDP", []),
                     ("TP", ["--tp_size", "4", "--train_batch_size", "8"])]  # fmt: skip
    figures = {figure["name"]: figure for figure in said["figures"]}
    assert said["PP is left out"] == "--pp_size 4: too many" and "PP: steps a second" not in figures
    assert figures["  beside DDP"]["values"] == [0.5 / 0.75, 2.0 / 1.25]


def test_what_is_compared_cannot_be_asked_for():
    with pytest.raises(ConfigError) as error:
        bench.run([*WORDS, "--ways", "DPP", "--fsdp"])
    assert [line.partition(":")[0] for line in error.value.problems] == ["--ways", "--fsdp"]


@pytest.mark.long
def test_real_processes_train():
    text, _ = bench.run([*WORDS, "--ways", "DDP", "FSDP", "--network_dim", "4", "--on_oom", "ladder"])
    said = json.loads(text)
    assert "on_oom" in said["FSDP is left out"]
    figures = {figure["name"]: figure["median"] for figure in said["figures"]}
    assert figures["DDP: steps a second"] > 0 and figures["  peak memory of a process"] > 0.1
