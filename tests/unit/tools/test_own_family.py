"""A family of a user's own, written as docs/adding_a_family.md says, is checked, and problems in it are named."""

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest
import torch
from example_family import FAMILY, MODULE, PAGE, SOURCE, forget_modules, read_example_files, write_example
from rank_processes import find_free_port
from safetensors.torch import load_file, save_file
from training_runs import write_images

from library.config.schema import ModelConfig
from library.errors import ConfigError, UserError
from library.models.detect import detect_model
from library.models.families import CONTROL_FAMILIES, FAMILIES
from library.models.own_families import (
    compute_family_fingerprint,
    find_contradictions,
    identify_class,
    load_own_family,
)
from library.tools.family_check.cases import CheckFailedError
from library.tools.family_check.checks import CHECKS
from library.tools.family_check.own_case import build_own_case, detect_check_model
from library.tools.family_check.preview_checks import PREVIEW_CHECKS
from library.tools.models import run_models

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The folder with the files of the page, in which the program is started."""
    folder = write_example(tmp_path / "example")
    monkeypatch.chdir(folder)
    with forget_modules(MODULE, "own"):
        yield folder


def write_own(folder, code, base="PixArtAlpha"):
    """Write a module with a family that differs from the example's in its code."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    header = "from dataclasses import replace\nfrom pixart_alpha import *\nfrom pixart_alpha import PixArtAlpha\n"
    (folder / "own.py").write_text(f"{header}FACTS = PixArtAlpha.facts\n\nclass Own({base}):\n{lines}\n", "utf-8")


def read_problem(family, model=SOURCE):
    with pytest.raises(UserError) as caught:
        detect_model(ModelConfig(model, family=family))
    return str(caught.value)


def test_the_example_is_found_in_the_current_directory(example):
    model = detect_model(ModelConfig(SOURCE, family=FAMILY))
    assert (model.family, model.family_name, model.size_multiple) == (FAMILY, "PixArt-Alpha", 16)
    assert model == detect_model(SOURCE)
    assert FAMILIES.get(model.family)().facts.pipeline.class_name == "PixArtAlphaPipeline"


def detect_in_process(queue):
    queue.put(detect_model(ModelConfig(SOURCE, family=FAMILY)).family_name)


@pytest.mark.slow
def test_a_spawned_process_finds_the_class(example):
    detect_model(SOURCE)  # which adds the current directory to the path
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=detect_in_process, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and queue.get() == "PixArt-Alpha"


def test_what_is_wrong_with_the_name_of_a_family_is_said_in_one_line(example):
    folder = str(example)
    for family, text in {
        "pixart_alfa:PixArtAlpha": f"No module named 'pixart_alfa'; start in the directory that has it (now {folder})",
        "pixart_alpha:PixartAlpha": "module pixart_alpha has no 'PixartAlpha'; did you mean PixArtAlpha?",
        "pixart_alpha:MAX_TOKENS": "is not a model family; subclass library.models.base.Family",
    }.items():
        problem = read_problem(family, str(example))
        assert text in problem and "\n" not in problem and problem.startswith("--family: ")


