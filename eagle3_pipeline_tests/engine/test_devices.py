"""Which GPUs a process may use, and that leases keep to them."""

from pathlib import Path

import pytest

from eagle3_pipeline.engine import lease
from eagle3_pipeline.engine.devices import choose_visible
from eagle3_pipeline.engine.lease import GpuPool
from eagle3_pipeline.errors import LeaseError

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("2,3", (2, 3)),
        (" 3 , 0 ", (3, 0)),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", (1,)),
        ("1,9,2", (1,)),
        ("2,2,3", (2,)),
        ("GPU-cc33,GPU-aa", (2, 0)),
        ("GPU-a", ()),
        ("MIG-cc33", ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(setting: str | None, expected: tuple[int, ...]) -> None:
    assert choose_visible(setting, UUIDS) == expected


def test_without_gpus_none_is_visible() -> None:
    assert choose_visible(None, []) == choose_visible("0", []) == ()


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "all_gpus", lambda: UUIDS)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("setting", ["", "junk", "9", "MIG-cc33"])
def test_gpus_that_are_hidden_from_a_process_are_never_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(lease, "visible_gpus", lambda: choose_visible(setting, UUIDS))
    pool = GpuPool(tmp_path, 2)
    with pytest.raises(LeaseError, match="pool has 0 .the driver knows 4"), pool.acquire(1, "one", 0.1, print):
        pass


@pytest.mark.usefixtures("four_gpus")
def test_a_pool_leases_the_gpus_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared host a scheduler hands out GPUs by the variable; the first ones may be another user's."""
    monkeypatch.setattr(lease, "visible_gpus", lambda: (5, 2))
    pool = GpuPool(tmp_path, 2)
    with pool.acquire(1, "one", 1.0, print) as first, pool.acquire(1, "other", 1.0, print) as second:
        assert first.environment()["CUDA_VISIBLE_DEVICES"] == "5"
        assert second.environment()["CUDA_VISIBLE_DEVICES"] == "2"
        assert set(pool.holders()) == {"gpu-5", "gpu-2"}
        # Another process that sees one of them waits for it, whatever its place in that process's list is.
        monkeypatch.setattr(lease, "visible_gpus", lambda: (2,))
        with (
            pytest.raises(LeaseError, match="gpu-2 is held by other"),
            GpuPool(tmp_path, 1).acquire(1, "x", 0.1, print),
        ):
            pass


@pytest.mark.usefixtures("four_gpus")
def test_a_pool_has_no_more_gpus_than_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "visible_gpus", lambda: (3,))
    with pytest.raises(LeaseError, match="pool has 1"), GpuPool(tmp_path, 8).acquire(2, "two", 1.0, print):
        pass
