"""The five steps: uploads are safe, faults are found and mended with undo, and the files are those of the command line."""

import io
import json
import math
import re
import shutil
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from faulty_pictures import draw_picture, write_faulty_pictures
from PIL import Image, ImageChops, ImageStat
from safetensors import safe_open
from web_pages import ORIGIN, open_page

from library.atomic_files import compute_sha256
from library.config.schema_data import DataConfig
from library.dataset.dataset_config import load_dataset_config
from library.demo import BUILT_IN_MODEL_DIR
from library.models.families import FAMILY_FACTS
from library.web.guard import MAX_BODY_BYTES, MAX_UPLOAD_BYTES
from library.web.guided import step_pages
from library.web.guided.card import GB, describe_plan, format_devices
from library.web.guided.family_pictures import OUTPUT_LEFT, WIDTH, build_picture, describe_parameters
from library.web.guided.model_choices import build_demo_choice, build_model_values, list_choices
from library.web.guided.picture_repairs import MendLog
from library.web.guided.plain_words import FAMILY_SENTENCES, FIRST_FIELDS
from library.web.guided.project import Project
from library.web.login_sessions import Sessions
from library.web.presets import PRESETS
from library.web.run_form import list_field_groups

TAGGER = Path(__file__).resolve().parents[2] / "data" / "tagger"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "open"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def begin(page, name: str = "mika") -> str:
    return page.post("/api/train/new", json={"name": name}).json()["key"]


