"""Job "simulate": teacher-forces a draft over whole sequences and measures what verification would accept."""

import time
from typing import Any

import torch

from eagle3_pipeline.training.acceptance import AcceptanceMeter
from eagle3_pipeline.training.export import check_export
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.prefetch import read_ahead
from eagle3_pipeline.training.prepare import Emit, prepare


@torch.no_grad()
def simulate(job: Job, emit: Emit) -> dict[str, Any]:
    """Runs the job.

    Returns:
        full_acc and conditional_acc (one float a step), acceptance_length, served_acceptance_length (at the positions
        at which serving drafts), num_positions, outside_draft_vocab_share, tokens_per_s (positions of all sequences
        over the time of the pass).

    Raises:
        TrainingError: an input is wrong, or there is no position to measure.
    """
    bench = prepare(job, emit)
    if job.checkpoint:
        check_export(job.checkpoint, job, bench.model.config.transformer_layer_config, bench.vocab_map)
    model = bench.model.eval()
    loader = bench.fixed_loader(list(range(len(bench.table.shard))))
    choose = bench.verifier_choice()
    meter = AcceptanceMeter(job.num_steps)
    started, num_tokens = time.monotonic(), 0
    for cpu_batch in read_ahead(loader):
        batch = bench.to_device(cpu_batch)
        with torch.autocast(bench.device.type, torch.bfloat16):
            draft_tokens = model(
                hidden_states=batch["hidden_states"],
                input_ids=batch["input_ids"],
                document_ids=batch["document_ids"],
                position_ids=batch["position_ids"],
                ttt_steps=job.num_steps,
            )
        meter.add(draft_tokens, choose(batch), batch)
        num_tokens += int((batch["document_ids"] >= 0).sum())
    return {
        **meter.result(),
        "acceptance_length": meter.acceptance_length,
        "served_acceptance_length": meter.served_acceptance_length,
        "num_positions": meter.num_positions,
        "outside_draft_vocab_share": meter.outside_draft_vocab_share,
        "tokens_per_s": num_tokens / (time.monotonic() - started),
    }
