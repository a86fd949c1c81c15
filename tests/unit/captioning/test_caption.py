"""``python -m library caption``: taggers, models of transformers and servers write the captions that they should."""

from pathlib import Path

import numpy as np
import pytest
from captioning_models import ChatServer, save_blip, save_florence2, save_qwen_vl, write_pictures
from PIL import Image

from library.captioning import openai_api
from library.captioning.caption_writer import CaptionFormat
from library.captioning.onnx_tagger import OnnxTagger, TagSelection, _prepare_pixels
from library.errors import UserError
from library.tools.caption import run_caption

TAGGER = Path(__file__).resolve().parents[2] / "data" / "tagger"
"""Its tags are sigmoids of the mean color: red_hair 0.1 (red - blue), ^_^ 0.1 (red - green) and so on."""


def run(*words):
    lines, result = [], run_caption([str(word) for word in words])
    if isinstance(result, tuple):
        return [result[0]], result[1]
    while True:
        try:
            lines.append(next(result))
        except StopIteration as stop:
            return lines, stop.value


def read(folder):
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}


@pytest.fixture
def folder(tmp_path):
    write_pictures(tmp_path / "pictures")
    return tmp_path / "pictures"


def test_a_tagger_writes_the_tags_above_its_thresholds(folder):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    tagger = "caption", folder, "--model", TAGGER
    assert run(*tagger[1:], "--batch_size", 2)[0] == ["3 captions written"]
    assert read(folder) == {"0_red": "red_hair, ^_^\n", "1_blue": "hatsune_(blue)\n", "2_green": "green_eyes\n"}
    options = [
        *"--remove_underscore --use_rating_tags --always_first_tags ^_^,x".split(),
        "--undesired_tags",
        "green eyes",
    ]
    run(*tagger[1:], "--if_exists", "overwrite", *options)
    expected = {
        "0_red": "^_^, sensitive, red hair\n",
        "1_blue": "general, hatsune (blue)\n",
        "2_green": "sensitive\n",
    }
    assert read(folder) == expected
    run(*tagger[1:], "--if_exists", "overwrite", "--general_threshold", 1, "--character_threshold", 0.99)
    assert read(folder) == {"0_red": "\n", "1_blue": "hatsune_(blue)\n", "2_green": "\n"}


def test_pixels_of_a_tagger_are_padded_to_a_white_square_in_blue_green_red():
    image = Image.new("RGB", (32, 16), (250, 100, 10))
    pixels = _prepare_pixels(image, 16)
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.float32
    assert (pixels[:4] == 255).all() and (pixels[12:] == 255).all()
    assert (pixels[4:12] == (10, 100, 250)).all()