def upload(page, key: str, path: str, data: bytes):
    return page.post(f"/api/train/upload/{key}", params={"path": path}, content=data)


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def look(page, key: str) -> dict:
    deadline = time.monotonic() + 30
    while (answer := page.get(f"/api/train/pictures/{key}").json())["is_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answer["problems"] == [], answer
    return answer


def list_faults(answer: dict) -> dict[str, list[str]]:
    return {each["name"]: [fault["kind"] for fault in each["faults"]] for each in answer["pictures"] if each["faults"]}


@pytest.fixture
def faulty(root) -> tuple:
    """A page, and a LoRA of 25 pictures with faults in a folder of this machine."""
    write_faulty_pictures(root / "photos")
    page = open_page(root)
    key = page.post("/api/train/new", json={"folder": "0/photos"}).json()["key"]
    return page, key


def test_each_fault_is_told_and_mended_and_undone(root, faulty):
    page, key = faulty
    before = {path.name: path.read_bytes() for path in (root / "photos").iterdir()}
    expected = {"00_turned.jpg": ["sideways"], "01_print.jpg": ["CMYK"], "02_small.png": ["small"]}
    expected |= {"03_narrow.png": ["narrow"], "04_glass.png": ["transparent"], "05_broken.jpg": ["broken"]}
    expected |= {"06_like_07.png": ["alike"], "09.png": ["no caption"], "24_copy.png": ["duplicate"]}
    answer = look(page, key)
    assert list_faults(answer) == expected and len(answer["pictures"]) == 25

    num_mends = 0
    for each in answer["pictures"]:
        for fault in each["faults"]:
            if fault["mend"]:
                body = {"mend": fault["mend"], "paths": [each["path"]], "position": 1}
                assert page.post(f"/api/train/mend/{key}", json=body).status_code == 200
                num_mends += 1
    assert list_faults(look(page, key)) == {"09.png": ["no caption"]}
    photos = root / "photos"
    with Image.open(photos / "00_turned.jpg") as turned, Image.open(photos / "03_narrow.png") as narrow:
        assert turned.size == (256, 320) and not turned.getexif() and narrow.size[1] == 120 and narrow.size[0] <= 260
        right = draw_picture(3, (600, 120)).crop((600 - narrow.width, 0, 600, 120))
        assert narrow.tobytes() == right.tobytes(), "position 1 keeps the right end"
    with Image.open(photos / "01_print.png") as print_colors, Image.open(photos / "04_glass.png") as glass:
        assert print_colors.mode == glass.mode == "RGB" and min(glass.getpixel((160, 128))) > 245
    gone = {"01_print.jpg", "02_small.png", "02_small.txt", "05_broken.jpg", "05_broken.txt", "06_like_07.png"}
    gone |= {"06_like_07.txt", "24_copy.png", "24_copy.txt"}
    assert {path.name for path in photos.iterdir()} == before.keys() - gone | {"01_print.png"}

    for _ in range(num_mends):
        assert page.post(f"/api/train/undo/{key}", json={}).status_code == 200
    assert {path.name: path.read_bytes() for path in photos.iterdir()} == before
    assert page.post(f"/api/train/undo/{key}", json={}).json() == {"count": 0, "num_undo": 0}


def test_a_mend_is_not_undone_over_the_work_of_another_program(root, faulty):
    page, key = faulty
    look(page, key)
    page.post(f"/api/train/mend/{key}", json={"mend": "rotate", "paths": ["00_turned.jpg"]})
    (root / "photos" / "00_turned.jpg").write_bytes(b"mine")

    answer = page.post(f"/api/train/undo/{key}", json={})
    assert answer.status_code == 400 and "changed since" in answer.json()["error"]
    assert (root / "photos" / "00_turned.jpg").read_bytes() == b"mine"


def write_sharing_pictures(root: Path) -> tuple[Path, dict[str, bytes]]:
    """Write pictures of two folders, and twins in one, that share masks and captions."""
    photos = root / "photos"
    for folder in ("cats", "dogs", "masks"):
        (photos / folder).mkdir(parents=True)
    for number, name in enumerate(("cats/1.png", "dogs/1.png", "cats/a.png", "cats/a.webp")):
        draw_picture(number, (600, 120)).save(photos / name)
    for name in ("1", "a"):
        Image.linear_gradient("L").resize((600, 120)).save(photos / "masks" / f"{name}.png")
    (photos / "cats" / "a.txt").write_text("a cat")
    return photos, read_files(photos)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("paths", "gone"),
    [
        (["cats/1.png"], []),
        (["cats/a.png"], []),
        (["cats/1.png", "dogs/1.png"], ["masks/1.png"]),
        (["cats/a.png", "cats/a.webp"], ["masks/a.png", "cats/a.txt"]),
    ],
)
def test_files_that_another_picture_uses_are_not_removed(root, paths, gone):
    photos, before = write_sharing_pictures(root)
    page = open_page(root)
    key = page.post("/api/train/new", json={"folder": "0/photos"}).json()["key"]
    look(page, key)

    assert page.post(f"/api/train/mend/{key}", json={"mend": "remove", "paths": paths}).status_code == 200
    assert read_files(photos).keys() == before.keys() - {*paths, *gone}
    assert page.post(f"/api/train/undo/{key}", json={}).status_code == 200
    assert read_files(photos) == before


def test_a_mask_of_two_pictures_is_cropped_once_and_undone(root):
    photos, before = write_sharing_pictures(root)
    page = open_page(root)
    key = page.post("/api/train/new", json={"folder": "0/photos"}).json()["key"]
    look(page, key)
    body = {"mend": "crop", "paths": ["cats/1.png"], "position": 1}
    answer = page.post(f"/api/train/mend/{key}", json=body)
    assert answer.status_code == 400 and "another picture" in answer.json()["error"]
    assert read_files(photos) == before

    body["paths"] = ["cats/1.png", "dogs/1.png"]
    assert page.post(f"/api/train/mend/{key}", json=body).status_code == 200
    with Image.open(photos / "masks" / "1.png") as mask, Image.open(photos / "dogs" / "1.png") as picture:
        whole = Image.linear_gradient("L").resize((600, 120))
        assert mask.size == picture.size and mask.width < 600
        assert mask.tobytes() == whole.crop((600 - mask.width, 0, 600, 120)).tobytes()
    assert page.post(f"/api/train/undo/{key}", json={}).status_code == 200
    assert read_files(photos) == before


