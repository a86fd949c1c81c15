"""The HTML report shows the metrics of a run and is self-contained."""

import base64
import io
import json
import re

import pytest
from PIL import Image

from library.dataset.clip_encoding import decode_animation, encode_webp
from library.report.charts import build_comparison_charts, build_curves, build_group_charts, build_validation_charts
from library.report.metric_series import MAX_BUCKETS, MetricTable
from library.report.page import RunSummary, _encode_small_clip, describe_validation, write_report


def write_lines(path, lines) -> MetricTable:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = MetricTable(path)
    table.read_new_lines()
    return table


def build_summary(**changes) -> RunSummary:
    values = {"name": "a", "steps": 8, "plan": "", "settings": {}, "started_at": 0.0}
    return RunSummary(**values | {"num_processes": 1, "mixed_precision": "no"} | changes)


@pytest.mark.parametrize("count", [1, 2, MAX_BUCKETS, MAX_BUCKETS + 1, 10_000])
def test_buckets_keep_steps_sums_and_extremes(tmp_path, count):
    values = [float((7919 * step) % 1013) for step in range(1, count + 1)]
    lines = [{"step": step, "a": value} for step, value in enumerate(values, 1)]
    series = write_lines(tmp_path / "m.jsonl", lines).series["a"]

    assert series.steps[-1] == count and series.last == values[-1] and len(series.steps) <= MAX_BUCKETS
    assert series.compute_mean(0, float("inf")) == pytest.approx(sum(values) / count)
    if count > MAX_BUCKETS:
        low, high = series.bounds
        assert min(low) == min(values) and max(high) == max(values)
        assert all(a <= b <= c for a, b, c in zip(low, series.means, high, strict=True))
    else:
        assert series.bounds is None and series.means == values


def test_a_growing_file_is_read_on_and_a_replaced_one_again(tmp_path):
    path = tmp_path / "m.jsonl"
    table = write_lines(path, [{"step": 1, "a": 1.0}])
    with path.open("a") as file:
        file.write('{"step": 2, "a": 2.0}\nnot JSON\n{"step": 3, "a": 3')
        file.flush()
        assert table.read_new_lines() and table.series["a"].points == [(1, 1.0), (2, 2.0)]
        file.write(".5}\n")
    table.read_new_lines()
    assert table.series["a"].points[-1] == (3, 3.5) and table.num_lines == 3
    other = tmp_path / "new.jsonl"
    other.write_text('{"step": 1, "a": 9.0}\n' * 2 + '{"step": 2, "a": 9.5}\n' * 9)
    other.replace(path)  # as a run does that resumes
    table.read_new_lines()
    assert table.series["a"].last == 9.5 and table.last_step == 2 and table.num_lines == 11


def test_a_long_file_is_read_in_slices(tmp_path):
    table = MetricTable(tmp_path / "m.jsonl")
    assert table.read_new_lines()
    table.path.write_text('{"step": 1, "loss/average": 1.0}\n' * 100_000)

    assert not table.read_new_lines(seconds=0) and 0 < table.offset < table.size
    while not table.read_new_lines(seconds=0):
        pass
    assert table.num_lines == 100_000


def test_charts_of_a_run_and_of_several(tmp_path):
    lines = [
        {"step": step, "loss/current": 1.0, "loss/average": 1.0, "lr/unet": 1e-4, "loss/timestep/0.0-0.1": float(step)}
        | {"loss/timestep/0.9-1.0": 1.5}
        for step in range(1, 9)
    ]
    table = write_lines(tmp_path / "m.jsonl", lines)

    assert [chart.title for chart in build_curves(table)] == [
        "Loss",
        "Learning rate",
        "Loss by noise level over the steps",
    ]
    (chart,) = build_group_charts(table)
    assert chart.labels == ["0.0-0.1", "0.9-1.0"]
    assert [curve.y for curve in chart.curves] == [[2.5, 1.5], [6.5, 1.5]]
    compared = build_comparison_charts({"one": table, "two": table, "empty": MetricTable(tmp_path / "none")})
    assert [curve.name for curve in compared[0].curves] == ["one", "two"]
    assert build_curves(MetricTable(tmp_path / "none")) == [] == build_group_charts(MetricTable(tmp_path / "none"))


def test_metrics_of_a_run_that_version_0_1_began_are_one_series(tmp_path):
    former = {"loss/time/0.0-0.1": 1.0, "validation/time/0.1": 2.0, "validation/base/time/0.1": 3.0}
    current = {name.replace("/time/", "/timestep/"): value + 1 for name, value in former.items()}
    table = write_lines(tmp_path / "m.jsonl", [{"step": 1, **former}, {"step": 2, **current}])

    assert table.series.keys() == current.keys()
    assert [table.series[name].points for name in sorted(current)] == [
        [(1.0, value), (2.0, value + 1)] for value in (1.0, 3.0, 2.0)
    ]