FAULTS = {
    "import nothing_of_this_name": "importing own failed|No module named 'nothing_of_this_name'",
    "raise RuntimeError('out of order')": r"importing own failed: RuntimeError: out of order \(own.py:\d+\)",
    "import sys\nsys.exit()": r"importing own failed: SystemExit \(own.py:\d+\)",
    "def broken(: pass": "importing own failed: SyntaxError: .*own.py, line",
    "facts = replace(FACTS, lora=replace(FACTS.lora, targets=()))": "no lora.targets",
    "facts = replace(FACTS, text=replace(FACTS.text, tokenizer_repo_ids={}))": "has tokenizer in only one of",
    "facts = replace(FACTS, text=replace(FACTS.text, has_negative_encoding=True))": "encode_negative_prompts",
    "facts = replace(FACTS, pipeline=replace(FACTS.pipeline, kind='video'))": "kind 'video' and frames None",
    "facts = replace(FACTS, pipeline=replace(FACTS.pipeline, configs={'tiny': Path('a.json')}))": "a.json in pipeline",
    "facts = replace(FACTS, text=None)": "has text of the type NoneType instead of TextFacts",
    "facts = replace(FACTS, lora=replace(FACTS.lora, targets='to_q'))": r"the text 'to_q' as lora.targets .*\('to_q',\)",
    "facts = replace(FACTS, lora=replace(FACTS.lora, targets=None))": "has lora.targets of the type NoneType .* tuple",
    "facts = replace(FACTS, pipeline=replace(FACTS.pipeline, configs=None))": "pipeline.configs of the type NoneType",
    "def generate_image(self, *args, **kwargs):\n    return None": "do not call; override generate_frames",
    "facts = replace(FACTS, detection=DetectionFacts(lambda read: {}['a']))": r"its match_configs fails: KeyError: 'a'",
    "facts = replace(FACTS, detection=DetectionFacts(lambda read: True))": "returns a bool; return a FamilyMatch",
    "facts = replace(FACTS, detection=DetectionFacts(lambda read: FamilyMatch('', 16, 'eps')))": "prediction type 'eps'",
    "facts = replace(FACTS, detection=DetectionFacts(lambda read: None))": "its files are not those of",
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_in_a_family_is_named_before_a_model_is_loaded(code, example):
    write_own(example, code)
    problem = read_problem("own:Own", "random:own:Own:tiny")
    assert re.search(FAULTS[code], problem) and "\n" not in problem


CONFIG_FAULTS = {
    ("'tiny.json'", "{}"): "has tiny.json in pipeline.configs, which is a str and no pathlib.Path",
    ("Path('tiny.txt')", "{}"): "tiny.txt in pipeline.configs, whose name does not end in .json",
    ("Path('tiny.json')", "{'a'"): "tiny.json in pipeline.configs, which cannot be read: Expecting property name",
    ("Path('tiny.json')", "[]"): "tiny.json in pipeline.configs, which does not map",
    ("Path('tiny.json')", '{"model_index.json": 1}'): "tiny.json in pipeline.configs, which does not map",
    ("Path('tiny.json')", "{}"): "tiny.json in pipeline.configs, which has no model_index.json",
}


@pytest.mark.parametrize(("path", "content"), CONFIG_FAULTS)
def test_a_faulty_configuration_of_a_family_is_named(path, content, example):
    for name in ("tiny.json", "tiny.txt"):
        (example / name).write_text(content, "utf-8")
    write_own(example, f"facts = replace(FACTS, pipeline=replace(FACTS.pipeline, configs={{'tiny': {path}}}))")
    problem = read_problem("own:Own", "random:own:Own:tiny")
    assert CONFIG_FAULTS[path, content] in problem and "\n" not in problem


def test_a_relative_path_of_a_configuration_begins_at_the_module(example, tmp_path, monkeypatch):
    code = "facts = replace(FACTS, pipeline=replace(FACTS.pipeline, configs={'tiny': Path('pixart_alpha_tiny.json')}))"
    write_own(example, code)
    monkeypatch.syspath_prepend(example)
    monkeypatch.chdir(tmp_path)
    assert detect_model(ModelConfig("random:own:Own:tiny")).bundled_config == str(example / "pixart_alpha_tiny")


def test_all_contradictions_are_named_together(example):
    write_own(example, "facts = replace(FACTS, lora=replace(FACTS.lora, targets=(), text_encoders={'clip': None}))")
    with pytest.raises(ConfigError) as caught:
        detect_model(ModelConfig("random:own:Own:tiny"))
    assert len(caught.value.problems) == 2


def test_a_model_of_another_pipeline_is_none_of_the_family(example, tmp_path):
    files = json.loads(read_example_files()["pixart_alpha_tiny.json"])
    for name, text in files.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(text))
    folder = str(tmp_path / "model")
    assert detect_model(ModelConfig(folder, family=FAMILY)).source_type == "folder"
    files["model_index.json"]["_class_name"] = "PixArtSigmaPipeline"
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(files["model_index.json"]))
    assert f"the pipeline class PixArtSigmaPipeline, and family {FAMILY} is for" in read_problem(FAMILY, folder)


