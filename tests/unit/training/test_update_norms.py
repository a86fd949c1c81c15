"""Update norms after the last step; a LoRA that changes nothing is an error."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import BOFTConfig, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, inject_adapter_in_model
from rank_processes import run_on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import write_images

from library.adapters import update_norms
from library.adapters.update_norms import compute_update_norms
from library.training.callbacks import UpdateNorms, group_norms_by_layer_type


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(8, 12), "b": nn.Conv2d(8, 4, 3)}) for _ in range(2))


def build_trained_model(settings) -> nn.Module:
    """A model with an adapter whose weights are changed in all layers but one."""
    torch.manual_seed(3)
    model = Model()
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "blocks.1.b" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(r=3, lora_alpha=2, target_modules=["a", "b"]),
        LoHaConfig(r=3, alpha=2, target_modules=["a", "b"]),
        LoHaConfig(r=2, alpha=2, target_modules=["a", "b"], use_effective_conv2d=True),
        LoKrConfig(r=3, alpha=2, target_modules=["a", "b"]),
        LoKrConfig(r=2, alpha=3, target_modules=["a", "b"], use_effective_conv2d=True, decompose_both=True),
    ],
    ids=["lora", "loha", "loha tucker", "lokr", "lokr tucker"],
)
def test_an_update_norm_is_the_norm_of_the_weight_delta_whatever_became_of_the_base_weight(settings):
    model = build_trained_model(settings)
    weights = {name: weight.data for name, weight in model.named_parameters() if "base_layer" in name}
    for name in weights:  # as ZeRO 3 leaves them between forwards
        model.get_parameter(name).data = torch.empty(0)
    norms = compute_update_norms(model)
    for name, weight in weights.items():
        model.get_parameter(name).data = weight

    assert list(norms) == ["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b"]
    assert norms["blocks.1.b"] == 0
    for name in ("blocks.0.a", "blocks.0.b", "blocks.1.a"):
        layer = model.get_submodule(name)
        before = layer.get_base_layer().weight.detach().clone()
        layer.merge()
        assert norms[name] == pytest.approx(float((layer.get_base_layer().weight - before).norm()), rel=1e-4)


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("max_numel", "chunks"), [(2**24, 2), (130, 5), (1, 12)])
def test_update_norms_of_one_shape_are_computed_at_once_in_chunks(max_numel, chunks, monkeypatch):
    """A kernel for each of a model's hundreds of layers takes longer than the products."""
    monkeypatch.setattr(update_norms, "MAX_COPIED_NUMEL", max_numel)
    torch.manual_seed(1)
    model = nn.ModuleList(nn.Linear(8, 12 if index % 2 else 6) for index in range(12))
    inject_adapter_in_model(LoraConfig(r=3, target_modules=r"\d+", init_lora_weights=False), model)
    with ProductCounter() as counter:
        norms = compute_update_norms(model)
    assert counter.count == 2 * chunks
    deltas = {name: model.get_submodule(name).get_delta_weight("default") for name in norms}
    assert list(norms) == [str(index) for index in range(12)]
    assert norms == pytest.approx({name: float(delta.norm()) for name, delta in deltas.items()}, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        OFTConfig(oft_block_size=2, r=0, target_modules=["a", "b"]),
        BOFTConfig(boft_block_size=2, target_modules=["a"]),
    ],
    ids=["oft", "boft"],
)
def test_an_untrained_rotation_has_update_norm_zero(settings):
    model = build_trained_model(settings)
    assert compute_update_norms(model)["blocks.0.a"] > 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.zeros_(parameter)
    norms = compute_update_norms(model)
    assert set(norms.values()) == {0.0}


def test_layers_of_equal_name_in_several_blocks_are_one_layer_type():
    norms = {
        "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q": 3.0,
        "mid_block.attentions.0.transformer_blocks.7.attn1.to_q": 4.0,
        "text_encoder.text_model.encoder.layers.3.self_attn.q_proj": 1.0,
        "conv_in": 2.0,
    }

    assert group_norms_by_layer_type(norms) == {"attn1.to_q": 5.0, "self_attn.q_proj": 1.0, "conv_in": 2.0}


def test_layers_without_update_are_listed_and_a_zero_lora_is_an_error(caplog):
    update_norms, logged = UpdateNorms(), {}
    metric_logger = SimpleNamespace(log_values=lambda run, values: logged.update(values))
    model = build_trained_model(LoraConfig(r=3, target_modules=["a", "b"]))
    strategy = SimpleNamespace(unwrap_model=lambda model: model, comm=SimpleNamespace(is_main=True))
    run = SimpleNamespace(optimizer=None, strategy=strategy, model=model, metric_logger=metric_logger)
    update_norms(run)
    update_norms.fail_if_zero(run)

    assert "1 of 4 LoRA layers were not updated: blocks.1.b" in caplog.text
    assert logged["update/dead_layers"] == 1 and logged["update/kind/a"] > 0


def train_with_rate_zero(*flags: str) -> None:
    """A command with a learning rate of 0 is refused at the start, so the rate is set afterwards."""
    from library.config import parse_config
    from library.training.run import run_training

    config = parse_config(["--network_train_unet_only", *flags, "--quiet", "--max_data_loader_n_workers", "0"]).config
    run_training(replace(config, optim=replace(config.optim, learning_rate=0.0)))


@pytest.mark.slow
def test_a_run_with_learning_rate_zero_ends_with_an_error_after_saving(tmp_path):
    data = write_images(tmp_path, {(64, 64): 2})
    with pytest.raises(
        AssertionError,
        match=r"UserError: the LoRA has no effect: its update is zero in all \d+ layers "
        r"after 2 steps .*learning rate was 0",
    ):
        run_on_ranks(
            1,
            train_with_rate_zero,
            "--dataset_config",
            str(data),
            "--output_dir",
            str(tmp_path),
            "--max_train_steps",
            "2",
        )

    assert (tmp_path / "lora.safetensors").is_file() and (tmp_path / "lora.report.html").is_file()
    lines = [json.loads(line) for line in (tmp_path / "lora.metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["update/dead_layers"] == lines[-1]["update/layers"] > 0
    assert [line["update/norm"] for line in lines if "update/norm" in line] == [0.0, 0.0]