def test_the_report_plays_clips_with_few_small_frames(tmp_path):
    frames = [Image.new("RGB", (640, 320), (0, 5 * number, 0)) for number in range(49)]
    path = tmp_path / "clip.webp"
    path.write_bytes(encode_webp(frames, 16.0))
    write_lines(tmp_path / "m.jsonl", [])
    write_report(build_summary(prompts=["a"]), {0: {"000000": path}}, tmp_path / "m.jsonl", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    (data,) = re.findall(r'src="data:image/webp;base64,([^"]+)"', page)
    shown, fps = decode_animation(base64.b64decode(data))
    assert len(shown) == 24 and shown[0].size == (192, 96)
    assert len(shown) / fps == pytest.approx(49 / 16, rel=0.01), "as long as the clip"
    assert abs(shown[-1].getpixel((90, 40))[1] - 240) < 6, "to its last frame"


def test_the_report_plays_a_clip_that_rests_as_long_as_it_rests(tmp_path):
    frames = [Image.new("RGB", (64, 32), (0, 40 * number, 0)) for number in [*[0] * 20, 1, 2, 3, 4, 5]]
    path = tmp_path / "clip.webp"
    path.write_bytes(encode_webp(frames, 16.0))
    shown = Image.open(io.BytesIO(_encode_small_clip(path.read_bytes())))
    durations = []
    for number in range(shown.n_frames):
        shown.seek(number)
        shown.load()
        durations.append(shown.info["duration"])
    assert sum(durations) == pytest.approx(25 / 16 * 1000, rel=0.01) and durations[0] > 0.7 * sum(durations)


def test_the_report_has_metrics_previews_and_settings_and_no_external_links(tmp_path):
    lines = [
        {"step": step, "loss/current": 1 / step, "loss/average": 1 / step, "speed/samples_per_second": 3.0}
        | {"loss/timestep/0.0-0.1": 0.5, "loss/timestep/0.9-1.0": 1.5, "update/kind/</script><script>": 1.0}
        | {"update/dead_layers": 0, "update/layers": 3}
        for step in range(1, 9)
    ]
    lines[4] |= {"loss/current": None}
    write_lines(tmp_path / "m.jsonl", lines)
    for name, color in (("before", "red"), ("after", "green")):
        Image.new("RGB", (64, 48), color).save(tmp_path / f"{name}.png")
    rows = {0: {"000000": tmp_path / "before.png", "000008": tmp_path / "after.png"}, 1: {}}
    subject = build_summary(
        name="my & lora</script><script>",
        plan="2 pictures",
        settings={"network_dim": 4},
        num_processes=2,
        prompts=["a <cat>", "a dog"],
    )

    write_report(subject, rows, tmp_path / "m.jsonl", tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text("utf-8")
    for text in (
        "my &amp; lora",
        "step 8 of 8",
        "loss 0.1250",
        "2 processes",
        "; 1 step skipped (NaN or Inf)",
        "a &lt;cat&gt;",
        "<th>before</th><th>step 8</th>",
        "network_dim",
        "2 pictures",
        '"0.9-1.0"',
    ):
        assert text in page, text
    assert page.count("data:image/jpeg;base64,") == 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and str(tmp_path) not in page
    assert page.count("</script>") == 4  # the charts' data of two sections, the code, and the call
    names = ["after.png", "before.png", "m.jsonl", "report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_summary_of_a_run_is_read_back_and_a_foreign_one_is_not(tmp_path):
    subject = build_summary(prompts=["a"], all_settings={"seed": 7}, settings={"a": 1})
    subject.write(tmp_path / "a.run.json")
    (tmp_path / "b.run.json").write_text('{"name": "b"}')

    assert RunSummary.read(tmp_path / "a.run.json") == subject
    assert RunSummary.read(tmp_path / "b.run.json") is None is RunSummary.read(tmp_path / "c.run.json")


def test_the_report_fits_on_a_phone(tmp_path):
    write_report(build_summary(), {}, tmp_path / "none.jsonl", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")

    assert '<meta name="viewport" content="width=device-width">' in page
    style = page[: page.index("</style>")]
    widths = re.findall(r"(?:minmax\(|min-width: )(?!min\(\d+px, 100%\))(\d+)px", style)
    assert widths and max(map(int, widths)) < 320
    assert re.search(r"\.charts \{[^}]*minmax\(min\(\d+px, 100%\), 1fr\)", style) and "max-width: 100%" in style


def test_a_report_can_be_written_before_the_first_step(tmp_path):
    write_report(build_summary(), {}, tmp_path / "none.jsonl", tmp_path / "report.html")

    assert "no steps yet" in (tmp_path / "report.html").read_text("utf-8")


def test_the_report_compares_validation_with_the_base_model_and_its_confidence_interval(tmp_path):
    base = {"step": 0, "validation/base": 0.5, "validation/base/timestep/0.1": 0.2, "validation/base/timestep/0.9": 0.8}
    line = {
        "step": 7,
        "validation/loss": 0.4,
        "validation/base": 0.5,
        "validation/gain": 0.1,
        "validation/gain_interval": 0.02,
        "validation/timestep/0.1": 0.15,
        "validation/timestep/0.9": 0.65,
    }

    def read(*lines: dict) -> MetricTable:
        return write_lines(tmp_path / "m.jsonl", lines)

    assert build_validation_charts(read({"step": 3, "loss/current": 1.0})) == [] == build_validation_charts(read(base))
    table = read(base, line)
    charts = {chart.title: chart for chart in build_validation_charts(table)}
    assert [curve.y for curve in charts["By timestep quantile"].curves] == [[0.2, 0.8], [0.15, 0.65]]
    (gain,) = charts["Gain over the base model, with 95 % confidence interval"].curves
    assert (gain.low, gain.high) == ([0.1 - 0.02], [0.1 + 0.02]) and "By dataset" not in charts
    assert "0.1 below the base model" in describe_validation(table)
    assert "better than the base model" in describe_validation(table)
    assert "no significant difference" in describe_validation(read(base, line | {"validation/gain_interval": 0.2}))
    table = read(base, line | {"validation/gain": -0.1, "validation/dataset/1": 0.4})
    assert "0.1 above" in describe_validation(table) and "worse than the base model" in describe_validation(table)
    assert "By dataset" in [chart.title for chart in build_validation_charts(table)]
