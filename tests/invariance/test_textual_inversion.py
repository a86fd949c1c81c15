"""Textual inversion and pivotal tuning: what is trained, equal runs, exact resume, and files that diffusers reads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from problem_lines import format_texts
from rank_processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import train, write_images

from library.config import parse_config
from library.dataloader.caption_templates import apply_templates, list_templates
from library.dataloader.prepare import prepare_data
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training.preflight import RunFacts, check_run_settings
from library.training.token_embeddings import build_embedding_modules, read_saved_vectors

MODELS = {"sd1": get_tiny_sd1_folder, "sdxl": lambda: "random:sdxl:tiny"}
CAPTIONS = ["a photo of mytoken, in a box", "mytoken", "a box (mytoken:1.3)", "a photo of a box"]
TOKEN = "--train embedding --token_string mytoken --num_vectors_per_token 3 --init_word a,b".split()
SETTINGS = "--max_train_steps 6 --learning_rate 0.05 --max_grad_norm 0 --seed 3 --save_every_n_steps 3".split()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = write_images(tmp_path_factory.mktemp("inversion"), {(64, 64): 8})
    for number, caption in enumerate(sorted((path.parent / "images").glob("*.txt"))):
        caption.write_text(f"a photo of mytoken, number {number}")
    return path


def run(ranks: int, dataset: Path, folder: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Train with four images in each step; return the tensors of all files of the last step."""
    batch = ("--train_batch_size", "1" if ranks == 2 else "2", "--gradient_accumulation_steps", "2")
    paths = ("--dataset_config", str(dataset), "--output_dir", str(folder))
    run_on_ranks(ranks, train, *SETTINGS, *batch, *paths, *flags)
    return read_files(folder)


def read_files(folder: Path) -> dict[str, torch.Tensor]:
    files = [path for path in folder.glob("*.safetensors") if "-step" not in path.name]
    return {f"{path.stem}/{key}": tensor for path in files for key, tensor in load_file(path).items()}


def load_extended(model: str, *flags: str):
    """Load a model and give its text encoders the vectors; return its family and pipeline."""
    config = parse_config(
        [*TOKEN, "--dataset_config", __file__, "--pretrained_model_name_or_path", model, *flags]
    ).config
    detected = detect_model(config.model)
    family = FAMILIES.get(detected.family)(config.model)
    pipe = family.load(detected, torch.float32)
    return family, pipe, build_embedding_modules(config, family, pipe)


