"""Jobs for people: the partitioned half of the graph, and the unpartitioned tail."""

from typing import Any

import dagster as dg

from eagle3_pipeline.assets.common import PIPELINE_TAG, SPEC_TAG, asset_key
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages import identity as ids

RESOLVE_VERIFIER = "resolve_verifier"
PREPARE_DATA = "prepare_data"
GENERATE_AND_CAPTURE = "generate_and_capture"
MEASURE_BASELINE = "measure_baseline"
TRAIN_AND_EVALUATE = "train_and_evaluate"
UPDATE = "update"

JOB_STAGES = {
    RESOLVE_VERIFIER: (ids.VERIFIER,),
    PREPARE_DATA: (ids.DATASET,),
    GENERATE_AND_CAPTURE: (ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES),
    MEASURE_BASELINE: (ids.BASELINE,),
    TRAIN_AND_EVALUATE: (ids.VOCAB_MAP, ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION, ids.PUBLISHED_DRAFT),
    UPDATE: tuple(ids.FORMAT_VERSIONS),
}
_DESCRIPTIONS = {
    RESOLVE_VERIFIER: "Checks the verifier's files and identifies their content.",
    PREPARE_DATA: "Normalises the chunks that are selected.",
    GENERATE_AND_CAPTURE: "Answers the chunks' prompts with the verifier and captures its hidden states.",
    MEASURE_BASELINE: "Measures the verifier without a draft on the evaluation prompts.",
    TRAIN_AND_EVALUATE: "Vocabulary, training, evaluation and promotion over all chunks.",
    UPDATE: "What nightly_retrain and eagle3 materialize launch: any stages of one chunk, or of no chunk.",
}


def job_name(spec: PipelineSpec, job: str) -> str:
    """Name of a pipeline's job."""
    return f"{spec.name}__{job}"


def build_jobs(spec: PipelineSpec) -> list[Any]:
    """The jobs of a pipeline."""
    return [
        dg.define_asset_job(
            job_name(spec, job),
            selection=[asset_key(spec, stage) for stage in stages],
            description=_DESCRIPTIONS[job],
            tags={PIPELINE_TAG: spec.name, SPEC_TAG: spec.spec_hash()},
        )
        for job, stages in JOB_STAGES.items()
    ]
