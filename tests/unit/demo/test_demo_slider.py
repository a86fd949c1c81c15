"""The slider of ``make demo-slider``, shortened: the apple turns green in one direction, and the fox stays as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo_slider import STRENGTHS, draw_pictures, draw_sheet, format_table, measure

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


def test_one_property_moves_with_the_strength_and_another_subject_stays(tmp_path):
    command = [
        *(sys.executable, "train_lora.py", "--config_file", "dataset_configs/demo_slider_run.toml"),
        *("--output_dir", str(tmp_path), "--max_train_steps", "48", "--mixed_precision", "no"),
    ]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr

    pictures = draw_pictures(tmp_path / "demo_slider.safetensors", ("a red apple", "a fox"))

    figures = {subject: measure(rows) for subject, rows in pictures.items()}
    green, fox = [each["green"] for each in figures["a red apple"]], figures["a fox"]
    assert green == sorted(green) and green[-1] - green[0] > 60, format_table(figures)
    assert max(each["change"] for each in fox) < 8, format_table(figures)
    assert max(abs(each["green"] - fox[2]["green"]) for each in fox) < 20
    assert fox[2]["change"] == 0 and fox[2]["outline"] == 1
    width = draw_sheet(pictures).width
    assert width == len(STRENGTHS) * 100 - 4 and "a fox, outline" in format_table(figures)
