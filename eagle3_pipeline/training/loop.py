"""Job "train": the training loop.

Everything that varies lives in `Progress`, the parameters and the optimizers, so a resume state is those three and the
log. Order, noise and learning rate are functions of (seed, epoch, batch, step); nothing draws from a global generator
after the draft is built.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from speculators.losses import LossConfig, resolve_loss_config

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.acceptance import AcceptanceMeter
from eagle3_pipeline.training.curves import CURVES_NAME, draw_curves
from eagle3_pipeline.training.dataset import Batch, HiddenStateDataset, PackedBatches
from eagle3_pipeline.training.export import check_export, export_draft
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.metrics import MetricsLog
from eagle3_pipeline.training.noise import add_noise
from eagle3_pipeline.training.optim import learning_rate, make_optimizers, set_learning_rate
from eagle3_pipeline.training.prepare import Bench, Emit, peak_memory_bytes, prepare
from eagle3_pipeline.training.resume import ResumeStore
from eagle3_pipeline.training.split import validation_conversations


@dataclass
class Progress:
    """Where a run is: the next epoch and batch, what it counted, and the best epoch so far (0: none)."""

    epoch: int = 1
    batch: int = 0
    batches: int = 0
    step: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    tokens: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    best_epoch: int = 0
    # Metrics of epoch 0 (before the first step) and of each finished epoch.
    history: list[dict[str, float]] = field(default_factory=list)


def supervised_mask(batch: Batch, ttt_steps: int) -> torch.Tensor:
    """The loss mask [1, S] for training.

    At TTT step i speculators pairs the target at position p with the logits of position p-i of the packed row. For the
    first i positions of a sequence those belong to the sequence packed before it, so positions below `ttt_steps` - 1
    are not supervised; in a chat they are template tokens anyway.
    """
    return batch["loss_mask"].bool() & (batch["position_ids"] >= ttt_steps)


class Trainer:
    """One training run."""

    def __init__(self, job: Job, emit: Emit) -> None:
        self.job, self.spec, self.emit = job, job.training, emit
        self.bench: Bench = prepare(job, emit)
        self.model, self.device = self.bench.model, self.bench.device
        self.resume = ResumeStore(job.output, job.fingerprint)
        self.progress, self.log = Progress(), MetricsLog()
        self._split()
        self.batches = PackedBatches(self.train_set.num_positions, self.spec.batch_tokens, self.spec.seed)
        self.batches_of = [len(self.batches.of_epoch(e)) for e in range(1, self.spec.epochs + 1)]
        self.total_steps = sum(math.ceil(n / self.spec.accumulate) for n in self.batches_of)
        self.train_loader = self.bench.loader(self.train_set, self.batches)
        self.optimizers = make_optimizers(self.model, self.spec)
        self.loss_config: LossConfig = resolve_loss_config("kl_div", "eager")
        self._choices: list[torch.Tensor] = []
        self._last_save = self._last_report = time.monotonic()

    def _split(self) -> None:
        ids, spec = self.bench.table.conversation_ids, self.spec
        held_out = validation_conversations(ids, spec.validation_fraction, spec.min_validation_samples)
        self.train_set, self.val_set = (
            HiddenStateDataset(self.bench.table, [i for i, c in enumerate(ids) if (c in held_out) is validates])
            for validates in (False, True)
        )
        for name, part in (("training", self.train_set), ("validation", self.val_set)):
            if not part.num_supervised:
                raise TrainingError(
                    f"0 supervised tokens in the {len(part)} {name} sequences: every loss mask is empty there; check "
                    f"how the chat template marks answers"
                )
        self.val_loader = self.bench.fixed_loader(self.val_set.indices)

    def run(self) -> dict[str, Any]:
        """Trains, exports the best epoch and returns the `result` event's fields."""
        self._probe()
        if not self._restore():
            self._validate(0)
        while not self._finished():
            self._train_epoch()
        stopped_early = len(self.progress.history) - 1 < self.spec.epochs
        self._export()
        return {"metrics": self._summary(), "stopped_early": stopped_early}

    def _finished(self) -> bool:
        done, best = len(self.progress.history) - 1, self.progress.best_epoch
        return done >= self.spec.epochs or bool(self.spec.patience and best and done - best >= self.spec.patience)

    def _train_epoch(self) -> None:
        progress = self.progress
        self.model.train()
        self.batches.select(progress.epoch, progress.batch)
        for group in self._groups():
            self._step(group)
            now = time.monotonic()
            if now - self._last_report >= self.spec.log_every_s:
                self._report(now)
            if now - self._last_save >= self.job.resume_every_s:
                self._save()
        train_loss = progress.loss_sum / max(progress.loss_tokens, 1)
        self._validate(progress.epoch, train_loss)
        progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.loss_sum, progress.loss_tokens = 0.0, 0
        self._save()

    def _groups(self) -> Iterator[list[Batch]]:
        """Batches of one optimizer step each; counts the time that waiting for data takes."""
        batches = iter(self.train_loader)
        while True:
            started = time.monotonic()
            group = [batch for _, batch in zip(range(self.spec.accumulate), batches, strict=False)]
            waited = time.monotonic() - started
            if not group:
                return
            yield group
            self.progress.wait_s += waited
            self.progress.train_s += time.monotonic() - started

    def _step(self, group: list[Batch]) -> None:
        progress, spec = self.progress, self.spec
        masks = [supervised_mask(batch, spec.ttt_steps) for batch in group]
        counts = [int(mask.sum()) for mask in masks]
        losses: dict[str, float] = {}
        for cpu_batch, mask, count in zip(group, masks, counts, strict=True):
            batch = self.bench.to_device({**cpu_batch, "loss_mask": mask})
            batch["hidden_states"] = add_noise(batch["hidden_states"], spec.noise, spec.seed, progress.batches)
            loss, metrics = self._loss(batch)
            # Each supervised token weighs the same, however the step's tokens fall into batches.
            share = count / max(sum(counts), 1)
            (loss * share).backward()
            for name, value in metrics.items():
                losses[name] = losses.get(name, 0.0) + value * share
            progress.batch, progress.batches = progress.batch + 1, progress.batches + 1
            progress.tokens += int((cpu_batch["document_ids"] >= 0).sum())
        if not math.isfinite(losses["loss"]):
            raise TrainingError(f"the loss became {losses['loss']} at step {progress.step + 1}; lower training.lr")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), spec.max_grad_norm)
        rate = learning_rate(spec, progress.step, self.total_steps)
        set_learning_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.step += 1
        progress.loss_sum += losses["loss"] * sum(counts)
        progress.loss_tokens += sum(counts)
        self.log.add("step", progress.step, progress.epoch, "train", {**losses, "lr": rate, "grad_norm": float(norm)})

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics, _ = self._forward(batch)
        return loss, metrics

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float], list[torch.Tensor]]:
        """Loss, its value and that of each TTT step, and the drafted tokens."""
        steps = self.spec.ttt_steps
        with torch.autocast(self.device.type, torch.bfloat16):
            draft_tokens, loss, metrics = self.model(
                **batch,
                ttt_steps=steps,
                ttt_step_loss_decay=self.spec.ttt_loss_decay,
                loss_config=self.loss_config,
            )
        values = {f"loss_{i}": float(metrics[f"loss_{i}_sum"]) for i in range(steps)}
        return loss, {"loss": float(loss.detach()), **values}, draft_tokens

    @torch.no_grad()
    def _validate(self, epoch: int, train_loss: float | None = None) -> None:
        """Measures an epoch, logs it, and keeps the weights if it is the best so far."""
        self.model.eval()
        meter, sums, tokens = AcceptanceMeter(self.spec.ttt_steps), dict[str, float](), 0
        choose = None if self._choices else self.bench.verifier_choice()
        for number, cpu_batch in enumerate(self.val_loader):
            batch = self.bench.to_device(cpu_batch)
            if choose:
                # The verifier's choices do not depend on the draft: computed once.
                self._choices.append(choose(batch).to("cpu"))
            mask = supervised_mask(batch, self.spec.ttt_steps)
            _, losses, draft_tokens = self._forward({**batch, "loss_mask": mask})
            meter.add(draft_tokens, self._choices[number].to(self.device), batch)
            count = int(mask.sum())
            tokens += count
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value * count
        accuracies = meter.result()
        values = {name: value / max(tokens, 1) for name, value in sums.items()}
        values |= {f"full_acc_{i}": v for i, v in enumerate(accuracies["full_acc"])}
        values |= {f"conditional_acc_{i}": v for i, v in enumerate(accuracies["conditional_acc"])}
        values["acceptance_length"] = meter.acceptance_length
        values["outside_draft_vocab_share"] = meter.outside_draft_vocab_share
        self._record_epoch(epoch, values, train_loss)

    def _record_epoch(self, epoch: int, values: dict[str, float], train_loss: float | None) -> None:
        progress = self.progress
        metrics = {f"val_{name}": value for name, value in values.items()}
        self.log.add("epoch", progress.step, epoch, "val", values)
        if train_loss is not None:
            metrics["train_loss"] = train_loss
            self.log.add("epoch", progress.step, epoch, "train", {"loss": train_loss, **self._speed()})
        progress.history.append(metrics)
        if epoch and (not progress.best_epoch or _rank(metrics) > _rank(progress.history[progress.best_epoch])):
            progress.best_epoch = epoch
            self.resume.save_best(epoch, self._trained())
        self.emit("epoch", epoch=epoch, step=progress.step, best_epoch=progress.best_epoch, **metrics)

    def _speed(self) -> dict[str, float]:
        p, elapsed = self.progress, max(self.progress.train_s, 1e-9)
        return {
            "tokens_per_s": p.tokens / elapsed,
            "data_wait_share": p.wait_s / elapsed,
            "peak_memory_bytes": float(peak_memory_bytes(self.device)),
        }

    def _report(self, now: float) -> None:
        self._last_report = now
        p = self.progress
        in_epoch = math.ceil(self.batches_of[p.epoch - 1] / self.spec.accumulate)
        step = math.ceil(p.batch / self.spec.accumulate)
        speed = self._speed()["tokens_per_s"]
        seconds = p.train_s / max(p.batches, 1) * (sum(self.batches_of) - p.batches)
        self.emit(
            "progress",
            message=f"epoch {p.epoch}/{self.spec.epochs} step {step}/{in_epoch} "
            f"loss {p.loss_sum / max(p.loss_tokens, 1):.3f} "
            f"acceptance length {p.history[-1]['val_acceptance_length']:.2f} "
            f"{speed:.0f} tok/s ETA {math.ceil(seconds / 60)} min",
        )

    def _trained(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().cpu() for n, p in self.model.named_parameters() if p.requires_grad}

    def _save(self) -> None:
        rows = torch.frombuffer(bytearray(self.log.to_bytes()), dtype=torch.uint8)
        self.resume.save(
            {
                "progress": asdict(self.progress),
                "model": self._trained(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "rng": torch.get_rng_state(),
                "metrics": rows,
            }
        )
        self._last_save = time.monotonic()

    def _restore(self) -> bool:
        state = self.resume.load()
        if state is None:
            return False
        self.progress = Progress(**state["progress"])
        self.log = MetricsLog(state["metrics"].numpy().tobytes())
        self.model.load_state_dict(state["model"], strict=False)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])
        self.emit("log", message=f"resumed at epoch {self.progress.epoch}, step {self.progress.step}")
        return True

    def _probe(self) -> None:
        """One step on the batch with the most tokens, before anything is paid for: does it fit, and which loss works?

        Raises:
            TrainingError: it does not fit the memory; the message names the settings to lower.
        """
        sizes = self.train_set.num_positions
        largest = max(self.batches.of_epoch(1), key=lambda batch: int(sizes[batch].sum()))
        batch = self.bench.to_device(self.train_loader.collate_fn([self.train_set[i] for i in largest]))
        num_tokens = int(sizes[largest].sum())
        try:
            if not self._fused_loss_works(batch):
                self._loss(batch)[0].backward()
            self._require_optimizer_memory()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise TrainingError(
                f"one training step on the largest packed batch ({num_tokens:,} tokens) does not fit the memory of "
                f"{self.device}: {str(error).splitlines()[0]}; lower training.batch_tokens (now "
                f"{self.spec.batch_tokens:,}, at least the longest sequence) or training.ttt_steps"
            ) from error
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        peak = peak_memory_bytes(self.device) / 2**30
        self.emit(
            "log", message=f"a step on the largest batch ({num_tokens:,} tokens) fits: peak memory {peak:.1f} GiB"
        )

    def _fused_loss_works(self, batch: Batch) -> bool:
        """Tries speculators' fused loss on a GPU; keeps to the eager one where its kernel does not compile."""
        if self.device.type != "cuda":
            return False
        self.loss_config = resolve_loss_config("kl_div", "fused")
        try:
            self._loss(batch)[0].backward()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the kernel's compiler raises
            self.loss_config = resolve_loss_config("kl_div", "eager")
            reason = str(error).splitlines()[:1]
            message = f"fused loss does not work here ({type(error).__name__}: {reason}); using eager"
            self.emit("log", message=message)
            return False
        return True

    def _require_optimizer_memory(self) -> None:
        """The first step adds the optimizers' moments, at most two float32 values a parameter."""
        if self.device.type != "cuda":
            return
        needed = 8 * sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + reserved
        if needed > free:
            raise MemoryError(f"the optimizer needs {needed:,} bytes more, {free:,} are free")

    def _export(self) -> None:
        best = self.progress.best_epoch
        self.model.load_state_dict(self.resume.load_best(best), strict=False)
        self.log.write(self.job.output)
        draw_curves(self.log.table().to_pylist(), self.job.output / CURVES_NAME)
        self.num_trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        layers = self.model.config.transformer_layer_config
        export_draft(self.model, self.job.output)
        check_export(self.job.output, self.job, layers, self.bench.vocab_map)
        self.resume.remove()

    def _summary(self) -> dict[str, float]:
        p = self.progress
        best = p.history[p.best_epoch]
        return {
            "epochs": len(p.history) - 1,
            "steps": p.step,
            "num_tokens": int(self.bench.table.num_rows.sum()) + len(self.bench.table.num_rows),
            "best_epoch": p.best_epoch,
            **best,
            "outside_draft_vocab_share": best["val_outside_draft_vocab_share"],
            "initial_val_acceptance_length": p.history[0]["val_acceptance_length"],
            "supervised_tokens_train": self.train_set.num_supervised,
            "supervised_tokens_val": self.val_set.num_supervised,
            "sequences_train": len(self.train_set),
            "sequences_val": len(self.val_set),
            "trainable_parameters": self.num_trained,
            **self._speed(),
        }


def _rank(metrics: dict[str, float]) -> tuple[float, float]:
    """Orders epochs: by acceptance length, then by loss."""
    return metrics["val_acceptance_length"], -metrics["val_loss"]


def train(job: Job, emit: Emit) -> dict[str, Any]:
    """Runs the job; see `Trainer.run`.

    Raises:
        TrainingError: an input is wrong, the loss diverged, or the exported draft is not what vLLM loads.
    """
    return Trainer(job, emit).run()
