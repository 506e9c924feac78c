"""Dagster resources. None loads a model: engines open lazily, after the cache check."""

from pathlib import Path

import dagster as dg

from eagle3_pipeline.config import project_home


class PipelineHome(dg.ConfigurableResource):
    """The folder of store, engines and devices. An empty `home` is `EAGLE3_HOME`."""

    home: str = ""

    def path(self) -> Path:
        """The folder."""
        return Path(self.home) if self.home else project_home()


class GpuPool(dg.ConfigurableResource):
    """The GPUs of this machine, shared by all pipelines: engines and trainings lease whole ones.

    The reference deployment has 8. Without a number it is what the pipeline file says, else what the driver reports.
    On a machine without GPUs there is one CPU slot.
    """

    num_gpus: int | None = None
