"""Measurements; nothing here asserts on speed."""

# Engines that are no vLLM are imported in processes that these start.
import eagle3_pipeline_tests.conftest  # noqa: F401