def test_variants_of_a_family_are_listed(example):
    text = f"random:{FAMILY}:big: no such model; available: {SOURCE}"
    assert text in read_problem(FAMILY, f"random:{FAMILY}:big")


def test_a_single_file_has_the_sizes_of_a_configuration(example, tmp_path):
    detection = (
        "replace(FACTS.detection, keys=('t_block.1.weight',), diffusers_keys={'t_block.1.weight': 'adaln_single.linear."
        "weight'}, shape_checks={('t_block.1.weight', 1): ('transformer', 'cross_attention_dim')})"
    )
    options = "FamilyOptions(components={'vae': 'vae', 't5xxl': 'text_encoder'})"
    code = f"from library.models.facts import FamilyOptions\nfacts = replace(FACTS, detection={detection}, "
    write_own(example, f"{code}options={options})")
    weight = torch.zeros(144, 24)
    save_file({"adaln_single.linear.weight": weight}, tmp_path / "model.safetensors")
    problem = read_problem("own:Own", str(tmp_path / "model.safetensors"))
    assert "the file has no vae; give one with --vae" in problem
    save_file({"adaln_single.linear.weight": weight[:, :20].contiguous()}, tmp_path / "other.safetensors")
    assert "but of unknown sizes" in read_problem("own:Own", str(tmp_path / "other.safetensors"))


def identify_anew(family=FAMILY):
    """Import a family as another run does, and return what its caches are known by."""
    with forget_modules(*{MODULE, family.partition(":")[0]}):
        return identify_class(FAMILIES.get(family))


def append_line(path, line="# Changed.\n"):
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def test_caches_belong_to_the_source_of_the_family(example):
    before = identify_anew()
    append_line(example / "pixart_alpha.py")
    changed = identify_anew()
    append_line(example / "pixart_alpha_tiny.json", " ")
    assert len({before, changed, identify_anew()}) == 3
    assert identify_class(FAMILIES.get("sd1")) == ("StableDiffusion1",)
    assert compute_family_fingerprint(CONTROL_FAMILIES["flux"]["omini"]) is None  # as in checkpoints of before
    assert compute_family_fingerprint(FAMILY).startswith(f"{FAMILY} ")


def test_the_source_of_a_family_is_the_one_that_was_imported(example):
    family = load_own_family(FAMILY)
    append_line(example / "pixart_alpha.py")
    used = identify_class(family)
    assert used == identify_class(load_own_family(FAMILY)) != identify_anew()


def test_the_source_of_a_family_has_the_modules_that_it_imports(example):
    code = "def encode_prompts(self, pipe, prompts):\n    import json, texts.words\n    from helper import encode\n"
    write_own(example, f"{code}    return encode(pipe, prompts)")
    (example / "texts" / "inner").mkdir(parents=True)
    names = ("helper.py", "further.py", "texts/__init__.py", "texts/words.py", "texts/inner/__init__.py")
    for name in (*names, "unused.py"):
        (example / name).write_text("import further, own\n", "utf-8")
    digests = [identify_anew("own:Own")]
    for name in names:
        append_line(example / name)
        digests.append(identify_anew("own:Own"))
    assert len({*digests}) == 1 + len(names)
    append_line(example / "unused.py")
    (example / ".#own.py").symlink_to("nowhere")
    (example / "texts" / ".#words.py").symlink_to("nowhere")
    assert identify_anew("own:Own") == digests[-1]


def test_the_source_of_a_family_in_a_package_is_the_package(example):
    folder = example / "own_package" / "families"
    folder.mkdir(parents=True)
    files = [folder.parent / "__init__.py", folder / "__init__.py", folder / "own.py", folder.parent / "texts.py"]
    for path in files:
        path.write_text("from pixart_alpha import *\n", "utf-8")
    names = ("own_package", "own_package.families", "own_package.families.own")
    digests = set()
    for path in (*files, example / "pixart_alpha.py"):
        append_line(path)
        with forget_modules(MODULE, *names):
            append_line(files[2], "class Own(PixArtAlpha):\n    pass\n" if not digests else "")
            digests.add(identify_class(FAMILIES.get("own_package.families.own:Own")))
    assert len(digests) == len(files) + 1


