"""One home, one `dagster dev` and one browser for all tests of a module."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_pipeline.assets import launch
from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline_tests.dagster_dev import dagster_dev
from eagle3_pipeline_tests.ui.browser import Browser, chromium
from eagle3_pipeline_tests.ui.home import NAME, Home, build_home, environment

_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
# A folder that keeps the screenshots.
_ARTIFACTS = "EAGLE3_UI_ARTIFACTS"
_FOLDER = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def programs() -> tuple[str, str]:
    """Chromium and its driver; nothing is downloaded."""
    program = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    driver = shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip(
            f"THE UI IS NOT TESTED: it takes chromium (here: {program}) and chromedriver (here: {driver}) on the PATH; "
            "on Debian: apt-get install chromium chromium-driver"
        )
    return program, driver


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Folder of screenshots; their paths are printed at the end."""
    wanted = os.environ.get(_ARTIFACTS)
    folder = Path(wanted).absolute() if wanted else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    pytestconfig.stash[_FOLDER] = folder
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints where the screenshots lie."""
    if folder := config.stash.get(_FOLDER, None):
        terminalreporter.section("screenshots")
        for path in sorted(folder.glob("*.png")):
            terminalreporter.write_line(str(path))


@pytest.fixture(scope="module")
def home(programs: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Six registered chunks, nothing materialised, and the running server; ends it and all engines."""
    path = tmp_path_factory.mktemp("ui_home")
    build_home(path)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("EAGLE3_") and name != _ARTIFACTS]:
            patch.delenv(name)
        for name, value in environment(path).items():
            patch.setenv(name, value)
        with launch.open_instance() as instance:
            launch.sync_chunks(find_pipeline(NAME), instance, print)
        with dagster_dev(environment(path), path / "dagster_dev.log") as server:
            made = Home(path, server)
            try:
                yield made
            finally:
                made.open_gate()
        made.context.engines.stop_all(print)


@pytest.fixture(scope="module")
def browser(
    artifacts: Path, programs: tuple[str, str], home: Home, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    """A browser on the server."""
    with chromium(*programs, tmp_path_factory.mktemp("profile")) as driver:
        yield Browser(driver, home.server.url, artifacts)
