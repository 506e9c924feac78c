"""Records of the engines folder that cannot be read: they are ignored or named, and break nobody else."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from eagle3_pipeline.cli import main
from eagle3_pipeline.engine.jobs import read_journal
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline_tests.engine.conftest import JobMaker, engine_spec, journal_rows

JUNK = ["", "garbage{", "[]", "{}", "null", '"x"', '{"pid": "abc"}', '{"pid": -1}', '{"count": "9", "last": 5}', "\x00"]
LINES = ["garbage", "[]", "{}", "null", '{"sequence_id": "s0"}', '{"sequence_id": "s0", "token_ids": 5}', "[" * 50_000]


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(home))


def works(manager: EngineManager) -> None:
    """An engine starts and answers, and every command that looks at engines ends well."""
    with manager.acquire(engine_spec(), lambda _line: None) as client:
        assert client.request("info")["pid"]
    for command in (["status"], ["engine", "list"], ["engine", "reset"], ["engine", "stop"]):
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("content", [*JUNK, json.dumps({**json.loads(engine_spec().to_json()), "future_key": 1})])
def test_a_spec_of_another_engine(manager: EngineManager, content: str) -> None:
    foreign = manager.folder / "0123456789abcdef"
    foreign.mkdir(parents=True)
    (foreign / "spec.json").write_text(content)
    works(manager)
    assert "its spec.json cannot be read" in CliRunner().invoke(main, ["engine", "list"]).output


@pytest.mark.parametrize("content", JUNK)
@pytest.mark.parametrize("name", ["state.json", "failures.json", "last_load_s.json"])
def test_records_of_the_engine_itself(manager: EngineManager, name: str, content: str) -> None:
    state = EngineState(manager.folder / engine_spec().engine_id)
    state.prepare(engine_spec())
    (state.folder / name).write_text(content)
    works(manager)


@pytest.mark.parametrize("content", JUNK)
def test_the_ledger_of_starts(manager: EngineManager, content: str) -> None:
    manager.folder.mkdir(parents=True)
    (manager.folder / "starts.jsonl").write_text(f'{{"engine_id": "a"}}\n{content}\n')
    works(manager)
    assert [start["engine_id"] for start in manager.starts()] == ["a", engine_spec().engine_id]


@pytest.mark.parametrize("content", [*JUNK, '{"holder": "a", "pid": "x", "session": "x"}', '{"session": 1, "pid": 1}'])
def test_the_record_of_a_device(manager: EngineManager, home: Path, content: str) -> None:
    (home / "devices").mkdir(parents=True)
    (home / "devices" / "cpu-0.lock").write_text(content + "\n")
    works(manager)


@pytest.mark.parametrize("line", [*LINES, "altered"])
def test_a_damaged_journal_line_is_a_row_to_generate_again(
    manager: EngineManager, make_job: JobMaker, line: str
) -> None:
    job = make_job()
    with manager.acquire(engine_spec(), lambda _line: None) as client:
        client.generate(job)
        rows = {row["sequence_id"]: row for row in journal_rows(job)}
        before = read_journal(Path(job.journal))
        altered = rows.pop("s0")
        altered["token_ids"][-1] += 1
        lines = [json.dumps(altered) if line == "altered" else line, *map(json.dumps, rows.values())]
        Path(job.journal).write_text("\n".join(lines) + "\n")
        counts = client.generate(job)
    assert (counts["reused"], counts["total"]) == (len(rows), len(rows) + 1)
    assert read_journal(Path(job.journal)) == before