def test_no_family_of_this_program_contradicts_itself():
    own = [name for by_control in CONTROL_FAMILIES.values() for name in by_control.values()]
    for name in (*FAMILIES.entries, *own):
        assert list(find_contradictions(FAMILIES.get(name))) == [], name


PLANTED = {
    "the facts agree with the class": "def __init__(self, config=None):\n    super().__init__(config)\n    self.a = 1",
    "the denoiser is called as by the diffusers pipeline": (
        "def predict(self, pipe, denoiser, noisy, t, batch):\n    return super().predict(pipe, denoiser, noisy, t + 1, batch)"
    ),
    "the scheduler samples the clean latents with a perfect model": (
        "def build_noise_process(self, pipe):\n    from library.diffusion.process import build_discrete_process\n"
        "    return build_discrete_process(pipe.scheduler.alphas_cumprod ** 1.1, 'epsilon')"
    ),
    "prompts are encoded as by the diffusers pipeline": (
        "def encode_prompts(self, pipe, prompts):\n    return super().encode_prompts(pipe, [each + '.' for each in prompts])"
    ),
    "a text is encoded alike each time, and alone as with others": (
        "def encode_prompts(self, pipe, prompts):\n    cond = super().encode_prompts(pipe, prompts)\n"
        "    return {'embeds': [each * len(prompts) for each in cond['embeds']]}"
    ),
    "a step on the meta device has the shapes of a real one": (
        "def encode_prompts_on_meta(self, pipe, prompts):\n    import torch\n"
        "    return {'embeds': [torch.empty(7, 48, device='meta') for _ in prompts]}"
    ),
    "pixels are encoded as by diffusers": (
        "def encode_moments(self, pipe, pixels):\n    moments = super().encode_moments(pipe, pixels)\n"
        "    return replace(moments, mean_and_std=moments.mean_and_std * 2)"
    ),
    "latents are decoded as by the diffusers pipeline": (
        "def decode_latents(self, pipe, latents):\n    return super().decode_latents(pipe, latents / 2)"
    ),
    "decoding inverts encoding": (
        "def decode_latents(self, pipe, latents):\n    return super().decode_latents(pipe, latents.flip(-1))"
    ),
    "a preview is the image of the diffusers pipeline": (
        "def build_sampling_kwargs(self, pipe, prompt, cond, negative):\n"
        "    return {**super().build_sampling_kwargs(pipe, prompt, cond, negative), 'guidance_scale': 4.0}"
    ),
    "a preview changes no state": (
        "def adapt_sampling_pipeline(self, pipe):\n    import torch\n    torch.rand(1)\n    return pipe"
    ),
}


@pytest.mark.parametrize("sentence", PLANTED)
def test_a_planted_mistake_fails_the_check_of_its_name(sentence, example):
    write_own(example, PLANTED[sentence])
    family = FAMILIES.get("own:Own")()
    case = build_own_case(family, detect_check_model("own:Own", None))
    with pytest.raises(CheckFailedError):
        {**CHECKS, **PREVIEW_CHECKS}[sentence](family, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["krea2", "chroma"])
def test_the_call_without_guidance_is_found_and_the_mask_of_a_prompt_hides_its_padding(name):
    """Krea 2 is without guidance at a scale of 0, of those that are tried; Chroma's pipeline made numbers of its mask."""
    family, model = FAMILIES.get(name)(), detect_check_model(name, None)
    case = build_own_case(family, model)
    assert case.guidance_off == (0.0 if name == "krea2" else 1.0)
    for sentence in (
        "the denoiser is called as by the diffusers pipeline",
        "prompts are encoded as by the diffusers pipeline",
    ):
        CHECKS[sentence](family, case)


