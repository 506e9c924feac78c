"""The pipeline in Dagster's own UI, by clicking. Tests of this module run in order and share what they materialise.

Every page is checked against GraphQL or the store.
"""

import base64

import pytest

from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.draft_checkpoint import CURVES
from eagle3_pipeline_tests.ui import pages
from eagle3_pipeline_tests.ui.browser import DIALOG, WINDOW, Browser
from eagle3_pipeline_tests.ui.home import CHUNKS, NAME, Home

pytestmark = [pytest.mark.ui, pytest.mark.timeout(400)]

FIRST, BACKFILLED = CHUNKS[0], CHUNKS[1::2]
# Chunks whose files are edited: another question; another key that no conversation is made of; another question.
CHANGED, EQUAL, CHANGED_LATER = CHUNKS[3], CHUNKS[1], CHUNKS[4]
STATUSES = ("fresh", "missing", "stale", "pending")


def test_one_partition_is_materialised(home: Home, browser: Browser) -> None:
    browser.open(pages.asset(ids.VERIFIER))
    browser.click("Materialize")
    run_id = pages.follow_launch(browser)
    assert pages.wait_for_end(browser) == "Success"
    assert home.run(run_id)["status"] == "SUCCESS"

    run_id = pages.launch_chunk(browser, ids.DATASET, FIRST)
    assert {"key": "dagster/partition", "value": FIRST} in home.run(run_id)["tags"]
    browser.open(pages.asset(ids.DATASET, "partitions"))
    browser.wait_for("Materialized (1)")
    browser.wait_for("Missing (5)")
    browser.click(FIRST)
    browser.wait_for("num_samples")
    browser.screenshot("01_one_partition")
    assert home.materialised(ids.DATASET) == {FIRST}
    assert home.published(ids.DATASET) == {home.context.upstream(ids.DATASET, FIRST).manifest.fingerprint}


def test_three_of_six_chunks_are_backfilled(home: Home, browser: Browser) -> None:
    """Three assets selected in the graph, three partitions in the dialog: one run each, one engine for all."""
    pages.select_in_graph(browser, ids.CHUNK_STAGES)
    browser.click("Materialize selected (3)…")
    pages.choose_chunks(browser, BACKFILLED)
    browser.screenshot("02_backfill_dialog")
    browser.click("Launch backfill", DIALOG)
    backfill = pages.follow_launch(browser)
    assert home.server.wait(backfill, 240) == "COMPLETED_SUCCESS"

    browser.wait_for("Succeeded", "//*[normalize-space()='Status']/..")
    browser.until(lambda: len(browser.shown("100% completed")) == 3, "three completed assets")
    browser.screenshot("03_backfill")
    browser.open(pages.asset(ids.HIDDEN_STATES, "partitions"))
    browser.wait_for("Materialized (3)")
    browser.wait_for("Missing (3)")
    browser.screenshot("04_three_of_six")
    runs = home.runs_of_backfill(backfill)
    assert [run["status"] for run in runs] == ["SUCCESS"] * 3
    assert home.materialised(ids.HIDDEN_STATES) == set(BACKFILLED)
    assert home.materialised(ids.DATASET) == {FIRST, *BACKFILLED}
    assert len(home.published(ids.HIDDEN_STATES)) == 3
    assert home.num_starts() == 1


def test_a_terminated_capture_is_executed_again(home: Home, browser: Browser) -> None:
    home.close_gate()
    browser.open(pages.job("generate_and_capture"))
    browser.click("Materialize all…")
    pages.choose_chunks(browser, [FIRST])
    browser.click("Launch 1 run", DIALOG)
    terminated = pages.follow_launch(browser)
    home.wait_at_gate()
    assert home.run(terminated)["status"] == "STARTED"
    browser.click("Terminate")
    browser.wait_for("1 run will be terminated. Do you wish to continue?", DIALOG)
    browser.screenshot("05_terminate")
    browser.click("Terminate 1 run", DIALOG)
    assert pages.wait_for_end(browser) == "Canceled"
    browser.screenshot("06_terminated")
    assert home.run(terminated)["status"] == "CANCELED"
    assert FIRST not in home.materialised(ids.HIDDEN_STATES)
    assert len(home.published(ids.SYNTHETIC_GENERATIONS)) == len(home.published(ids.HIDDEN_STATES)) == 3

    home.open_gate()
    browser.click("Re-execute all (*)")
    browser.until(lambda: not browser.path.endswith(terminated), "the page of the second run")
    again = browser.path.rsplit("/", 1)[1]
    browser.wait_for("Re-executions (1)")
    assert pages.wait_for_end(browser) == "Success"
    browser.screenshot("07_executed_again")
    assert home.run(again)["parentRunId"] == terminated
    assert home.materialised(ids.HIDDEN_STATES) == {FIRST, *BACKFILLED}
    assert len(home.published(ids.SYNTHETIC_GENERATIONS)) == len(home.published(ids.HIDDEN_STATES)) == 4
    assert home.num_starts() == 1, "the engine outlives a terminated run"


