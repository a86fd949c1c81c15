"""The load of cards is read from what nvidia-smi prints, and the energy of a run is the area below its power."""

import pytest
from web_pages import open_page, write_run

from library.web.device_load import CardLoad, EnergyMeter, LoadMonitor, parse_card_loads

GIB = 2**30
# In the form in which nvidia-smi prints it: two cards, a laptop's that tells neither use nor power, and a broken one.
SERVER = (
    "0, NVIDIA GeForce RTX 4090, 97, 21734, 24564, 64, 387.21, 450.00\n"
    "1, NVIDIA GeForce RTX 3090, 0, 3, 24576, 31, 21.87, 350.00\n"
)
LAPTOP = "0, NVIDIA GeForce GTX 1650, [N/A], 512, 4096, 48, [N/A], [Not Supported]\n"
BROKEN = "1, NVIDIA A100-SXM4-80GB, [Unknown Error], [N/A], 81920, ERR!, [GPU is lost], 400.00\n"


def test_the_answer_of_nvidia_smi_is_read():
    first, second = parse_card_loads(SERVER)
    assert first == CardLoad(
        index=0,
        name="NVIDIA GeForce RTX 4090",
        use=97.0,
        memory_used=21734 * 2**20,
        memory_total=24564 * 2**20,
        temperature=64.0,
        power=387.21,
        power_limit=450.0,
    )
    assert (second.index, second.use, second.power) == (1, 0.0, 21.87)
    (laptop,) = parse_card_loads(LAPTOP)
    assert (laptop.use, laptop.power, laptop.power_limit, laptop.memory_total) == (None, None, None, 4 * GIB)
    (broken,) = parse_card_loads("Unable to determine the device handle for GPU 0: Unknown Error\n" + BROKEN)
    assert (broken.use, broken.memory_used, broken.temperature, broken.power_limit) == (None, None, None, 400.0)
    for text in ("", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate\n"):
        assert parse_card_loads(text) == []


def test_many_windows_ask_the_driver_once(monkeypatch):
    asked, now = [], [100.0]
    monitor = LoadMonitor(lambda: asked.append(1) or SERVER, lambda: now[0])
    assert [monitor.read_power(), monitor.read_power()] == [387.21 + 21.87] * 2 and len(asked) == 1
    now[0] += 2
    assert monitor.read_cards() and len(asked) == 2
    assert LoadMonitor(lambda: LAPTOP).read_power() is None and LoadMonitor(lambda: None).read_power() is None


def test_energy_is_the_area_below_the_power_without_gaps():
    meter = EnergyMeter(watt_hours=1.0)
    for now, watts in ((0, 100.0), (10, 200.0), (20, 200.0), (3620, 200.0), (3630, 400.0), (3640, None), (3650, 100.0)):
        meter.add(now, watts)
    assert meter.watt_hours == pytest.approx(1.0 + (10 * 150 + 10 * 200 + 10 * 300) / 3600)


def test_the_page_tells_load_and_time_left_with_and_without_a_card(tmp_path, monkeypatch):
    write_run(tmp_path, "alive", steps=5)
    (tmp_path / ".alive.lock").touch()
    page = open_page(tmp_path)
    monitor = page.app.state.workbench.queue.monitor
    monitor.ask = lambda: None
    answer = page.get("/api/load").json()
    assert answer["cards"] == [] and answer["power"] is None and 0 < answer["host"]["memory_used"]
    monitor.ask, monitor._read_at = (lambda: SERVER), None
    answer = page.get("/api/load").json()
    assert [card["temperature"] for card in answer["cards"]] == [64, 31] and answer["power"] == pytest.approx(409.08)
    charts = page.get("/api/charts/0/alive").json()
    assert charts["seconds_left"] == 7.5 and charts["watt_hours"] is None