def test_a_mask_is_not_cropped_in_two_ways(root):
    photos, _ = write_sharing_pictures(root)
    draw_picture(7, (900, 120)).save(photos / "dogs" / "1.png")
    before = read_files(photos)
    page = open_page(root)
    key = page.post("/api/train/new", json={"folder": "0/photos"}).json()["key"]
    look(page, key)
    answer = page.post(f"/api/train/mend/{key}", json={"mend": "crop", "paths": ["cats/1.png", "dogs/1.png"]})
    assert answer.status_code == 400 and "its own mask" in answer.json()["error"]
    assert read_files(photos) == before


def test_a_file_that_one_mend_changed_twice_is_undone(tmp_path):
    log, path = MendLog(tmp_path), tmp_path / "a.png"
    path.write_bytes(b"1")
    log.run(lambda log: [log.replace_file(path, each) for each in (b"2", b"3")])
    assert path.read_bytes() == b"3"
    (entry,) = log.list_mends()
    assert len(json.loads((entry / "mend.json").read_text())) == 1

    hashes = {"a": "of b'2'", "b": compute_sha256(path)}
    older = [{"file": str(path), "kept": name, "after": digest} for name, digest in hashes.items()]
    (entry / "a").write_bytes(b"1")
    (entry / "b").write_bytes(b"2")
    (entry / "mend.json").write_text(json.dumps(older))  # as earlier versions wrote it
    assert log.undo() == 2 and path.read_bytes() == b"1"


def test_a_mend_that_fails_changes_nothing(root, faulty):
    page, key = faulty
    draw_picture(30).convert("CMYK").save(root / "photos" / "zz.jpg")
    draw_picture(31).save(root / "photos" / "zz.png")
    look(page, key)
    before = {path.name: path.read_bytes() for path in (root / "photos").iterdir()}

    body = {"mend": "convert", "paths": ["01_print.jpg", "zz.jpg"]}
    answer = page.post(f"/api/train/mend/{key}", json=body)
    assert answer.status_code == 400 and "is there already" in answer.json()["error"]
    assert {path.name: path.read_bytes() for path in (root / "photos").iterdir()} == before
    assert look(page, key)["num_undo"] == 0


def test_folders_of_kohya_and_masks_become_subsets(root):
    page = open_page(root)
    key = begin(page)
    for number in range(3):
        picture, mask = encode(draw_picture(number)), encode(Image.linear_gradient("L").resize((320, 256)))
        upload(page, key, f"set/img/10_mika girl/{number}.png", picture)
        upload(page, key, f"set/img/10_mika girl/masks/{number}.png", mask)
        upload(page, key, f"set/reg/1_girl/{number}.png", encode(draw_picture(number + 9)))
        upload(page, key, f"set/more/{number}.png", encode(draw_picture(number + 3)))
    upload(page, key, "set/more/0.txt", b"a caption")
    upload(page, key, "set/masks/0.png", encode(Image.new("L", (320, 256))))

    assert [(each["name"], each["repeats"], each["is_reg"], each["masks"]) for each in look(page, key)["folders"]] == [
        ("10_mika girl", 10, False, 3),
        ("more", 1, False, 1),
        ("reg/1_girl", 1, True, 0),
    ]
    plain, masked = load_dataset_config(DataConfig(dataset_config=str(root / "loras/mika/dataset.toml"))).datasets
    subsets = [*plain.subsets, *masked.subsets]
    found = [(each.image_dir, each.num_repeats, each.class_tokens, each.is_reg) for each in subsets]
    expected = [("pictures/more", 1, None, False), ("pictures/reg/1_girl", 1, "girl", True)]
    assert found == [*expected, ("pictures/10_mika girl", 10, "mika girl", False)]
    assert subsets[2].conditioning_data_dir == "pictures/10_mika girl/masks"
    assert subsets[0].conditioning_data_dir is None, "two of its pictures have no mask"