@pytest.mark.slow
def test_the_example_passes_every_check_that_can_be_made(example):
    lines = list(run_models(["--check", FAMILY]))
    assert [line for line in lines[1:-1] if not line.startswith("pass")] == [
        "skip  text encoders can be trained through the prompts: lora.text_encoders names none"
    ]
    assert lines[-1].endswith("0 failed, 1 could not be made")


@pytest.mark.slow
def test_a_failed_check_gives_the_exit_code_1(example):
    write_own(example, PLANTED["a preview changes no state"])
    checks = run_models(["--check", "own:Own"])
    lines = []
    with pytest.raises(StopIteration) as end:
        while True:
            lines.append(next(checks))
    assert end.value.value == 1
    assert [line for line in lines if line.startswith("fail")] == [
        "fail  a preview changes no state: a preview draws from torch's global generator"
    ]


def test_the_arguments_of_the_tool_are_checked(example):
    for argv, text in {
        ("--check",): "--check: no value",
        ("--check", FAMILY, "--pretraind", "a"): "--pretraind: unknown option",
        ("--check", FAMILY, "--check", FAMILY): "--check: it is given twice",
    }.items():
        with pytest.raises(UserError, match=text):
            run_models(argv)
    write_own(example, "facts = replace(FACTS, pipeline=replace(FACTS.pipeline, configs={}))")
    with pytest.raises(UserError, match=r"no configuration 'tiny' in pipeline\.configs"):
        next(run_models(["--check=own:Own"]))
    with pytest.raises(UserError, match="--check: unknown model family 'fluxx'; did you mean flux"):
        next(run_models(["--check", "fluxx"]))


def run_program(folder, *arguments, ranks=1):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(find_free_port())]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(ROOT / "train_lora.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_example_is_trained_and_resumed_by_the_program(example, tmp_path):
    dataset = write_images(tmp_path / "data", {(96, 64): 3, (64, 64): 2})
    settings = (
        f"--family {FAMILY} --pretrained_model_name_or_path {SOURCE} --dataset_config {dataset} --max_train_steps 2 "
        "--save_every_n_steps 1 --save_state --network_dim 2 --learning_rate 1e-2 --max_data_loader_n_workers 1"
    ).split()
    for ranks, output, more in (
        (1, "one", ()),
        (1, "resumed", ("--resume", "one/lora-step00000001-state")),
        (2, "two", ("--cache_latents", "--cache_text_encoder_outputs")),
    ):
        run = run_program(example, *settings, "--output_dir", output, *more, ranks=ranks)
        assert run.returncode == 0, run.stderr
    one, resumed = (load_file(example / name / "lora.safetensors") for name in ("one", "resumed"))
    assert all(torch.equal(one[key], resumed[key]) for key in one) and one.keys() == resumed.keys()

    (example / "pixart_alpha.py").write_text(read_example_files()["pixart_alpha.py"] + "# Changed.\n", "utf-8")
    again = (*settings, "--output_dir", "again", "--resume", "one/lora-step00000001-state")
    assert f"the source of {FAMILY} changed" in run_program(example, *again).stderr
    (example / "pixart_alpha.py").rename(example / "elsewhere.py")
    assert "No module named 'pixart_alpha'" in run_program(example, *again).stderr


def test_the_snippet_of_the_page_joins_the_files_of_a_folder(example, monkeypatch):
    (code,) = re.findall(r"```python\n(import json.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    files = json.loads(read_example_files()["pixart_alpha_tiny.json"])
    for name, text in files.items():
        path = example / "PixArt-XL-2-1024-MS" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(text))
    exec(compile(code, "snippet", "exec"), {})
    assert json.loads((example / "pixart_alpha.json").read_text()) == files
    (example / "pixart_alpha.json").unlink()
    windows = code.replace("path.relative_to(FOLDER)", "PureWindowsPath(path.relative_to(FOLDER))")
    exec(compile(windows, "snippet", "exec"), {"PureWindowsPath": PureWindowsPath})
    assert json.loads((example / "pixart_alpha.json").read_text()) == files, "names have slashes on every system"
