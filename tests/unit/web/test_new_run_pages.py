"""The form of a new run knows every option and refuses what a run would refuse; the queue starts, stops and resumes."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from problem_lines import format_lines
from web_pages import open_page, write_run

from library.config import RunConfig, parse_config
from library.config.help import collect_changed_settings, format_config_as_toml
from library.config.options import flatten_config, iter_options
from library.errors import UserError
from library.models.families import FAMILY_FACTS
from library.web.commands import MAX_KEPT, CommandRunner
from library.web.jobs import FAILED, FINISHED, RUNNING, STOPPED, WAITING, Job, JobQueue, build_command
from library.web.presets import PRESETS, list_presets
from library.web.run_form import build_arguments, export_values


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "open"
    (folder / "images").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 200, 10)).save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(f"a picture, {number}")
    (folder / "set.toml").write_text(
        f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder / 'images'}'\n"
        "caption_extension = '.txt'\n"
    )
    monkeypatch.chdir(folder)
    return folder


def check(page, **values: object) -> dict:
    answer = page.post("/api/new/check", json={"values": values})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_form_has_every_option_with_its_help(root):
    text = open_page(root).get("/new").text

    missing = [option.name for option in iter_options(RunConfig) if f'data-name="{option.name}"' not in text]
    assert missing == [option.name for option in iter_options(RunConfig) if not option.is_in_form]
    assert "dry_run" in missing and "seed" not in missing
    assert "rank of the adapter" in text and "<option>cosine_with_restarts</option>" in text and 'set.toml"' in text


def test_settings_survive_the_form():
    argv = ["--dataset_config", "a b.toml", "--text_encoder_lr", "1e-5", "2e-5", "--cache_latents", "--resolution"]
    argv += ["512,768", "--optimizer_args", "weight_decay=0.1", "betas=(0.9, 0.99)", "--lr_warmup_steps", "5%"]
    config = parse_config(argv).config
    values = export_values(collect_changed_settings(flatten_config(config)))

    assert parse_config(build_arguments(values)).config == config
    assert values["optimizer_args"] == "weight_decay=0.1 'betas=(0.9, 0.99)'" and values["cache_latents"] is True


def test_the_checks_of_a_run_are_shown_at_their_fields(root):
    page = open_page(root)
    answer = check(page, dataset_config="set.toml", network_dim="x", learning_rate="-1", lr_scheduler="cosin")
    assert [problem["field"] for problem in answer["problems"]] == ["network_dim", "learning_rate", "lr_scheduler"]
    answer = check(page, dataset_config="set.toml", network_dim="8", overwrite=False, max_train_steps="5")
    assert answer["problems"] == [] and "network_dim = 8" in answer["toml"]
    assert "library launch" in answer["command"] and answer["command"].endswith("--config_file output/lora.toml")
    (root / "output").mkdir()
    (root / "output" / "lora.safetensors").touch()
    assert "add --overwrite" in check(page, dataset_config="set.toml")["problems"][0]["text"]


@pytest.mark.parametrize(
    "values",
    [
        {"output_dir": "/tmp"},
        {"output_dir": "../elsewhere"},
        {"output_dir": "images/../../elsewhere"},
        {"output_name": "../lora"},
        {"output_name": ".hidden"},
        {"network_weights": "link.safetensors"},
        {"base_weights": "/etc/passwd"},
        {"pretrained_model_name_or_path": "~/model"},
        {"logging_dir": "/var/log"},
    ],
)
def test_settings_that_lead_out_of_the_folders_are_refused(root, tmp_path, values):
    (tmp_path / "secret.safetensors").touch()
    (root / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    answer = check(open_page(root), dataset_config="set.toml", **values)

    assert [problem["field"] for problem in answer["problems"]] == list(values)
    assert open_page(root).post("/api/jobs", json={"values": values}).status_code == 400


def test_a_dataset_with_pictures_elsewhere_is_refused(root, tmp_path):
    (tmp_path / "other").mkdir()
    text = (root / "set.toml").read_text().replace(str(root / "images"), str(tmp_path / "other"))
    (root / "set.toml").write_text(text)

    (problem,) = check(open_page(root), dataset_config="set.toml")["problems"]
    assert problem["field"] == "dataset_config" and "restart with --root" in problem["text"]


def test_the_form_begins_with_a_run_a_file_or_a_preset(root):
    write_run(root / "out", "first", network_dim=12, training_comment="</script><script>alert(1)")
    (root / "run.toml").write_text("network_dim = 24\nmax_train_steps = 7\n")
    page = open_page(root)

    def read_start(query: str) -> dict:
        text = page.get(f"/new?{query}").text
        data = text.partition('id="start-values">')[2].partition("</script>")[0]
        return json.loads(data)["values"]

    assert read_start("run=0/out/first") == {"network_dim": "12", "training_comment": "</script><script>alert(1)"}
    assert read_start("file=0/run.toml") == {"network_dim": "24", "max_train_steps": "7"}
    assert read_start("dataset=0/set.toml") == {"dataset_config": "set.toml"}
    assert page.get("/new?file=0/../x.toml").status_code == 403 and page.get("/new?run=0/none").status_code == 400
    assert 'value="file:0/run.toml"' in page.get("/new").text


def test_a_finished_run_is_trained_on_from_its_lora(root):
    write_run(root / "out", "first", network_dim=12)
    page = open_page(root)
    assert "Train on" not in page.get("/runs/0/out/first").text
    assert page.get("/new?run=0/out/first&continue=1").status_code == 400
    (root / "out" / "first.safetensors").touch()

    assert "/new?run=0/out/first&amp;continue=1" in page.get("/runs/0/out/first").text
    start = (
        page.get("/new?run=0/out/first&continue=1").text.partition('id="start-values">')[2].partition("</script>")[0]
    )
    expected = {"network_weights": "out/first.safetensors", "output_name": "first-more", "output_dir": "out"}
    assert json.loads(start)["values"] == {"network_dim": "12", **expected}


def test_models_of_the_form_are_grouped_by_what_they_make():
    groups = {preset["name"]: preset["group"] for preset in list_presets()}

    assert groups["Demo model (CPU)"] == "To try it" and groups["Wan 2.1"] == "Videos"
    assert groups["FLUX.2 klein 4B"] == "Pictures" and groups["FLUX.1 Kontext"] == "Editing pictures"


def test_the_test_data_of_the_project_is_not_listed(tmp_path, monkeypatch):
    from library.web import folders

    for name in ("tests", "mine/tests"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "set.toml").write_text("[[datasets]]\n")
    monkeypatch.setattr(folders, "OWN_TESTS", tmp_path / "tests")
    text = open_page(tmp_path).get("/pictures").text

    assert "mine/tests/set.toml" in text and ">tests/set.toml" not in text


def test_every_preset_is_a_run_that_the_parser_accepts(root):
    assert PRESETS.keys() - FAMILY_FACTS.keys() == {"demo", "flux2_klein_4b"}
    for preset in list_presets():
        parsed = parse_config(["--dataset_config", "set.toml", *build_arguments(preset["values"])])
        assert format_lines(parsed.problems) == [], preset["name"]
        is_for_gpu = preset["name"] != "Demo model (CPU)"
        assert (parsed.config.train.gpu_memory is not None) == is_for_gpu, "which chooses all that saves memory"
        assert not preset["values"].keys() & {"quantize_base", "gradient_checkpointing", "blocks_to_swap"}


def write_job(queue: JobQueue, name: str, *words: str) -> Job:
    job = Job(name, name, str(queue.root), [sys.executable, "-c", *words])
    queue.jobs.append(job)
    return job


def wait_for(queue: JobQueue, name: str, *statuses: str) -> Job:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        queue.list_jobs()
        job = next(job for job in queue.jobs if job.id == name)
        if job.status in statuses:
            return job
        time.sleep(0.05)
    raise AssertionError(job.status)


def test_the_queue_starts_one_run_after_another_and_survives_the_page(tmp_path):
    queue = JobQueue(tmp_path)
    write_job(queue, "first", "import time; print('hello', flush=True); time.sleep(600)")
    write_job(queue, "second", "raise SystemExit(3)")
    write_job(queue, "third", "pass")
    write_job(queue, "fourth", "pass")

    first = wait_for(queue, "first", RUNNING)
    while "hello" not in first.log_path.read_text():
        time.sleep(0.05)
    assert [job.status for job in queue.jobs] == [RUNNING, WAITING, WAITING, WAITING]
    assert queue.stop("fourth").status == STOPPED
    other = JobQueue(tmp_path)  # of a page that was started again
    assert other.find_job(tmp_path, "first") == first and first.find_process() is not None
    other.jobs = [job for job in other.jobs if job.id == "first"]
    other.stop("first")
    queue._thread = None  # the other page watches now
    assert wait_for(other, "first", STOPPED).code is None and first.find_process() is None
    assert (tmp_path / "first.log").read_text().strip() == "hello"


def test_ended_runs_are_finished_or_failed_and_can_be_taken_off(tmp_path):
    queue = JobQueue(tmp_path)
    write_job(queue, "wrong", "raise SystemExit(3)")
    write_job(queue, "right", "pass")
    queue.jobs.append(Job("missing", "missing", str(tmp_path), ["/no/such/program"]))

    assert wait_for(queue, "wrong", FAILED).code == 3
    assert wait_for(queue, "right", FINISHED).code == 0
    assert wait_for(queue, "missing", FAILED)
    assert "cannot be started" in (tmp_path / "missing.log").read_text()
    for name in ("wrong", "right", "missing"):
        queue.remove(name)
    assert JobQueue(tmp_path).jobs == []
    with pytest.raises(UserError, match="no such run"):
        queue.stop("right")


def test_a_queued_run_whose_folder_is_gone_fails_and_the_next_starts(tmp_path):
    queue = JobQueue(tmp_path)
    (tmp_path / "gone").touch()
    queue.jobs.append(Job("lost", "lost", str(tmp_path / "gone" / "out"), [sys.executable, "-c", "pass"]))
    write_job(queue, "next", "pass")

    assert wait_for(queue, "lost", FAILED) and wait_for(queue, "next", FINISHED).code == 0


def test_a_file_that_the_page_did_not_write_is_kept(root):
    (root / "output").mkdir()
    (root / "output" / "lora.toml").write_text("mine = 1\n")
    answer = open_page(root).post("/api/jobs", json={"values": {"dataset_config": "set.toml"}})

    assert answer.status_code == 400 and "was not written by this page" in answer.json()["error"]
    assert (root / "output" / "lora.toml").read_text() == "mine = 1\n"


def test_a_command_gets_its_settings_and_can_be_stopped(tmp_path):
    runner = CommandRunner()
    script = "import sys, time; print(open(sys.argv[2]).read(), flush=True); time.sleep(600)"
    name = runner.start([sys.executable, "-c", script], "a = 1")
    deadline = time.monotonic() + 60
    while "a = 1" not in runner.describe(name)["output"] and time.monotonic() < deadline:
        time.sleep(0.05)
    runner.stop(name)
    while runner.describe(name)["is_running"] and time.monotonic() < deadline:
        time.sleep(0.05)

    assert runner.describe(name)["is_stopped"]
    folder = Path(runner._commands[name].folder.name)
    runner.stop_all()
    assert not folder.exists()


def test_a_command_that_runs_outlives_later_ones():
    runner = CommandRunner()
    name = runner.start([sys.executable, "-c", "import time; time.sleep(600)"])
    names = []
    for _ in range(MAX_KEPT + 1):
        names.append(runner.start(["true"]))
        runner._commands[names[-1]].process.wait()
    assert runner.describe(name)["is_running"] and len(runner._commands) == MAX_KEPT
    assert names[0] not in runner._commands and names[-1] in runner._commands
    runner.stop_all()


def test_the_command_is_what_the_docs_say(tmp_path):
    words = build_command(tmp_path / "a.toml", 4, "bf16", is_resumed=True)

    assert words[1:4] == ["-m", "library", "launch"] and "--multi_gpu" in words and words[-1] == "--auto_resume"
    assert words[words.index("--num_processes") + 1] == "4" and words[words.index("--mixed_precision") + 1] == "bf16"


@pytest.mark.slow
def test_a_run_is_started_stopped_with_its_state_and_resumed_from_the_page(root):
    """The built-in demo model, through accelerate launch."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    page = open_page(root)
    values = {"dataset_config": "set.toml", "network_train_unet_only": True, "max_train_steps": "100"}
    values |= {"network_dim": "2", "max_data_loader_n_workers": "0", "output_dir": "out", "output_name": "mika"}
    answer = page.post("/api/jobs", json={"values": values}).json()
    assert answer["run"] == "0/out/mika"
    assert page.post("/api/jobs", json={"values": values}).status_code == 400  # it is in the queue already

    def wait(is_reached) -> dict:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if (root / "out" / "mika.log").exists():
                charts = page.get("/api/charts/0/out/mika").json()
                if is_reached(charts):
                    return charts
            time.sleep(0.2)
        raise AssertionError(page.get("/api/log/0/out/mika").text)

    wait(lambda charts: charts["curves"])
    assert "Go on" not in page.get("/runs/0/out/mika").text
    assert page.post(f"/api/jobs/{answer['id']}/stop", json={}).json()["status"] == "stopping"
    wait(lambda charts: charts["status"] == "stopped")
    page.app.state.workbench.queue.list_jobs()
    wait_for(page.app.state.workbench.queue, answer["id"], STOPPED)
    assert list((root / "out").glob("mika*-state")) and "Go on" in page.get("/runs/0/out/mika").text
    stopped_at = page.get("/api/charts/0/out/mika").json()["facts"]
    resumed = page.post("/api/jobs/resume", json={"run": "0/out/mika"}).json()
    charts = wait(lambda charts: charts["status"] == "finished")
    wait_for(page.app.state.workbench.queue, resumed["id"], FINISHED)

    assert "step 100 of 100" in charts["facts"] and "step 100" not in stopped_at
    assert charts["curves"][0]["curves"][0]["x"] == [*range(1, 101)]
    settings = (root / "out" / "mika.toml").read_text()
    assert "max_train_steps = 100" in settings and settings != format_config_as_toml(RunConfig())
