"""Training on our shards against a plain loop over speculators' own data set (one file a sample): speed and memory.

The same draft (SmolLM2's geometry with a vocabulary of 8,192), the same random data, the same optimizer and loss.
"""

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_pipeline.config import DraftSpec, TrainingSpec
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.shards import Geometry, seal_shards
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import Trainer
from eagle3_pipeline.training.optim import make_optimizers
from eagle3_pipeline.training.prepare import prepare

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, AUX = 8192, 4096, 576, 4, (1, 2, 3)
NUM_SEQUENCES, LONGEST, BATCH_TOKENS, EPOCHS = 192, 220, 1024, 2
GEOMETRY = Geometry((*AUX, LAYERS), HIDDEN)


def run() -> dict[str, Any]:
    """Tokens/s, waiting for data, memory."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_verifier(folder)
        small = _write_data(folder, NUM_SEQUENCES)
        job = _job(folder, [small])
        return {**_ours(job), **_theirs(job, folder / f"theirs-{NUM_SEQUENCES}"), **_memory(folder, small)}


def _write_verifier(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "verifier")
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[: 2 * DRAFT_VOCAB : 2] = True
    d2t = torch.nonzero(t2d).flatten() - torch.arange(DRAFT_VOCAB)
    save_file({"t2d": t2d, "d2t": d2t}, folder / "vocab_map.safetensors")


def _write_data(folder: Path, num_sequences: int) -> dict[str, str]:
    """The same random sequences twice: as our shards, and as speculators' data set with a file a sample."""
    draw = np.random.default_rng(1)
    ours, theirs = folder / f"ours-{num_sequences}", folder / f"theirs-{num_sequences}"
    (theirs / "hidden_states").mkdir(parents=True)
    ours.mkdir()
    appender = ShardAppender(ours / "states", GEOMETRY, 2**30)
    rows, records, tokens = [], [], {}
    for number in range(num_sequences):
        ids = draw.integers(0, VOCAB, draw.integers(60, LONGEST)).astype(np.int32)
        mask = [i >= 20 for i in range(len(ids))]
        states = torch.randn(len(ids), len(AUX) + 1, HIDDEN).to(torch.bfloat16)
        name = f"s{number:06d}"
        rows.append({"sequence_id": name, "conversation_id": name, "input_ids": ids.tolist(), "loss_mask": mask})
        records.append(appender.append(name, memoryview(states[:-1].contiguous().view(torch.uint16).numpy())))
        tokens[name] = ids[:-1]
        path = theirs / "hidden_states" / f"hs_{number}.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.from_numpy(ids).long()}, path)
    appender.close()
    seal_shards(ours / "states", records, tokens, GEOMETRY, {})
    pq.write_table(pa.Table.from_pylist(rows), ours / "sequences.parquet")
    found = Dataset.from_list([{**row, "seq_len": len(row["input_ids"])} for row in rows])
    found.with_format("torch", columns=["input_ids", "loss_mask", "seq_len"]).save_to_disk(theirs / "data")
    (theirs / "hidden_states").rename(theirs / "data" / "hidden_states")
    return {"chunk": "0", "sequences": str(ours / "sequences.parquet"), "hidden_states": str(ours / "states")}


def _job(folder: Path, chunks: list[dict[str, str]]) -> Job:
    training = TrainingSpec(epochs=EPOCHS, batch_tokens=BATCH_TOKENS, validation_fraction=0.0, min_validation_samples=1)
    return Job.parse(
        {
            "job": "train",
            "verifier": {"path": str(folder / "verifier"), "trust_remote_code": False},
            "aux_layer_ids": list(AUX),
            "draft": DraftSpec().model_dump(mode="json"),
            "training": training.model_dump(mode="json"),
            "vocab_map": str(folder / "vocab_map.safetensors"),
            "chunks": chunks,
            "output": str(folder / "out"),
            "resume_every_s": 1e9,
        }
    )


def _quiet(_event: str, **_fields: Any) -> None: ...


def _ours(job: Job) -> dict[str, Any]:
    trainer = Trainer(job, _quiet)
    trainer.run()
    speed = trainer._speed()
    return {
        "ours: tokens/s": speed["tokens_per_s"],
        "ours: share of a step that waits for data (%)": 100 * speed["data_wait_share"],
    }


def _theirs(job: Job, folder: Path) -> dict[str, Any]:
    """A plain loop: their data set, sampler and collation, the same model, loss and optimizer."""
    bench = prepare(job, _quiet)
    dataset = ArrowDataset(BATCH_TOKENS, folder / "data", on_missing="raise")
    sampler = MultipackDistributedBatchSamplerV2(BATCH_TOKENS, np.array(dataset.approx_lengths), 1, 0, seed=0)
    collate = CollateFn(BATCH_TOKENS, HIDDEN, len(AUX), torch.bfloat16, shift_batch)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    optimizers = make_optimizers(bench.model, job.training)
    loss_config = resolve_loss_config("kl_div", "eager")
    tokens, waited, started = 0, 0.0, time.monotonic()
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in itertools.count():
            asked = time.monotonic()
            batch = next(batches, None)
            waited += time.monotonic() - asked
            if batch is None:
                break
            batch = {name: value for name, value in batch.items() if torch.is_tensor(value)}
            with torch.autocast("cpu", torch.bfloat16):
                _, loss, _ = bench.model(**batch, ttt_steps=job.training.ttt_steps, loss_config=loss_config)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bench.model.parameters(), job.training.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tokens += int((batch["document_ids"] >= 0).sum())
    elapsed = time.monotonic() - started
    return {
        "plain loop over ArrowDataset: tokens/s": tokens / elapsed,
        "plain loop: share of a step that waits for data (%)": 100 * waited / elapsed,
    }


def _anonymous_mib() -> float:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssAnon"].split()[0]) / 1024


def _memory(folder: Path, small: dict[str, str]) -> dict[str, Any]:
    """Anonymous memory of reading one epoch of the data, and of ten times as much."""
    found: dict[str, Any] = {}
    large = _write_data(folder, 10 * NUM_SEQUENCES)
    for name, chunk in (("the data", small), ("10 x the data", large)):
        bench = prepare(_job(folder, [chunk]), _quiet)
        loader = bench.fixed_loader(list(range(len(bench.table.shard))))
        before = _anonymous_mib()
        highest = max(_anonymous_mib() for _ in loader)
        found[f"anonymous memory that reading {name} adds (MiB)"] = highest - before
    return found