def test_a_tagger_with_the_wrong_table_is_refused(tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (tmp_path / "model.onnx").write_bytes((TAGGER / "model.onnx").read_bytes())
    (tmp_path / "selected_tags.csv").write_text("tag_id,name,category,count\n1,a,0,1\n")
    with pytest.raises(UserError, match=r"selected_tags.csv: has 1 tags, the model has 6 outputs"):
        OnnxTagger(tmp_path, TagSelection())
    (tmp_path / "selected_tags.csv").write_text("1,a\n")
    with pytest.raises(UserError, match="is not a table with the columns name and category"):
        OnnxTagger(tmp_path, TagSelection())
    (tmp_path / "model.onnx").write_bytes(b"junk")
    (tmp_path / "selected_tags.csv").write_text("tag_id,name,category,count\n1,a,0,1\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        OnnxTagger(tmp_path, TagSelection())


def test_existing_captions_are_kept_unless_told(folder):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (folder / "0_red.txt").write_text("by hand, ^_^")
    (folder / "1_blue.txt").write_text(" \n")  # an empty file is no caption
    assert run(folder, "--model", TAGGER)[0] == ["2 captions written, 1 kept (--if_exists overwrite replaces them)"]
    assert read(folder)["0_red"] == "by hand, ^_^" and read(folder)["1_blue"] == "hatsune_(blue)\n"
    run(folder, "--model", TAGGER, "--if_exists", "append", "--trigger_word", "ohwx")
    assert read(folder)["0_red"] == "ohwx, by hand, ^_^, red_hair\n"
    before = read(folder)
    lines, code = run(
        folder, "--model", TAGGER, "--if_exists", "overwrite", "--caption_prefix", "a photo, ", "--dry_run"
    )
    assert lines[0] == "3 images, 3 to caption; the first of them:" and code == 0 and read(folder) == before
    assert lines[1:4] == [f"{folder}/0_red.txt:", "  - ohwx, by hand, ^_^, red_hair", "  + a photo, red_hair, ^_^"]
    assert lines[-1] == "dry run: nothing was written"


def test_a_damaged_image_is_reported_and_the_others_are_captioned(folder):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (folder / "1_blue.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    lines, code = run(folder, "--model", TAGGER)
    assert code == 1 and lines[0].startswith(f"{folder}/1_blue.png: cannot be decoded")
    assert lines[1] == "2 captions written" and set(read(folder)) == {"0_red", "2_green"}


def test_a_stopped_run_goes_on_where_it_was(folder):
    """The server fails after one picture: its caption is kept, and the next run asks only for the others."""
    with ChatServer([None, 400]) as server:
        words = folder, "--model", "m", "--api_base", server.url
        with pytest.raises(UserError, match=r"400 .*: try later"):
            run(*words)
        assert read(folder) == {"0_red": "a red picture\n"}
        assert run(*words)[0] == ["2 captions written, 1 kept (--if_exists overwrite replaces them)"]
        assert len(server.requests) == 3 and len(read(folder)) == 3


def test_a_server_with_faults_gets_the_request_again(folder, monkeypatch):
    monkeypatch.setattr(openai_api.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ChatServer([503, "cut", 429]) as server:
        words = folder, "--model", "local-model", "--api_base", server.url, "--prompt", "What is it?"
        assert run(*words, "--max_new_tokens", 7)[0] == ["3 captions written"]
        assert read(folder) == {
            "0_red": "a red picture\n",
            "1_blue": "a blue picture\n",
            "2_green": "a green picture\n",
        }
        request = server.requests[0]
        assert (request["model"], request["max_tokens"]) == ("local-model", 7)
        assert request["messages"][0]["content"][0] == {"type": "text", "text": "What is it?"}
        assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
    with pytest.raises(UserError, match=r"no answer after 4 attempts: .*Connection refused"):
        run(*words, "--if_exists", "overwrite")
    with (
        ChatServer([401]) as server,
        pytest.raises(UserError, match=r"401 .*set the environment variable OPENAI_API_KEY"),
    ):
        run(folder, "--model", "m", "--api_base", server.url, "--if_exists", "overwrite")


@pytest.mark.slow
def test_florence2_gets_its_task_and_answers_with_text(folder, tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model_folder = save_florence2(tmp_path / "model")
    assert run(folder, "--model", model_folder, "--batch_size", 2, "--max_new_tokens", 6)[1] == 0
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    processor = AutoProcessor.from_pretrained(model_folder)
    for path in sorted(folder.glob("*.png")):
        inputs = processor(images=Image.open(path), text="<MORE_DETAILED_CAPTION>", return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=6, num_beams=1, do_sample=False)
        expected = processor.tokenizer.decode(ids[0], skip_special_tokens=True).strip()
        assert expected and path.with_suffix(".txt").read_text() == f"{expected}\n"
    assert len(set(read(folder).values())) > 1
    with pytest.raises(UserError, match="--prompt <OD>: choose from <CAPTION>"):
        run(folder, "--model", model_folder, "--if_exists", "overwrite", "--prompt", "<OD>")


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_blip, save_qwen_vl])
def test_a_model_of_transformers_writes_what_it_generates_for_each_picture(save, folder, tmp_path):
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model_folder = save(tmp_path / "model")
    assert run(folder, "--model", model_folder, "--batch_size", 3, "--prompt", "a b", "--max_new_tokens", 6)[1] == 0
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    tokenizer, images = AutoTokenizer.from_pretrained(model_folder), AutoImageProcessor.from_pretrained(model_folder)
    for path in sorted(folder.glob("*.png")):
        inputs = dict(images(Image.open(path), return_tensors="pt"))
        if save is save_qwen_vl:
            count = int(inputs["image_grid_thw"].prod()) // 4
            pads = "<|image_pad|>" * count
            text = f"<|im_start|>user <|vision_start|>{pads}<|vision_end|>a b<|im_end|><|im_start|>assistant "
            inputs |= dict(tokenizer(text, return_tensors="pt"))
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == 5).int()
        else:
            inputs |= dict(tokenizer("a b", return_tensors="pt", return_token_type_ids=False))
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        ids = ids[:, inputs["input_ids"].shape[1] :] if save is save_qwen_vl else ids
        expected = " ".join(tokenizer.decode(ids[0], skip_special_tokens=True).split())
        assert expected and path.with_suffix(".txt").read_text() == f"{expected}\n"
    if save is save_qwen_vl:
        assert len(set(read(folder).values())) == 3  # pictures make a difference


def test_all_mistakes_are_reported_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        run("--caption_extension", "txt", "--api_timeout", 5, "--if_exist", "keep", "--batch_size", 0)
    lines = str(error.value).splitlines()
    assert any(line.startswith("no folder given; usage:") for line in lines)
    for part in (
        "--caption_extension: 'txt'",
        "--model: missing",
        "did you mean --if_exists",
        "--batch_size",
    ):
        assert any(part in line for line in lines), part
    write_pictures(tmp_path / "a")
    with pytest.raises(UserError, match="--model nowhere/at all: no such folder, and not a hub id"):
        run(tmp_path / "a", "--model", "nowhere/at all")


def test_a_caption_with_the_trigger_word_does_not_get_it_twice():
    style = CaptionFormat(trigger_word="ohwx")
    assert style.build("a cat", None) == "ohwx, a cat"
    assert style.build("a photo of ohwx", None) == "a photo of ohwx"
    assert style.build("", None) == "ohwx"


@pytest.mark.parametrize(
    ("trigger_word", "text", "is_there"),
    [
        ("cat", "a cathedral at dusk", False),
        ("cat", "a scattered crowd", False),
        ("cat", "cat-ears, smile", False),
        ("mika", "mika_v2, smile", False),
        ("cat", "a cat, asleep", True),
        ("cat", "the cat's bowl", True),
        ("sks dog", "a photo of sks dog.", True),
        ("sks dog", "a photo of sks doghouse", False),
        ("a|b", "a, b", False),
    ],
)
def test_a_trigger_word_is_found_as_a_whole_word_only(trigger_word, text, is_there):
    expected = text if is_there else f"{trigger_word}, {text}"
    assert CaptionFormat(trigger_word=trigger_word).build(text, None) == expected
