"""Logging: levels, ranks and files; progress bars and progress lines."""

import logging

import pytest

from library import log
from library.errors import ConfigError


@pytest.fixture(autouse=True)
def restore_logger():
    logger = logging.getLogger("library")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def log_messages(capsys, **settings):
    log.configure_logging(**settings)
    logger = logging.getLogger("library.some.module")
    logger.info("for your information")
    logger.warning("look out")
    logger.error("broken")
    return capsys.readouterr().err


def test_messages_are_logged_with_the_time(capsys):
    lines = log_messages(capsys).splitlines()

    assert [line.split("  ", 1)[1] for line in lines if not line.startswith(("warning", "error"))] == [
        "for your information"
    ]
    assert lines[1].startswith("warning: ") and lines[1].endswith("  look out")


def test_simple_messages_have_no_time(capsys):
    assert log_messages(capsys, simple=True) == "for your information\nwarning: look out\nerror: broken\n"


def test_quiet_logs_warnings_and_errors_only(capsys):
    assert log_messages(capsys, simple=True, quiet=True) == "warning: look out\nerror: broken\n"


def test_the_level_filters_messages(capsys):
    assert log_messages(capsys, simple=True, level="ERROR") == "error: broken\n"


def test_other_ranks_log_errors_only_with_their_rank(capsys):
    assert log_messages(capsys, simple=True, rank=3) == "[rank 3] error: broken\n"


def test_messages_can_be_logged_to_a_file(capsys, tmp_path):
    path = tmp_path / "logs" / "run.log"

    assert log_messages(capsys, simple=True, file=str(path)) == ""
    assert path.read_text() == "for your information\nwarning: look out\nerror: broken\n"


def test_an_unwritable_log_file_is_a_config_error(tmp_path):
    for path in (tmp_path, tmp_path / "file" / "run.log"):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"--console_log_file: .* cannot be written"):
            log.configure_logging(file=str(path))


def test_configuring_twice_does_not_log_twice(capsys):
    log.configure_logging(simple=True)

    assert log_messages(capsys, simple=True).count("look out") == 1


def test_the_root_logger_is_not_changed():
    before = (list(logging.getLogger().handlers), logging.getLogger().level)
    log.configure_logging()

    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before


def test_fast_progress_without_a_terminal_logs_the_first_and_last_step(capsys):
    log.configure_logging(simple=True)
    with log.ProgressBar(5, 0, "training", enabled=True) as progress:
        for step in range(5):
            progress.update({"loss": f"{step / 10:.1f}"})

    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["training 1/5", "training 5/5"]
    assert "loss 0.4" in lines[1] and lines[1].endswith("0:00 left")


def test_progress_can_advance_by_several_and_log_no_first_and_last_line(capsys):
    log.configure_logging(simple=True)
    for ends in (True, False):
        with log.ProgressBar(50, 0, "looking", enabled=True, unit="file", log_first_and_last=ends) as progress:
            for count in (20, 20, 10):
                progress.update({}, count)
        lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
        assert lines == (["looking 20/50", "looking 50/50"] if ends else [])
        assert progress.completed == 50


def test_progress_is_logged_after_each_interval(capsys, monkeypatch):
    log.configure_logging(simple=True)
    monkeypatch.setattr(log, "PROGRESS_LOG_INTERVAL", 0.0)
    with log.ProgressBar(30, 0, "looking", enabled=True, log_first_and_last=False) as progress:
        for _ in range(3):
            progress.update({}, 10)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "looking 10/30",
        "looking 20/30",
        "looking 30/30",
    ]


def test_the_time_left_does_not_count_the_first_step(capsys, monkeypatch):
    """It takes many times as long as the others: workers start, blocks are compiled."""
    log.configure_logging(simple=True)
    monkeypatch.setattr(log, "PROGRESS_LOG_INTERVAL", 0.0)
    clock = iter([0.0, 60.0, 61.0, 62.0])
    monkeypatch.setattr(log.time, "monotonic", lambda: next(clock))
    with log.ProgressBar(100, 0, "training", enabled=True) as progress:
        for _ in range(3):
            progress.update({})
    assert capsys.readouterr().err.splitlines() == [
        "training 1/100",
        "training 2/100, 1:38 left",
        "training 3/100, 1:37 left",
    ]


def test_disabled_and_quiet_progress_is_not_shown(capsys):
    for settings, enabled in (({"simple": True}, False), ({"quiet": True}, True)):
        log.configure_logging(**settings)
        with log.ProgressBar(1, 0, "training", enabled=enabled) as progress:
            progress.update({})

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03")])
def test_durations_are_formatted_as_on_a_clock(seconds, text):
    assert log.format_duration(seconds) == text
