"""tools/setup_env.py: the machine checks, the stamp, and the ways to torch with a real pip and no network."""

import fcntl
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import setup_env
from tools.setup_env import Environment, SetupError

PYTHON = "{}.{}".format(*sys.version_info[:2])


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "level"),
    [
        (setup_env.check_python((3, 10)), "FAIL"),
        (setup_env.check_python((3, 11)), "ok"),
        (setup_env.check_python((3, 12)), "warn"),
        (setup_env.check_python((3, 13)), "FAIL"),
        (setup_env.check_venv_module(True), "ok"),
        (setup_env.check_venv_module(False), "FAIL"),
        (setup_env.check_platform("Linux", "x86_64"), "ok"),
        (setup_env.check_platform("Linux", "aarch64"), "FAIL"),
        (setup_env.check_platform("Darwin", "x86_64"), "FAIL"),
        (setup_env.check_cpu({"sse2", "avx2", "avx512f"}), "ok"),
        (setup_env.check_cpu({"sse2", "avx2"}), "warn"),
        (setup_env.check_cpu({"sse2", "avx"}), "FAIL"),
        (setup_env.check_cpu(set()), "FAIL"),
        (setup_env.check_memory(8_000_000_000), "ok"),
        (setup_env.check_memory(7_999_999_999), "warn"),
        (setup_env.check_memory(3_999_999_999), "FAIL"),
        (setup_env.check_disk(10_000_000_000), "ok"),
        (setup_env.check_disk(9_999_999_999), "warn"),
        (setup_env.check_disk(4_999_999_999), "FAIL"),
    ],
)
def test_levels(check: setup_env.Check, level: str) -> None:
    assert check.level == level


def test_a_good_line_says_found_and_needed_and_a_bad_one_what_to_do() -> None:
    assert str(setup_env.check_memory(9 * 10**9)) == ("ok    memory: found 9.0 GB, needed 4 GB (8 GB recommended)")
    assert str(setup_env.check_memory(2 * 10**9)) == (
        "FAIL  memory: found 2.0 GB, needed 4 GB (8 GB recommended), close programs or use a larger machine"
    )


