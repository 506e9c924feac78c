"""The code location of one pipeline, with gates: what a run worker and its step processes load."""

from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline_tests.resume.gated import PIPELINE, install

install()
defs = build_definitions([find_pipeline(PIPELINE)])