@pytest.mark.parametrize("others", [(), ("2_mika boy/masked",), ("1_mika/plain",), ("2_mika boy/masked", "more/plain")])
def test_masks_beside_other_folders_start(root, others):
    """Masks and regularization pictures are of different types, which no dataset has together."""
    page = open_page(root)
    key = begin(page)
    for number, folder in enumerate(("10_mika girl/masked", *others)):
        name, kind = folder.split("/")
        for each in range(2):
            upload(page, key, f"img/{name}/{each}.png", encode(draw_picture(10 * number + each)))
            if kind == "masked":
                mask = encode(Image.linear_gradient("L").resize((320, 256)))
                upload(page, key, f"img/{name}/masks/{each}.png", mask)
    upload(page, key, "reg/1_girl/9.png", encode(draw_picture(99)))
    values = Project.load(root / "loras" / "mika").values
    answer = page.post(f"/api/train/check/{key}", json={"values": values, "prompts": ""}).json()
    assert answer["problems"] == []

    is_reg_used = any(each.endswith("plain") for each in others)
    notices = [each for each in answer["notices"] if "reg/1_girl" in each and "not used" in each]
    assert (notices == []) is is_reg_used and ("is_reg" in answer["dataset"]) is is_reg_used
    folders = {each["name"]: each["is_used"] for each in look(page, key)["folders"]}
    assert folders["reg/1_girl"] is is_reg_used and folders["10_mika girl"] is True
    config = DataConfig(dataset_config=str(root / "loras/mika/dataset.toml"), masked_loss=True)
    subsets = [subset for each in load_dataset_config(config).datasets for subset in each.subsets]
    masked = {each.image_dir: each.class_tokens for each in subsets if each.conditioning_data_dir}
    assert masked["pictures/10_mika girl"] == "mika girl", "the caption of its pictures without one"
    assert len(masked) == 1 + sum(each.endswith("masked") for each in others)


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("a.png", "a.png"),
        ("../../a.png", "a.png"),
        ("/etc/cron.d/a.png", "cron.d/a.png"),
        ("..\\..\\a.png", "a.png"),
        ("x/../../y/.hidden/a.png", "hidden/a.png"),
        ("a\0b\n.png", "ab.png"),
        ("10_cat/a.png", "10_cat/a.png"),
        ("C:\\photos\\a.png", "photos/a.png"),
        ("in/a:b*.png", "in/a_b_.png"),
        (f"{'x' * 300}.png", f"{'x' * 116}.png"),
    ],
)
def test_uploads_stay_in_their_folder_under_safe_names(root, path, kept):
    page = open_page(root)
    key = begin(page)

    answer = upload(page, key, path, encode(draw_picture(1)))
    assert answer.json() == {"is_new": True, "path": kept}
    files = {each.relative_to(root).as_posix() for each in root.rglob("*") if each.is_file()}
    assert files == {"loras/mika/project.json", "loras/mika/dataset.toml", f"loras/mika/pictures/{kept}"}


@pytest.mark.parametrize(
    ("path", "data", "reason"),
    [
        ("a.svg", b"<svg/>", "neither a picture"),
        ("a.png.exe", b"MZ", "neither a picture"),
        ("a.heic", b"x", "export it as JPEG"),
        ("..", b"x", "has no name"),
        ("", b"x", "has no name"),
        ("con.png", b"x", "device of Windows"),
        ("a.txt", b"x" * (2**17 + 1), "larger than 128 KiB"),
        ("a.png", b"", "is empty"),
    ],
)
def test_uploads_of_other_kinds_and_sizes_are_refused_and_leave_nothing(root, path, data, reason):
    page = open_page(root)
    answer = upload(page, begin(page), path, data)

    assert answer.status_code == 400 and reason in answer.json()["error"]
    assert [each for each in (root / "loras/mika/pictures").rglob("*") if each.is_file()] == []