def test_exactly_the_changed_chunk_is_unsynced(home: Home, browser: Browser) -> None:
    """The sensor of new chunks sees the edit by itself. After a rerun it is the next stage's turn."""
    assert pages.unsynced(browser, ids.DATASET) == home.stale(ids.DATASET) == set()
    home.edit_rows(CHANGED, prompt="another question")
    assert home.wait_for_stale(ids.DATASET) == {CHANGED}
    assert pages.unsynced(browser, ids.DATASET) == {CHANGED}
    browser.click(CHANGED)
    browser.hover("Unsynced (1)")
    browser.wait_for("has a new data version")
    browser.screenshot("08_changed_chunk")

    assert pages.unsynced(browser, ids.SYNTHETIC_GENERATIONS) == home.stale(ids.SYNTHETIC_GENERATIONS) == set()
    pages.launch_chunk(browser, ids.DATASET, CHANGED)
    assert pages.unsynced(browser, ids.DATASET) == home.stale(ids.DATASET) == set()
    assert pages.unsynced(browser, ids.SYNTHETIC_GENERATIONS) == {CHANGED}
    assert home.stale(ids.SYNTHETIC_GENERATIONS) == {CHANGED}
    browser.click(CHANGED)
    browser.hover("Unsynced (1)")
    browser.wait_for("has a new data version")
    browser.screenshot("09_downstream_of_the_changed_chunk")


def test_a_rerun_with_equal_content_leaves_its_downstream_in_sync(home: Home, browser: Browser) -> None:
    """A key that no conversation is made of changes the rows, not the data set."""
    before = home.context.upstream(ids.DATASET, EQUAL).manifest
    home.edit_rows(EQUAL, note="checked")
    home.eagle3("sync-chunks", NAME)
    assert pages.unsynced(browser, ids.DATASET) == home.stale(ids.DATASET) == {EQUAL}
    pages.launch_chunk(browser, ids.DATASET, EQUAL)
    after = home.context.upstream(ids.DATASET, EQUAL).manifest
    assert after.fingerprint != before.fingerprint, "it was computed again"
    assert after.content_id == before.content_id
    assert pages.unsynced(browser, ids.DATASET) == home.stale(ids.DATASET) == set()
    assert pages.unsynced(browser, ids.SYNTHETIC_GENERATIONS) == {CHANGED}, "as before"
    assert home.stale(ids.SYNTHETIC_GENERATIONS) == {CHANGED}
    browser.click(EQUAL)
    browser.wait_for("num_supervised_tokens")
    browser.screenshot("10_downstream_of_the_equal_chunk")


def test_the_whole_graph_is_materialised(home: Home, browser: Browser) -> None:
    """`eagle3 materialize` hands what is left to the daemon of this server."""
    home.eagle3("materialize", NAME)
    assert plan(home.context).todo == []
    # Wide enough for the graph to show what is in its boxes.
    browser.driver.set_window_size(1900, 950)
    browser.open(pages.GRAPH)
    browser.click("Hide navigation")
    browser.open(pages.GRAPH)
    browser.until(lambda: len(browser.shown("100% filled")) == len(ids.CHUNK_STAGES), "three filled assets", 60)
    browser.screenshot("11_graph")
    browser.driver.set_window_size(*WINDOW)
    for stage in ids.CHUNK_STAGES:
        assert home.materialised(stage) == set(CHUNKS)
        assert home.stale(stage) == set()


def test_the_curves_of_the_training_are_shown(home: Home, browser: Browser) -> None:
    """A real training: the fake engine's states follow from the tokens, so there is something to learn."""
    checkpoint = home.context.upstream(ids.DRAFT_CHECKPOINT)
    assert checkpoint.manifest.metrics["val_acceptance_length"] > 1.5
    browser.open(pages.asset(ids.DRAFT_CHECKPOINT))
    browser.click("[Show Markdown]", "//tr[td[normalize-space()='curves']]")
    browser.until(lambda: browser.all(f"{DIALOG}//img"), "the picture")
    (picture,) = browser.all(f"{DIALOG}//img")
    browser.until(lambda: picture.get_property("naturalWidth"), "the picture to be decoded")
    browser.screenshot("12_curves")
    kind, _, data = str(picture.get_attribute("src")).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == checkpoint.path(CURVES).read_bytes()


def test_the_plan_is_a_table(home: Home, browser: Browser) -> None:
    """The check `up_to_date` of the vocabulary tells what a changed chunk makes of the plan."""
    home.edit_rows(CHANGED_LATER, prompt="yet another question")
    home.eagle3("sync-chunks", NAME)
    browser.open(pages.asset(ids.VOCAB_MAP, "checks"))
    browser.click("up_to_date")
    browser.click("Execute")
    pages.follow_launch(browser)
    assert pages.wait_for_end(browser) == "Success"
    browser.open(pages.asset(ids.VOCAB_MAP, "checks"))
    browser.click("up_to_date")
    browser.until(lambda: f"dataset[{CHANGED_LATER}]: stale" in browser.text(), "the reason")
    browser.screenshot("13_up_to_date")
    browser.click("[Show Markdown]")
    browser.wait_for("stage", DIALOG)
    browser.screenshot("14_plan")
    one_waits = {"pending": "1"}
    assert read_table(browser) == {
        "verifier": {"fresh": "1"},
        "dataset": {"fresh": "5", "stale": "1"},
        "synthetic_generations": {"fresh": "5", "pending": "1"},
        "hidden_states": {"fresh": "5", "pending": "1"},
        "vocab_map": one_waits,
        "baseline": {"fresh": "1"},
        "draft_checkpoint": one_waits,
        "draft_evaluation": one_waits,
        "published_draft": one_waits,
    }


def read_table(browser: Browser) -> dict[str, dict[str, str]]:
    """Counts of each status, by stage, from the table in front; a cell without text is left out."""
    script = "return [...arguments[0].rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    header, *rows = browser.run_script(script, browser.all(f"{DIALOG}//table")[0])
    table = [dict(zip(header, row, strict=True)) for row in rows]
    return {row["stage"]: {status: row[status] for status in STATUSES if row.get(status)} for row in table}
