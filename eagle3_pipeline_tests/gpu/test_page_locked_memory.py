"""Page-locked memory, to which a GPU copies, is written past the page cache."""

from pathlib import Path

import pytest
import torch

from eagle3_pipeline.engine.devices import count_gpus
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.records import intact_records
from eagle3_pipeline.store.shards import Geometry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not count_gpus(), reason="no NVIDIA GPU on this machine")]
_GEOMETRY = Geometry((2, 15, 27, 30), 576)


def test_states_are_written_past_the_page_cache(tmp_path: Path) -> None:
    states = torch.randn(14_000, 4, 576, device="cuda").to(torch.bfloat16)
    memory = torch.empty_like(states, device="cpu", pin_memory=True)
    memory.copy_(states)
    appender = ShardAppender(tmp_path, _GEOMETRY, 2**30)
    if not appender._may_be_direct:
        pytest.skip("this machine writes through the page cache only")
    record = appender.append("s", memoryview(memory.view(torch.int16).numpy()))
    assert appender._may_be_direct, "the engine's log says why not"
    assert intact_records(tmp_path, _GEOMETRY) == {"s": record}
