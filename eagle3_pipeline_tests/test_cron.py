"""A wrong cron expression is refused with the file, and one pipeline's file stops no other's command."""

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner
from dagster._utils.schedules import is_valid_cron_string

from eagle3_pipeline.cli import main
from eagle3_pipeline.config import enabled_pipelines, load_enabled, load_pipeline
from eagle3_pipeline.config.cron import cron_problem
from eagle3_pipeline.errors import ConfigError

WRONG = """30 25 * * *|* * * *|60 * * * *|a b c d e||@reboot|0 0 31 2 *|0 0 30 2 *|*/0 * * * *|1,,2 * * * *|-1 * * * *
0 0 0 * *|0 0 1 0 *|0 0 1 13 *|0 0 * * * *|0 0 32 * *|1-70 * * * *|*-5 * * * *
0 24 * * *|0 0 * * 8|0 0 * * 1#6|* * * foo *
H H * * *|? * * * *|0 0 31 2 1""".replace("\n", "|").split("|")
RIGHT = """30 2 * * *|*/15 * * * *|0 0 * * 7|0 0 L * *|0 0 * * sun|0 0 * jan-mar mon-fri|@daily|@weekly|0 0 29 2 *
0 22-2 * * *|0 0 * * fri-mon|0/5 * * * *|1,2,3 * * * *|0 0 1-15/2 * *|0 0 * * 1#2|0 0 * * L5|0 0 ? * *|01 02 * * *
1/2-5 * * * *|0 0 31 2,4 *|0 0 * * MON""".replace("\n", "|").split("|")
PIPELINE = "verifier: {model: none}\ndataset: {path: none}\n"


@pytest.mark.parametrize("text", WRONG + RIGHT)
def test_what_dagster_schedules_by_is_taken_and_nothing_else(text: str) -> None:
    expected = text in RIGHT and text != "1/2-5 * * * *"
    assert (cron_problem(text) is None) == expected == is_valid_cron_string(text)


def test_the_file_is_refused_with_the_field(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(PIPELINE + 'schedule: {cron: "30 25 * * *"}\n')
    with pytest.raises(ConfigError, match=r"p\.yaml: 1 problem.*\n.*schedule\.cron: .*hour is '25'.*from 0 to 23"):
        load_pipeline(file)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.yaml").write_text(PIPELINE)
    (tmp_path / "other.yaml").write_text(PIPELINE + 'schedule: {cron: "nightly"}\n')
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path))
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_ENABLED", "good,other,gone")
    return tmp_path


def test_the_location_loads_what_it_can_and_names_the_rest(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    from eagle3_pipeline import definitions

    specs, broken = load_enabled()
    assert [spec.name for spec in specs] == ["good"] and set(broken) == {"other", "gone"}
    with caplog.at_level(logging.WARNING):
        made = definitions._enabled_definitions()
    groups = {key.path[0] for key in made.resolve_asset_graph().get_all_asset_keys()}
    assert groups == {"good"}
    assert "pipeline other is enabled" in caplog.text and "schedule.cron" in caplog.text
    assert "no pipeline is named 'gone'" in caplog.text


def test_a_command_of_another_pipeline_works_and_one_that_names_it_says_why(two: Path) -> None:
    shown = CliRunner().invoke(main, ["pipelines"])
    assert shown.exit_code == 0 and "other cannot be loaded" in shown.output
    refused = CliRunner().invoke(main, ["plan", "other"])
    assert refused.exit_code == 1 and "schedule.cron" in refused.output
    (two / "good.yaml").write_text("verifier: [")
    with pytest.raises(ConfigError, match="schedule.cron"):
        enabled_pipelines()
