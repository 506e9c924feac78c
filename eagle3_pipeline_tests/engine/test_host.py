"""The host's side of a connection."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from eagle3_pipeline.engine.host import Host
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline_tests.engine.conftest import engine_spec
from eagle3_pipeline_tests.fake_engine import FakeBackend


@pytest.mark.parametrize("operation", ["info", "unknown", "generate"])
def test_a_client_that_left_before_its_answer_is_a_lost_connection(tmp_path: Path, operation: str) -> None:
    async def run() -> None:
        server = await asyncio.start_unix_server(lambda *_: None, str(tmp_path / "socket"))
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.close()
        await asyncio.sleep(0.05)
        host = Host(engine_spec(), FakeBackend(), EngineState(tmp_path))
        try:
            # A reader that never ends: whether the client is there is seen when it is answered.
            await host._request({"op": operation}, asyncio.StreamReader(), writer)
        finally:
            server.close()

    with pytest.raises(ConnectionError, match="disconnected"):
        uvloop.run(run())