def test_an_upload_replaces_no_file(root):
    page = open_page(root)
    key, data = begin(page), encode(draw_picture(1))
    upload(page, key, "a.png", data)

    assert upload(page, key, "a.png", data).json()["is_new"] is False
    assert upload(page, key, "a.png", encode(draw_picture(2))).status_code == 400
    assert (root / "loras/mika/pictures/a.png").read_bytes() == data


def test_the_guard_is_around_uploads_and_only_they_may_be_large(root):
    page = open_page(root, sessions=Sessions.build_with_token(60)[0], host="0.0.0.0")
    address = "/api/train/upload/0/loras/mika?path=a.png"
    assert page.post(address, content=b"x").status_code == 401
    page = open_page(root)
    key = begin(page)
    assert page.post(address, content=b"x", headers={"Origin": "http://evil.example"}).status_code == 403
    assert page.post(address, content=b"x", headers={"Host": "evil.example", "Origin": ORIGIN}).status_code == 421
    large = b"x" * (MAX_BODY_BYTES + 1)
    assert upload(page, key, "a.png", large).status_code == 200
    assert page.post("/api/train/new", content=large).status_code == 413
    chunks = (b"x" * 2**20 for _ in range(MAX_UPLOAD_BYTES // 2**20 + 1))  # whose length is told by nobody
    assert page.post(f"/api/train/upload/{key}", params={"path": "b.png"}, content=chunks).status_code == 413
    assert [path.name for path in (root / "loras/mika/pictures").iterdir()] == ["a.png"]


@pytest.mark.parametrize("key", ["0/photos", "0/loras", "0/loras/../photos", "0/../x", "1/loras/mika", "0/loras/no"])
def test_addresses_of_other_folders_are_no_projects(root, key):
    (root / "photos").mkdir()
    page = open_page(root)
    begin(page)
    shutil.copy(root / "loras" / "mika" / "project.json", root / "photos")

    assert page.get(f"/train/pictures/{key}").status_code in (400, 403)
    assert upload(page, key, "a.png", b"x").status_code in (400, 403)


def test_pictures_outside_of_the_project_are_neither_shown_nor_mended(root, faulty):
    page, key = faulty
    (root / "secret.png").write_bytes(encode(draw_picture(1)))
    (root.parent / "outside.png").write_bytes(encode(draw_picture(1)))
    (root / "photos" / "link.png").symlink_to(root.parent / "outside.png")
    assert "link.png" not in {each["name"] for each in look(page, key)["pictures"]}
    for path in ("../secret.png", "/etc/passwd", "link.png", "notes.pdf", ""):
        assert page.get(f"/train-picture/{key}", params={"path": path}).status_code in (403, 404), path
        assert page.post(f"/api/train/mend/{key}", json={"mend": "remove", "paths": [path]}).status_code in (403, 404)
    assert page.get(f"/train-picture/{key}", params={"path": "08.png"}).headers["content-type"] == "image/webp"
    state = json.loads((root / "loras/photos/project.json").read_text())
    (root / "loras/photos/project.json").write_text(json.dumps(state | {"source": str(root.parent)}))
    assert page.get(f"/train/pictures/{key}").status_code == 403


def test_a_document_under_the_name_of_a_picture_is_not_decoded(root, faulty):
    """Pillow would run Ghostscript on it."""
    page, key = faulty
    (root / "photos" / "eps.png").write_bytes(encode(draw_picture(1), "EPS"))
    (root / "photos" / "masks").mkdir()
    for name in [path.name for path in (root / "photos").glob("*.*g")]:
        shutil.copy(root / "photos" / "eps.png", root / "photos" / "masks" / name)
    assert list_faults(look(page, key))["eps.png"] == ["broken"]

    answer = page.get(f"/train-picture/{key}", params={"path": "eps.png"})
    assert answer.status_code == 400 and "PostScript" in answer.text
    for mend, path in (("convert", "eps.png"), ("crop", "03_narrow.png")):  # whose mask it is
        answer = page.post(f"/api/train/mend/{key}", json={"mend": mend, "paths": [path]})
        assert (answer.status_code == 400 and "eps.png" in answer.text) or "03_narrow.png is" in answer.text


def test_every_step_is_a_page_and_the_twelve_fields_come_first(root, faulty):
    page, key = faulty
    texts = {step: page.get(f"/train/{step}/{key}") for step in ("pictures", "captions", "model", "card", "start")}

    assert {step: answer.status_code for step, answer in texts.items()} == dict.fromkeys(texts, 200)
    assert page.get(f"/train/other/{key}").status_code == 400 and "photos" in page.get("/train").text
    start = texts["start"].text
    first = start.partition('<details id="all">')[0]
    assert len(FIRST_FIELDS) == first.count('data-name="') == 12
    own = {"dataset_config", "output_dir", "sample_prompts", "masked_loss"}
    names = {field.option.name for _, _, fields in list_field_groups() for field in fields}
    assert {name for name in names if f'data-name="{name}"' not in start} == own
    model = texts["model"].text
    assert model.index("Demo model") < model.index("Stable Diffusion XL")


@pytest.mark.parametrize("steps", ["1k", "-5", "9" * 400, "9" * 5000, "²"])
def test_steps_that_are_no_number_leave_the_page_of_the_card(root, faulty, steps, monkeypatch):
    monkeypatch.setattr(step_pages, "list_speeds", lambda workbench, project: [("before", 2.0)])
    page, key = faulty
    project = Project.load(root / "loras" / "photos")
    project.values["max_train_steps"] = steps
    project.save()
    answer = page.get(f"/train/card/{key}")
    assert answer.status_code == 200 and "before" not in answer.text
    project.values["max_train_steps"] = "100"
    project.save()
    assert "before" in page.get(f"/train/card/{key}").text


def test_models_on_this_machine_are_listed_with_their_size_and_chosen(root, faulty):
    page, key = faulty
    from library.demo import BUILT_IN_MODEL_DIR

    shutil.copytree(BUILT_IN_MODEL_DIR, root / "models" / "mine")
    (root / "models" / "other").mkdir()
    (root / "models" / "other" / "model_index.json").write_text('{"_class_name": "NoPipeline"}')
    found = {each.title: each for each in list_choices(page.app.state.workbench.folders)}
    assert found["mine"].family == "sd1" and found["mine"].size > 10**6 and not found["other"].is_usable

    assert page.post(f"/api/train/model/{key}", json={"model": found["other"].id}).status_code == 400
    assert page.post(f"/api/train/model/{key}", json={"model": "path:0/../x"}).status_code == 400
    assert page.post(f"/api/train/model/{key}", json={"model": found["mine"].id}).status_code == 200
    project = Project.load(root / "loras" / "photos")
    assert project.values["pretrained_model_name_or_path"] == str(root / "models" / "mine")
    assert "resolution = 512" in project.dataset_path.read_text()
    assert FAMILY_SENTENCES.keys() <= FAMILY_FACTS.keys()
    for choice in found.values():
        assert choice.sentence and (choice.family or not choice.is_usable)
        assert build_model_values(choice)["max_train_steps"]


def test_the_picture_of_each_model_shows_the_facts_of_its_family(root, monkeypatch):
    """Every way of going in and coming out has words, what is drawn stays in its frame, and the sizes are the files'."""
    pictures = {name: build_picture(facts, facts.pipeline.num_parameters) for name, facts in FAMILY_FACTS.items()}
    for name, picture in pictures.items():
        facts, (left, top, width, height) = FAMILY_FACTS[name], picture.output_box
        kind, num_frames = facts.pipeline.kind, len(facts.sampling.frame_images)
        assert picture.num_inputs == (num_frames if kind == "video" else kind == "edit"), name
        assert ("video" in picture.text) == (kind == "video"), name
        assert left >= OUTPUT_LEFT and left + width <= WIDTH and top >= 0 and top + height <= 60, name
        assert width / height == pytest.approx(picture.width / picture.height, rel=0.02), name
        assert 0 < picture.bar_width <= WIDTH - 8, name
    areas = {name: math.prod(pictures[name].output_box[2:]) for name in ("sd1", "sdxl", "wan")}
    assert areas["sd1"] < areas["wan"] < areas["sdxl"]
    assert pictures["flux2_dev"].bar_width == pytest.approx(
        pictures["flux"].bar_width * pictures["flux2_dev"].num_parameters / pictures["flux"].num_parameters, rel=0.01
    )
    with safe_open(BUILT_IN_MODEL_DIR / "unet" / "diffusion_pytorch_model.safetensors", "np") as weights:
        counts = [math.prod(weights.get_slice(key).get_shape()) for key in weights.keys()]
    assert build_demo_choice().picture.num_parameters == sum(counts)
    assert describe_parameters(pictures["flux"].num_parameters) == ("{0} billion parameters", "12")
    assert describe_parameters(sum(counts)) == ("{0} million parameters", "4")
    assert describe_parameters(490_000_000) == ("{0} million parameters", "490")
    for preset in PRESETS.values():  # the largest model of a family may be another one than the one that is offered
        if named := re.search(r"-A?([\d.]+)[Bb]\b", preset.model):
            assert 0.8 < preset.num_parameters / float(named[1]) / 1e9 < 1.8, preset.model

    monkeypatch.setattr("library.web.guided.model_choices.list_cached_models", lambda: [])  # those of this machine
    page = open_page(root)
    key = page.post("/api/train/new", json={"name": "mika"}).json()["key"]
    korean = page.get(f"/train/model/{key}", headers={"Accept-Language": "ko"}).text
    shown = re.findall(r'<svg class="model-picture".*?</svg>', korean, re.S)
    assert len(shown) == korean.count('type="radio"') and "텍스트에서 832 × 480 픽셀 동영상" in korean
    assert all(ElementTree.fromstring(each).get("aria-label") for each in shown)


def test_the_files_are_written_checked_and_shown(root, faulty):
    page, key = faulty
    values = Project.load(root / "loras" / "photos").values | {"max_train_steps": "7", "resolution": "128"}
    look(page, key)
    broken = page.post(f"/api/train/check/{key}", json={"values": values, "prompts": ""}).json()["problems"]
    assert [each["field"] for each in broken] == ["dataset_config"] and "05_broken.jpg" in broken[0]["text"]
    page.post(f"/api/train/mend/{key}", json={"mend": "remove", "paths": ["05_broken.jpg"]})
    look(page, key)
    answer = page.post(f"/api/train/check/{key}", json={"values": values, "prompts": "a bird"}).json()

    assert answer["problems"] == []
    assert (root / "loras/photos/dataset.toml").read_text() == answer["dataset"]
    assert "resolution = 128" in answer["dataset"] and "resolution" not in answer["run"]
    assert 'sample_prompts = "loras/photos/prompts.txt"' in answer["run"] and "max_train_steps = 7" in answer["run"]
    assert (root / "loras/photos/prompts.txt").read_text() == "a bird --w 128 --h 128\n"
    assert answer["command"].endswith("--config_file loras/photos/output/photos.toml")
    wrong = page.post(f"/api/train/check/{key}", json={"values": {"network_dim": "x", "output_name": "../a"}}).json()
    assert {each["field"] for each in wrong["problems"]} >= {"network_dim", "output_name"}
    bad = page.post(f"/api/train/check/{key}", json={"values": {"resolution": "wide"}})
    assert bad.status_code == 400 and bad.json()["problems"][0]["option"] == "resolution"
    assert page.post(f"/api/train/start/{key}", json={"values": {"network_dim": "x"}}).status_code == 400


@pytest.mark.slow
def test_a_caption_model_writes_and_is_undone(root):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    shutil.copytree(TAGGER, root / "models" / "tagger")
    (root / "photos").mkdir()
    for name, color in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        Image.new("RGB", (96, 96), color).save(root / "photos" / f"{name}.png")
    (root / "photos" / "blue.txt").write_text("mine\n")
    page = open_page(root)
    key = page.post("/api/train/new", json={"folder": "0/photos"}).json()["key"]
    assert 'value="path:0/models/tagger"' in page.get(f"/train/captions/{key}").text
    dataset = f"{key}/dataset.toml"

    def wait() -> dict:
        while (work := page.get(f"/api/pictures/work/{dataset}").json())["is_running"]:
            time.sleep(0.05)
        return work

    wait()
    body = {"model": "path:0/models/tagger", "if_exists": "overwrite", "trigger_word": ""}
    assert page.post(f"/api/train/caption/{key}", json={"model": "hub:evil/model"}).status_code == 400
    assert page.post(f"/api/train/caption/{key}", json=body).status_code == 200
    assert wait()["count"] == 2
    texts = {path.name: path.read_text() for path in (root / "photos").glob("*.txt")}
    assert texts == {"red.txt": "red_hair, ^_^\n", "blue.txt": "hatsune_(blue)\n"}
    captions = {row["name"]: row["caption"] for row in page.get(f"/api/pictures/rows/{dataset}").json()["rows"]}
    assert [*captions.values()] == ["hatsune_(blue)", "red_hair, ^_^"]
    page.post(f"/api/pictures/undo/{dataset}", json={})
    wait()
    assert {path.name: path.read_text() for path in (root / "photos").glob("*.txt")} == {"blue.txt": "mine\n"}


def build_plan(*needs: float, advice: tuple = (), limit: float = 8) -> dict:
    layouts = [
        {"fits": need <= limit, "bytes": {"total": need * GB}, "options": "", "relative_speed": 1} for need in needs
    ]
    plan = {"steps": 100, "steps_per_epoch": 10, "samples_per_epoch": 40, "images_per_epoch": 20}
    return plan | {"layouts": layouts, "advice": advice, "gpu_memory": limit * GB}


def test_the_advice_of_the_planner_is_put_into_words():
    options = "--quantize_base nf4 --gradient_checkpointing"
    advice = ({"options": options, "bytes": {"total": 6 * GB}, "relative_speed": 2.0},)
    assert describe_plan(build_plan(4), "8GB") == [
        "100 steps; every picture is seen about 20 times.",
        "It fits on a card with 8GB: it needs 4.0 GB, 50% of it.",
    ]
    lines = describe_plan(build_plan(12, advice=advice), "8GB")
    assert "does not fit as it is" in lines[1] and "fewer bits (quantize_base)" in lines[1]
    assert "6.0 GB" in lines[2] and "changes the pictures a little" in lines[2]
    lacking = build_plan(30) | {"suggestion": {"bytes": {"total": 20 * GB}, "options": ""}}
    assert "lacks 12.0 GB" in describe_plan(lacking, "8GB")[1]
    card = {"name": "RTX", "total": 23.6 * GB, "free": 20 * GB}
    assert format_devices({"cards": [card], "cores": 8, "memory": GB}) == (
        "This computer has RTX with 24 GB, 20 free.",
        "23GB",
    )
    assert format_devices({"cards": [], "cores": 2, "memory": 4 * GB})[1] == ""


def test_a_photograph_that_is_turned_upright_is_the_same_picture(root, faulty):
    page, key = faulty
    look(page, key)
    with Image.open(root / "photos" / "00_turned.jpg") as before:
        upright = before.convert("RGB").transpose(Image.Transpose.ROTATE_270)
    page.post(f"/api/train/mend/{key}", json={"mend": "rotate", "paths": ["00_turned.jpg"]})
    with Image.open(root / "photos" / "00_turned.jpg") as after:
        difference = ImageStat.Stat(ImageChops.difference(upright, after.convert("RGB"))).mean
    assert max(difference) < 1.5, "but for its compression"
