"""What people do on the pages of the Dagster UI."""

from collections.abc import Sequence

from eagle3_pipeline_tests.ui.browser import DIALOG, MENU, Browser
from eagle3_pipeline_tests.ui.home import CHUNKS, NAME

GRAPH = f"/locations/eagle3_pipeline/asset-groups/{NAME}"
_ENDS = ("Success", "Failure", "Canceled")
_STATUSES = ("Queued", "Starting", "Started", "Canceling", *_ENDS)
# The heading of a partition: its key, tags, and a spinner for each query that is not yet answered.
_HEADING = """
const found = [...document.querySelectorAll(`div[data-tooltip="${arguments[0]}"]`)];
const heading = found.find(element => element.style.display === "grid");
return heading && !heading.querySelector("[role=progressbar]") ? heading.innerText : "";
"""


def asset(stage: str, view: str = "overview") -> str:
    """Path of an asset's page."""
    return f"/assets/{NAME}/{stage}?view={view}"


def job(name: str) -> str:
    """Path of a job's page."""
    return f"/locations/eagle3_pipeline/jobs/{NAME}__{name}"


def select_in_graph(browser: Browser, stages: Sequence[str]) -> None:
    """Selects several assets of the graph."""
    browser.open(GRAPH)
    for number, stage in enumerate(stages):
        _select(browser, stage, shift=number > 0)


def _select(browser: Browser, stage: str, shift: bool) -> None:
    # The graph shortens long names in the middle.
    ends = f"starts-with(normalize-space(), '{stage[:5]}') and contains(., '{stage[-7:]}')"
    browser.pick(f"//*[{ends}][not(*)]", shift)
    browser.until(lambda: f"{NAME}%2F{stage}" in browser.path, f"{stage} to be selected")


def choose_chunks(browser: Browser, chunks: Sequence[str]) -> None:
    """Ticks partitions in the dialog of a launch."""
    browser.click("Select a partition or create one", DIALOG)
    for chunk in chunks:
        browser.click(chunk, MENU)
    browser.escape()
    browser.wait_for(f"{len(chunks)} partition{'s' if len(chunks) > 1 else ''}", DIALOG)


def launch_chunk(browser: Browser, stage: str, chunk: str) -> str:
    """Materialises one partition of one asset and waits for its run; returns the run's id."""
    browser.open(asset(stage))
    browser.click("Materialize…")
    choose_chunks(browser, [chunk])
    browser.click("Launch 1 run", DIALOG)
    run_id = follow_launch(browser)
    assert wait_for_end(browser) == "Success"
    return run_id


def follow_launch(browser: Browser) -> str:
    """Opens the run that was just launched, from the message about it; returns its id."""
    browser.click("View")
    browser.until(lambda: browser.path.startswith("/runs/"), "the page of the run")
    return browser.path.rsplit("/", 1)[1]


def wait_for_end(browser: Browser, timeout_s: float = 120.0) -> str:
    """The status in which the run of this page ends."""

    says = " or ".join(f"normalize-space()='{status}'" for status in _STATUSES)

    def ended() -> str:
        # The first in the page is the heading's; the runs that were re-executed are listed further down.
        status = browser.all(f"//*[{says}]")[0].text.strip()
        return status if status in _ENDS else ""

    return browser.until(ended, "the end of the run", timeout_s)


def unsynced(browser: Browser, stage: str) -> set[str]:
    """Chunks whose partition is marked as unsynced, looked at one after the other."""
    browser.open(asset(stage, "partitions"))
    found = set()
    for chunk in CHUNKS:
        browser.click(chunk)
        if "Unsynced" in _heading(browser, chunk):
            found.add(chunk)
    return found


def _heading(browser: Browser, chunk: str) -> str:
    return browser.until(lambda: browser.run_script(_HEADING, chunk), f"partition {chunk}")