def test_check_prints_a_line_per_requirement_and_builds_nothing() -> None:
    script = setup_env.ROOT / "tools" / "setup_env.py"
    result = subprocess.run([sys.executable, "-I", str(script), "--check"], capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    assert [line[6:].partition(":")[0] for line in lines] == [
        "platform", "Python", "venv module", "CPU", "memory", "disk"
    ]  # fmt: skip
    assert result.returncode == any(line.startswith("FAIL") for line in lines)


# --- the stamp ------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A checkout whose environment looks installed and current."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("numpy==2.3.5\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    environment = Environment(tmp_path)
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    environment.stamp.write_text(environment.wanted_stamp())
    return environment


def test_nothing_is_run_when_the_stamp_fits(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "build", lambda _: pytest.fail("built"))
    setup_env.ensure(environment)


@pytest.mark.parametrize("name", ["requirements/cpu.txt", "pyproject.toml"])
def test_a_changed_file_makes_it_outdated(environment: Environment, name: str) -> None:
    with open(environment.root / name, "a") as file:
        file.write("\n")
    assert not environment.is_current()
    assert environment.can_update()


def test_another_python_or_path_needs_a_new_environment(environment: Environment) -> None:
    for base in (f"3.10 {environment.folder}", f"{PYTHON} /elsewhere/.venv"):
        environment.stamp.write_text(f"{'0' * 64} {base}")
        assert not environment.is_current()
        assert not environment.can_update()


def test_an_environment_without_its_interpreter_is_not_current(environment: Environment) -> None:
    environment.python.unlink()
    assert not environment.is_current()
    assert not environment.can_update()


def fake_steps(monkeypatch: pytest.MonkeyPatch, fail_at: str | None = None) -> list[str]:
    """Replace the steps by a list of their titles; one of them may fail."""
    titles: list[str] = []

    def run_step(title: str, command: Sequence[str], log: Path) -> None:
        titles.append(title)
        if fail_at is not None and title.startswith(fail_at):
            raise SetupError(title)

    monkeypatch.setattr(setup_env, "run_step", run_step)
    return titles


def test_an_update_keeps_the_environment(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = fake_steps(monkeypatch)
    (environment.root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    setup_env.build(environment)
    assert not any(title.startswith("new environment") for title in titles)
    assert environment.is_current()


@pytest.mark.parametrize("step", ["pinned packages", "eagle3_pipeline", "import torch"])
def test_an_interrupted_set_up_starts_afresh(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    fake_steps(monkeypatch, fail_at=step)
    with pytest.raises(SetupError):
        setup_env.build(environment)
    assert not environment.is_current()

    titles = fake_steps(monkeypatch)
    setup_env.build(environment)
    assert titles[0] == "new environment .venv"
    assert environment.is_current()


def test_the_second_of_two_set_ups_waits_and_finds_the_work_done(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = environment.stamp.read_text()
    environment.stamp.unlink()
    with open(environment.root / ".venv.lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        program = (
            "import sys; from pathlib import Path; from tools import setup_env\n"
            "setup_env.build = lambda _: sys.exit('built twice')\n"
            "setup_env.ensure(setup_env.Environment(Path(sys.argv[1])))\n"
        )
        second = subprocess.Popen(
            [sys.executable, "-c", program, str(environment.root)],
            cwd=setup_env.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert second.stdout is not None
        assert second.stdout.readline() == "another set-up is running, waiting for it\n"
        environment.stamp.write_text(stamp)
    assert second.communicate(timeout=20) == ("", None)
    assert second.returncode == 0


# --- steps ----------------------------------------------------------------------------------------


def test_a_failed_step_shows_the_tail_of_its_output_without_noise(tmp_path: Path) -> None:
    program = (
        "print('early'); [print('line', n) for n in range(20)]\n"
        "print('WARNING: Location is ignored'); print('ERROR: no such package'); raise SystemExit(3)"
    )
    with pytest.raises(SetupError) as caught:
        setup_env.run_step("packages", [sys.executable, "-c", program], tmp_path / "log")
    message = str(caught.value)
    assert message.startswith("packages failed (exit status 3):\n")
    assert message.endswith("    ERROR: no such package")
    assert "WARNING" not in message
    assert "early" not in message


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_to_work", [1, 2, 3])
def test_ways_are_tried_in_order_until_one_works(first_to_work: int, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[Sequence[str]] = []

    def run(title: str, arguments: Sequence[str]) -> None:
        tried.append(arguments)
        if len(tried) < first_to_work:
            raise SetupError(title)

    way = setup_env.install_torch(run)
    assert way is setup_env.TORCH_WAYS[first_to_work - 1]
    assert f"torch comes from way {first_to_work}" in capsys.readouterr().out
    expected = [
        ["--no-deps", "torch==2.13.0+cpu"],
        ["--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu"],
        ["torch==2.13.0"],
    ]
    assert [list(arguments)[-len(end) :] for arguments, end in zip(tried, expected, strict=False)] == (
        expected[:first_to_work]
    )
    assert "--no-deps" not in setup_env.TORCH_WAYS[2].arguments


@pytest.fixture(scope="module")
def venv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a throw-away environment with pip."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def run(venv_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "setup_env.Run":
    """Runs Python in that environment, which has no torch and where pip knows no index and no wheels."""
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    uninstall = [venv_python, "-m", "pip", "uninstall", "--yes", "--quiet", "torch"]
    subprocess.run(uninstall, check=True, stderr=subprocess.DEVNULL)

    def run_in_venv(title: str, arguments: Sequence[str]) -> None:
        setup_env.run_step(title, [venv_python, *arguments], tmp_path / "log")

    return run_in_venv


def write_wheel(folder: Path, version: str) -> None:
    """Write a wheel of a torch that consists of its version."""
    info = f"torch-{version}.dist-info"
    files = {
        "torch/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = [*files, f"{info}/RECORD"]
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in names)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def test_without_any_source_the_error_names_the_three_ways(run: "setup_env.Run") -> None:
    start = time.monotonic()
    with pytest.raises(SetupError) as caught:
        setup_env.install_torch(run)
    message = str(caught.value)
    assert message.startswith("none of the 3 ways to install torch 2.13.0 worked:\n")
    assert [message.count(f"way {number}: ") for number in (1, 2, 3)] == [1, 1, 1]
    assert message.count("No matching distribution found for torch==2.13.0+cpu") == 2
    assert "PIP_FIND_LINKS" in message
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(("version", "expected_way"), [("2.13.0+cpu", 1), ("2.13.0", 3)])
def test_the_wheel_that_is_offered_decides_the_way(
    run: "setup_env.Run", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, expected_way: int
) -> None:
    write_wheel(tmp_path, version)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert setup_env.install_torch(run) is setup_env.TORCH_WAYS[expected_way - 1]
    setup_env.verify(run)
    assert (tmp_path / "log").read_text() == f"{version}\n"


def test_a_torchvision_beside_torch_is_refused(run: "setup_env.Run", tmp_path: Path) -> None:
    for name in ("torch", "torchvision"):
        (tmp_path / f"{name}.py").write_text("__version__ = '0'\n")

    def run_here(title: str, arguments: Sequence[str]) -> None:
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{arguments[1]}"
        run(title, ["-c", program])

    with pytest.raises(SetupError, match=r"pip uninstall \['torchvision'\]"):
        setup_env.verify(run_here)
