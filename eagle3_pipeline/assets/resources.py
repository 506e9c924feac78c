"""Dagster resources. None loads a model: engines open lazily, after the cache check."""

from pathlib import Path

import dagster as dg

from eagle3_pipeline.config import project_home


class PipelineHome(dg.ConfigurableResource):
    """The folder of store, engines and devices; empty: `EAGLE3_HOME`."""

    home: str = ""

    def path(self) -> Path:
        """The folder."""
        return Path(self.home) if self.home else project_home()