@pytest.mark.parametrize("name", MODELS)
def test_diffusers_encodes_prompts_with_an_embedding_file_as_the_model_in_memory(name, tmp_path):
    family, pipe, modules = load_extended(MODELS[name]())
    trained = {key: each for key, each in modules.named_parameters() if each.requires_grad}
    keys = {"sd1": ["emb_params"], "sdxl": ["clip_l", "clip_g"]}[name]
    assert [each.shape[0] for each in trained.values()] == [3] * len(keys)
    with torch.no_grad():
        for each in trained.values():
            each += torch.randn(each.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = family.encode_prompts(pipe, [*CAPTIONS[:2], CAPTIONS[3]])

    kind = {"sd1": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}[name]
    family.load(detect_model(family.model_config), torch.float32).save_pretrained(tmp_path / "model")
    theirs = (
        kind.from_pretrained(tmp_path / "model", safety_checker=None)
        if name == "sd1"
        else kind.from_pretrained(tmp_path / "model")
    )
    for number, vectors in enumerate(trained.values()):
        end = "" if not number else "_2"
        theirs.load_textual_inversion(
            {keys[number]: vectors.detach().clone()},
            token="mytoken",
            text_encoder=getattr(theirs, f"text_encoder{end}"),
            tokenizer=getattr(theirs, f"tokenizer{end}"),
        )
        for module in getattr(theirs, f"text_encoder{end}").modules():
            if getattr(module, "eos_token_id", None) == 2:  # the pooled state would be that of the new word
                module.eos_token_id = theirs.tokenizer.eos_token_id
    with torch.no_grad():
        found = theirs.encode_prompt(
            [*CAPTIONS[:2], CAPTIONS[3]], device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
    assert torch.equal(found[0], ours["embeds"])
    assert name == "sd1" or torch.equal(found[2], ours["pooled"])


@pytest.mark.parametrize("name", MODELS)
def test_texts_without_the_word_are_encoded_as_before(name):
    family, pipe, _ = load_extended(MODELS[name](), "--weighted_captions")
    plain = family.load(detect_model(family.model_config), torch.float32)
    with torch.no_grad():
        before, after = (family.encode_prompts(each, CAPTIONS) for each in (plain, pipe))
    assert all(torch.equal(before[key][3], after[key][3]) for key in before)
    assert not any(torch.equal(before[key][number], after[key][number]) for key in before for number in range(3))


def list_problems(*flags: str) -> list[str]:
    loaded = parse_config(["--dataset_config", __file__, *flags])
    if loaded.problems:
        return format_texts(loaded.problems)
    detected = detect_model(loaded.config.model)
    facts = RunFacts(family=FAMILIES.get(detected.family)(loaded.config.model), detected=detected)
    try:
        check_run_settings(loaded.config, facts)
    except ConfigError as error:
        return format_texts(error.problems)
    return []


def test_all_problems_of_a_new_word_are_told_at_once_before_a_model_is_loaded():
    model = ("--pretrained_model_name_or_path", get_tiny_sd1_folder())
    assert list_problems(*model, "--train", "embedding") == [
        "missing: train embedding trains the vectors of a word; add --token_string WORD, the word for what is in the images"
    ]
    texts = list_problems(
        *"--train embedding --num_vectors_per_token 80 --use_object_template --use_style_template --fsdp --tp_size 2".split(),
        *"--cache_text_encoder_outputs --network_weights none.safetensors --token_string".split(),
        "two words",
    )
    assert [text.partition(";")[0] for text in texts if "no such file" not in text] == [
        "'two words': spaces, commas, braces and bars cannot be part of it",
        "80",
        "contradicts use_object_template",
        *["not supported with token_string: the vectors are whole on every process, with a whole model"] * 2,
        "not supported with token_string: what the text encoders return changes with the vectors",
        "train embedding has no LoRA",
    ]
    words = "--train embedding --token_string a --init_word ab".split()
    assert list_problems(*model, *words) == [
        "'a' is a token of the model; use a word that is none",
        "'ab' has 2 tokens, of which 1 would be used; use num_vectors_per_token 2, or a shorter word",
    ]
    assert list_problems("--pretrained_model_name_or_path", "random:flux:tiny", "--token_string", "mytoken") == [
        "the text encoders of FLUX.1 take no new words here; use Stable Diffusion 1, 2 or XL"
    ]


def test_a_command_of_sd_scripts_trains_the_vectors_alone_and_draws_its_templates(dataset):
    flags = (
        "--token_string mytoken --init_word cat --num_vectors_per_token 4 --use_style_template --weights w.safetensors"
    )
    loaded = parse_config(["--dataset_config", str(dataset), *flags.split()])
    adapter = loaded.config.adapter
    assert (adapter.train, loaded.config.save.output_name) == ("embedding", "mytoken")
    assert (adapter.num_vectors_per_token, adapter.embedding_weights) == (4, "w.safetensors")
    assert parse_config([*flags.split(), "--network_dim", "4"]).config.adapter.train == "lora"
    styles = list_templates(adapter)
    objects = list_templates(parse_config(["--token_string", "mytoken", "--use_object_template"]).config.adapter)
    assert (len(styles), len(set(styles)), len(objects), len(set(objects))) == (19, 17, 27, 27)
    prepared = apply_templates(prepare_data(loaded.config.data, 8), adapter)
    captions = prepared.list_first_epoch_captions(prepared.build_batch_plan(1, loaded.config.train), 10)
    assert len(captions) == 8 and len({*captions}) > 3 and {*captions} <= {*styles}
    assert "a close-up painting in the style of mytoken" in styles and "a photo of the weird mytoken" in objects


@pytest.mark.slow
def test_vectors_are_equal_on_two_ranks_and_start_from_a_file(dataset, tmp_path):
    flags = (*TOKEN, "--optimizer_type", "SGD", "--learning_rate", "5", "--output_name", "word")
    one, two = (run(ranks, dataset, tmp_path / str(ranks), *flags) for ranks in (1, 2))
    assert [*one] == ["word/emb_params"]
    (_, _, first), (_, _, second) = (
        load_extended(get_tiny_sd1_folder(), *more)
        for more in ((), ("--embedding_weights", str(tmp_path / "1" / "word.safetensors")))
    )
    start, loaded = (next(each for each in modules.parameters() if each.requires_grad) for modules in (first, second))
    moved = float((one["word/emb_params"] - start.detach()).abs().max())
    assert moved > 1e-3 and float((one["word/emb_params"] - two["word/emb_params"]).abs().max()) < 1e-5 * max(1, moved)
    assert torch.equal(loaded, one["word/emb_params"])


@pytest.mark.slow
def test_a_killed_pivotal_tuning_resumes_to_the_bit(dataset, tmp_path):
    """SDXL, with templates, EMA, previews and the vectors in the LoRA file as well."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a photo of mytoken --w 64 --h 64 --s 2")
    flags = (
        *"--pretrained_model_name_or_path random:sdxl:tiny --train lora --token_string mytoken".split(),
        *"--num_vectors_per_token 2 --network_dim 2 --ema_decay 0.9 --save_state --bundle_emb --embedding_lr 0.01".split(),
        *"--lr_scheduler cosine --use_object_template --gradient_checkpointing".split(),
        *("--sample_prompts", str(prompts), "--sample_every_n_steps", "3"),
    )
    whole = run(1, dataset, tmp_path / "whole", *flags)
    last = ("lora.safetensors", "lora_emb.safetensors", "lora-ema*", "lora-state")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", ignore=shutil.ignore_patterns(*last))
    resumed = run(1, dataset, tmp_path / "killed", *flags, "--auto_resume")

    assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)
    for key in ("clip_l", "clip_g"):
        assert torch.equal(whole[f"lora/bundle_emb.mytoken.{key}"], whole[f"lora_emb/{key}"])
        assert not torch.equal(whole[f"lora_emb/{key}"], whole[f"lora-ema_emb/{key}"])
    assert any("lora_up" in key and tensor.any() for key, tensor in whole.items())
    lines = [json.loads(line) for line in (tmp_path / "whole" / "lora.metrics.jsonl").read_text().splitlines()]
    assert any("lr/embedding" in line for line in lines)
    assert len(list((tmp_path / "whole" / "sample").glob("*.png"))) == 2


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_run_begins_with_any_image_also_one_whose_caption_lacks_the_word(seed, tmp_path):
    dataset = write_images(tmp_path, {(64, 64): 8})
    for number, caption in enumerate(sorted((tmp_path / "images").glob("*.txt"))):
        caption.write_text("a photo of mytoken" if number % 2 else "a photo of a box")
    flags = ("--max_train_steps", "1", "--seed", seed, "--dataset_config", str(dataset), "--output_dir", str(tmp_path))
    run_on_ranks(1, train, *TOKEN, *flags)
    assert read_files(tmp_path)


def test_vectors_start_from_those_of_the_word_in_a_lora_file(tmp_path, caplog):
    """Also where that file is given as embedding_weights; those of another word are none of this one."""
    bundled = {f"bundle_emb.{word}.clip_l": torch.randn(3, 64) for word in ("mytoken", "mytoken2")}
    save_file(bundled, path := tmp_path / "lora.safetensors")
    for option in ("--network_weights", "--embedding_weights"):
        _, _, modules = load_extended(get_tiny_sd1_folder(), "--train", "lora", option, str(path))
        (vectors,) = (each for each in modules.parameters() if each.requires_grad)
        assert torch.equal(vectors, bundled["bundle_emb.mytoken.clip_l"])
        assert ("no effect on this run: --init_word" in caplog.text) == (option == "--network_weights")
        caplog.clear()
    adapter = parse_config([*TOKEN, "--train", "lora", "--network_weights", str(path)]).config.adapter
    facts = FAMILIES.get("sd1").facts
    assert read_saved_vectors(adapter, facts) is not None
    assert read_saved_vectors(replace(adapter, token_string="else"), facts) is None
