"""A LoRA trained on each family works in diffusers, from images to the file."""

from pathlib import Path

import client_cases
import peft
import pytest
import torch
from adapter_tensors import convert_adapter_to_kohya
from family_runs import train
from PIL import Image
from rank_processes import run_on_ranks
from safetensors import safe_open
from small_unet import randomize_lora_b
from tiny_pipelines import TINY

from library.adapters import injection
from library.adapters.file_writer import write_adapter_file
from library.config.schema import AdapterConfig
from library.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


@torch.no_grad()
def predict(family, pipe, batch):
    t = torch.tensor([300.0, 700.0])
    return family.predict(pipe, getattr(pipe, family.facts.denoiser_name), batch.latents, t, batch)


@pytest.mark.quick
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("sd1", "sd2")), "sdxl"])
def test_diffusers_predicts_the_same_with_the_file_as_the_model_in_memory(name, tmp_path):
    tiny, family = TINY[name](), FAMILIES.get(name)()
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    base = predict(family, tiny.pipe, tiny.batch)
    adapter = injection.inject_into_model(
        denoiser, AdapterConfig(network_dim=6, network_alpha=2.5), family.facts.lora.targets, seed=1
    )
    randomize_lora_b(denoiser)
    write_adapter_file(tmp_path / "lora.safetensors", convert_adapter_to_kohya(denoiser, adapter, family), {})

    reference = family.load(tiny.source, torch.float32)
    reference.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")

    with_lora = predict(family, tiny.pipe, tiny.batch)
    torch.testing.assert_close(predict(family, reference, tiny.batch), with_lora, rtol=1e-4, atol=1e-5)
    assert (with_lora - base).abs().max() > 1e-2, "the LoRA changes the prediction"
    loaded = [
        each for each, _ in getattr(reference, family.facts.denoiser_name).named_parameters() if ".lora_B." in each
    ]
    assert len(loaded) == len(adapter.modules)


@pytest.mark.parametrize(
    "name",
    [
        *("aura_flow", "ovis_image", "longcat_image", "longcat_image_edit", "ernie_image", "lumina2", "krea2", "sana"),
        "ideogram4",
        *(
            "cogview4",
            "glm_image",
            "z_image_omni",
            "anima",
            "cosmos2_text2image",
            "cosmos2_video2world",
            "flux3",
            "qwen_image21",
            "hunyuan_image",
            "kolors",
            "hidream",
            "kandinsky5_image",
        ),
        *(
            "wan",
            "wan_i2v",
            "wan_flf2v",
            "wan_vace",
            "wan_fun_control",
            "wan_fun_control11",
            "wan_animate",
            "wan22_ti2v",
            "skyreels_v2",
            "skyreels_v2_i2v",
            "hunyuan_video15",
            "hunyuan_video15_i2v",
        ),
        *("ltx_video", "ltx_video095", "ltx2"),
        *("sd1_inpainting", "sd2_inpainting", "sdxl_inpainting", "flux_fill", "flux_control"),
        *("sd1_pix2pix", "sdxl_pix2pix", "sdxl_refiner", "bria", "bria_fibo", "bria_fibo_edit", "nucleus_image"),
        "bria_fibo2",
        *("hunyuan_video", "hunyuan_video_i2v", "hunyuan_video_33ch_i2v", "framepack"),
        *("cogvideox", "cogvideox15", "mochi", "kandinsky5_video", "kandinsky5_i2v", "kandinsky6_video", "sana_video"),
        "minimax_h3",
    ],
)
def test_diffusers_loads_every_key_of_the_file_of_a_run(name, tmp_path):
    case = client_cases.build_trained_case(name, "LoRA")
    # The default file of Lumina 2 is for ComfyUI, which has only its original names.
    file = client_cases.write_file(case, tmp_path / "lora.safetensors", "diffusers")
    loaded = client_cases.load_in_diffusers(case, tmp_path / "lora.safetensors")
    assert client_cases.measure_errors(case, loaded)["denoiser"] < 1e-4
    assert len(file.tensors) == 2 * len(case.adapter.modules)


@pytest.mark.parametrize(
    "name, layers",
    [
        ("pixart_sigma", ["to_q", "to_k", "to_v", "to_out.0"]),
        ("prx_pixel", ["img_qkv_proj", "txt_kv_proj", "to_out.0", "gate_proj", "up_proj", "down_proj"]),
        ("prx", ["img_qkv_proj", "txt_kv_proj", "to_out.0", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_peft_loads_a_file_into_a_transformer_that_diffusers_loads_none_for(name, layers, tmp_path):
    case = client_cases.build_trained_case(name, "LoRA")
    file = client_cases.write_file(case, tmp_path / "lora.safetensors")
    state = {name.removeprefix("transformer."): tensor for name, tensor in file.tensors.items()}
    pipe = client_cases.load_tiny_pipeline(name)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=4, target_modules=layers), pipe.transformer)
    loaded = peft.set_peft_model_state_dict(pipe.transformer, state)
    assert loaded.unexpected_keys == []
    assert client_cases.measure_errors(case, client_cases.compute_outputs(name, pipe))["denoiser"] < 1e-4


VERSIONS = {
    "sd2": ("sd_v2_v", "stable-diffusion-v2-768-v/lora"),
    "sdxl": ("sdxl_base_v1-0", "stable-diffusion-xl-v1-base/lora"),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_run_from_images_to_a_file_and_previews(name, tmp_path):
    source = f"random:{name}:tiny"
    (tmp_path / "prompts.txt").write_text("a red circle --w 64 --h 96 --s 2\n", encoding="utf-8")
    run_on_ranks(
        1,
        train,
        "--pretrained_model_name_or_path",
        source,
        "--dataset_config",
        str(ROOT / "dataset_configs" / "demo.toml"),
        *"--max_train_steps 2 --learning_rate 1e-2 --network_dim 2".split(),
        "--output_dir",
        str(tmp_path),
        "--mixed_precision",
        "bf16",
        "--sample_prompts",
        str(tmp_path / "prompts.txt"),
        "--sample_every_n_steps",
        "2",
    )

    (image,) = (tmp_path / "sample").glob("*.png")
    assert Image.open(image).size == (64, 96)
    with safe_open(tmp_path / "lora.safetensors", "pt") as file:
        metadata, keys = file.metadata(), set(file.keys())
    assert (metadata["ss_base_model_version"], metadata["modelspec.architecture"]) == VERSIONS[name]
    assert metadata["ss_v2"] == str(name == "sd2")
    tiny, family = TINY[name](), FAMILIES.get(name)()
    before = predict(family, tiny.pipe, tiny.batch)
    tiny.pipe.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    assert not torch.allclose(predict(family, tiny.pipe, tiny.batch), before)
    loaded = [each for each, _ in getattr(tiny.pipe, family.facts.denoiser_name).named_parameters() if ".lora_" in each]
    assert len(loaded) * 3 == len(keys) * 2
