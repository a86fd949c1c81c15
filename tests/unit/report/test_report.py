"""The HTML report shows the metrics of a run and is self-contained."""

import json
import re

from PIL import Image

from library.report.charts import Curve, render_bar_chart, render_line_chart
from library.report.page import ReportContext, render_validation, write_report

PLACE = re.compile(r'points="([^"]+)"')


def test_curves_are_drawn_to_scale():
    points = [
        tuple(map(float, pair.split(",")))
        for pair in PLACE.search(render_line_chart([Curve("a", [(1, 0.5), (2, 2.5), (3, 1.5)])]))[1].split()
    ]

    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == x3 - x2 > 0
    assert y1 > y3 > y2 and abs((y1 - y2) - 2 * (y1 - y3)) < 0.2  # y grows downwards in SVG


def test_constants_and_single_points_are_drawn_and_no_points_give_no_chart():
    assert "polyline" in render_line_chart([Curve("a", [(1, 3.0), (2, 3.0)])]) and "polyline" in render_line_chart(
        [Curve("a", [(1, 0.0)])]
    )
    assert render_line_chart([Curve("a", [])]) == "" == render_bar_chart({}, ("x",))


def test_long_curves_are_downsampled():
    points = [(step, float(step % 7)) for step in range(40_000)]
    points_drawn = PLACE.search(render_line_chart([Curve("a", points)]))[1].split()

    assert len(points_drawn) <= 1500


def test_the_report_has_metrics_previews_and_settings_and_no_external_links(tmp_path):
    lines = [
        {
            "step": step,
            "loss/current": 1 / step,
            "loss/average": 1 / step,
            "lr/unet": 1e-4,
            "gradient_norm": 2.0,
            "loss/time/0.0-0.1": 0.5,
            "loss/time/0.9-1.0": 1.5,
            "speed/samples_per_second": 3.0,
        }
        for step in range(1, 9)
    ]
    lines[4] |= {"loss/current": None}
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, colour in (("before", "red"), ("after", "green")):
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"{name}.png")
    rows = [("a <cat>", {"000000": tmp_path / "before.png", "000008": tmp_path / "after.png"}), ("a dog", {})]
    subject = ReportContext("my & lora", 8, "2 pictures", {"network_dim": 4}, 0.0, 2, "bf16", rows)

    write_report(subject, tmp_path / "m.jsonl", tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text("utf-8")
    for text in (
        "my &amp; lora",
        "step 8 of 8",
        "loss 0.1250",
        "2 processes",
        "; 1 step skipped (NaN or Inf)",
        "a &lt;cat&gt;",
        "before",
        "step 8",
        "network_dim",
        "2 pictures",
        "0.9-1.0",
        "<th>before</th>",
    ):
        assert text in page, text
    assert page.count("data:image/jpeg;base64,") == 2
    assert "http" not in page and 'src="/' not in page and str(tmp_path) not in page
    names = ["after.png", "before.png", "m.jsonl", "report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_report_fits_on_a_phone(tmp_path):
    write_report(ReportContext("a", 8, "", {}, 0.0, 1, "no", []), tmp_path / "none.jsonl", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")

    assert '<meta name="viewport" content="width=device-width">' in page
    widths = re.findall(r"(?:minmax\(|min-width: )(?!min\(\d+px, 100%\))(\d+)px", page)
    assert widths and max(map(int, widths)) < 320
    assert re.search(r"\.charts \{[^}]*minmax\(min\(\d+px, 100%\), 1fr\)", page) and "max-width: 100%" in page


def test_a_report_can_be_written_before_the_first_step(tmp_path):
    subject = ReportContext("a", 8, "", {}, 0.0, 1, "no", [])

    write_report(subject, tmp_path / "none.jsonl", tmp_path / "report.html")

    assert "no steps yet" in (tmp_path / "report.html").read_text("utf-8")


def test_the_report_compares_validation_with_the_base_model_and_its_confidence_interval():
    base = {"step": 0, "validation/base": 0.5, "validation/base/time/0.1": 0.2, "validation/base/time/0.9": 0.8}
    line = {
        "step": 7,
        "validation/loss": 0.4,
        "validation/base": 0.5,
        "validation/gain": 0.1,
        "validation/gain_interval": 0.02,
        "validation/time/0.1": 0.15,
        "validation/time/0.9": 0.65,
    }

    assert render_validation([{"step": 3, "loss/current": 1.0}]) == "" == render_validation([base])
    page = render_validation([base, line])
    assert "0.1 below the base model" in page and "better than the base model" in page
    assert ">0.9: 0.8<" in page and ">0.9: 0.65<" in page and "By dataset" not in page
    assert "no significant difference" in render_validation([base, line | {"validation/gain_interval": 0.2}])
    worse = line | {"validation/gain": -0.1, "validation/dataset/1": 0.4}
    assert "0.1 above" in render_validation([base, worse]) and "worse than the base model" in render_validation(
        [base, worse]
    )
    assert "By dataset" in render_validation([base, worse])
