"""What the benchmark of one GPU measures, and what its table of training adds up."""

import pytest

from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import LARGE, ON_CPU, ON_GPU, SMALL, Sizes


@pytest.mark.parametrize("sizes", [ON_CPU, ON_GPU], ids=["rehearsal", "gpu"])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_one_shape_leaves_something_of_every_part(sizes: Sizes, shape: str) -> None:
    only = sizes.only([shape])
    assert [training.name for training in only.trainings] == [shape]
    assert (bool(only.small_loads), bool(only.large_loads)) == (shape == SMALL, shape == LARGE)


def test_a_load_fits_the_smallest_disk_it_was_made_for() -> None:
    """bf16 states of four layers; sequences are a fifth longer than the mean at most."""
    row_bytes = 4 * ON_GPU.large.hidden * 2
    for load in ON_GPU.large_loads:
        assert 1.2 * load.num_sequences * load.mean_tokens * row_bytes < 60 * 2**30


def test_fetching_a_batch_does_not_count_its_way_to_the_device_twice() -> None:
    pytest.importorskip("speculators")
    from eagle3_pipeline_tests.benchmarks.one_gpu.training import _part

    told = {"fetch_ms": 10.25, "h2d_ms": 5.0, "fwd_ms": 50.0}
    assert [_part(told, name) for name in told] == [5.25, 5.0, 50.0]
