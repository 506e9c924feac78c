"""The rules that the architecture rests on, and that the tools that enforce them do so."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import eagle3_pipeline
from eagle3_pipeline_tests.store.children import REPOSITORY

PACKAGE = Path(eagle3_pipeline.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ["torch", "vllm", "transformers", "speculators", "datasets"]

BLOCKED = """
import sys, time

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"this machine has no {{name}}")

sys.meta_path.insert(0, Blocker())
{statements}
"""


def _python(statements: str, blocked: list[str]) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(blocked=set(blocked), statements=statements)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EAGLE3_")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


def test_definitions_load_in_two_seconds_without_any_heavy_library() -> None:
    # Seconds of CPU since the process started: what else the machine does then does not matter.
    timed = "import eagle3_pipeline.definitions as d\nprint(time.process_time())\nassert len(list(d.defs.assets)) > 5"
    result = _python(timed, HEAVY)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 2


def test_the_blocker_blocks() -> None:
    result = _python("import torch.nn", HEAVY)
    assert result.returncode == 1 and "this machine has no torch" in result.stderr


@pytest.mark.parametrize(
    "module", ["planning", "stages.verifier_outputs", "engine.manager", "engine.host", "data.sequences", "workers"]
)
def test_what_lies_below_the_assets_imports_no_dagster(module: str) -> None:
    result = _python(f"import eagle3_pipeline.{module}", ["dagster", *HEAVY])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring and len(docstring) > 10


def _decorates_with_dagster(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Import) and any(a.name == "dagster" for a in node.names) for node in ast.walk(tree))


def test_modules_with_dagster_have_real_annotations() -> None:
    with_dagster = [path for path in MODULES if _decorates_with_dagster(ast.parse(path.read_text()))]
    assert len(with_dagster) > 3
    for path in with_dagster:
        assert "from __future__ import annotations" not in path.read_text(), path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its settings."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PACKAGE, folder / "eagle3_pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def _tool(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"NOT TESTED: {name} is not installed beside this Python")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([path, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return _tool("lint-imports", "--no-cache", folder=folder)


def _ruff(folder: Path) -> subprocess.CompletedProcess[str]:
    return _tool("ruff", "check", "--no-cache", "eagle3_pipeline", folder=folder)


def _broken(checkout: Path, module: str, line: str, check: Callable[[Path], subprocess.CompletedProcess[str]]) -> str:
    """Adds a line to a module, and returns what the check says to that."""
    path = checkout / "eagle3_pipeline" / module
    original = path.read_text()
    path.write_text(f"{original}\n{line}\n")
    try:
        result = check(checkout)
    finally:
        path.write_text(original)
    assert result.returncode != 0, result.stdout
    return result.stdout


def test_the_untouched_package_keeps_all_contracts(checkout: Path) -> None:
    for result in (_lint_imports(checkout), _ruff(checkout)):
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "expected"),
    [
        ("store/atomic.py", "import dagster", "Only assets, definitions and cli know Dagster BROKEN"),
        ("store/atomic.py", "import eagle3_pipeline.data.vocab", "Dependencies point down BROKEN"),
        ("data/vocab.py", "import eagle3_pipeline.engine.spec", "Dependencies point down BROKEN"),
        ("stages/identity.py", "import eagle3_pipeline.assets.common", "Dependencies point down BROKEN"),
        ("config/fields.py", "import eagle3_pipeline.store.atomic", "Dependencies point down BROKEN"),
    ],
)
def test_an_import_that_points_up_breaks_a_contract(checkout: Path, module: str, line: str, expected: str) -> None:
    assert expected in _broken(checkout, module, line, _lint_imports)


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("store/atomic.py", "import dagster", "TID251"),
        ("planning/planner.py", "import torch", "TID253"),
        ("data/vocab.py", "from transformers import AutoConfig", "TID253"),
        ("assets/common.py", "import vllm", "TID253"),
    ],
)
def test_ruff_refuses_banned_imports(checkout: Path, module: str, line: str, rule: str) -> None:
    assert rule in _broken(checkout, module, line, _ruff)
