"""Job "train": the training loop.

Everything that varies lives in `Progress`, the parameters and the optimizers, so a resume state is those three and the
log. Order, noise and learning rate are functions of (seed, epoch, batch, step); nothing draws from a global generator
after the draft is built.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.acceptance import AcceptanceMeter
from eagle3_pipeline.training.curves import CURVES_NAME, draw_curves
from eagle3_pipeline.training.dataset import Batch, HiddenStateDataset, PackedBatches
from eagle3_pipeline.training.draft_model import resolve_device
from eagle3_pipeline.training.export import check_export, export_draft
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.metrics import MetricsLog
from eagle3_pipeline.training.noise import add_noise
from eagle3_pipeline.training.optim import learning_rate, make_optimizers, set_learning_rate
from eagle3_pipeline.training.prefetch import Fetched, Mover, Moving, read_ahead
from eagle3_pipeline.training.prepare import Bench, Emit, peak_memory_bytes, prepare
from eagle3_pipeline.training.probe import probe_step
from eagle3_pipeline.training.progress import (
    Group,
    Progress,
    Taken,
    only_supervised,
    supervised_mask,
    with_all_targets,
)
from eagle3_pipeline.training.ranks import Ranks
from eagle3_pipeline.training.resume import ResumeStore
from eagle3_pipeline.training.split import validation_conversations
from eagle3_pipeline.training.unroll import Unrolled, forwards

LAST = "last"


class Trainer:
    """One training run; with several ranks, one of them."""

    def __init__(self, job: Job, emit: Emit) -> None:
        self.job, self.spec = job, job.training
        self.ranks = Ranks.join(resolve_device(job))
        self.emit: Emit = emit if self.ranks.is_first else _say_nothing
        self.bench: Bench = prepare(job, self.emit)
        self.model, self.device = self.bench.model, self.bench.device
        self.mover = Mover(self.device)
        self.resume = ResumeStore(job.output, job.fingerprint)
        self.progress, self.log = Progress(), MetricsLog()
        self._split()
        self.batches = PackedBatches(self.train_set.num_positions, self.spec.batch_tokens, self.spec.seed)
        self.batches_of = [len(self.batches.of_epoch(e)) for e in range(1, self.spec.epochs + 1)]
        self.total_steps = sum(math.ceil(n / self.spec.accumulate) for n in self.batches_of)
        # Of each sample; see `supervised_mask`.
        self._supervised = self.bench.table.num_supervised(max(1, self.spec.ttt_steps))[self.train_set.indices]
        self._positions = self.train_set.num_positions
        self.train_loader = self.bench.loader(self.train_set, self.batches)
        self.optimizers = make_optimizers(self.model, self.spec)
        self.forwards = forwards(self.model, self.spec.ttt_steps, self.spec.ttt_loss_decay)
        self.forward = next(iter(self.forwards.values()))
        self._unsettled: Taken | None = None
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
        """Trains, exports the best epoch and returns the `result` event's fields; nothing on other ranks."""
        probe_step(self)
        if not self._restore():
            self._validate(0)
        while not self._finished():
            self._train_epoch()
        stopped_early = len(self.progress.history) - 1 < self.spec.epochs
        if not self.ranks.is_first:
            return {}
        self._export()
        return {"metrics": self._summary(), "stopped_early": stopped_early}

    def _finished(self) -> bool:
        done, best = len(self.progress.history) - 1, self.progress.best_epoch
        return done >= self.spec.epochs or bool(self.spec.patience and best and done - best >= self.spec.patience)

    def _train_epoch(self) -> None:
        progress = self.progress
        self.model.train()
        for group in self._groups():
            self._step(group)
            now = time.monotonic()
            progress.train_s += now - group.started
            if now - self._last_report >= self.spec.log_every_s:
                self._report(now)
            if now - self._last_save >= self.job.resume_every_s:
                self._save()
        self._settle()
        train_loss = progress.loss_sum / max(progress.loss_tokens, 1)
        self._validate(progress.epoch, train_loss)
        progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.loss_sum, progress.loss_tokens = 0.0, 0
        self._save()

    def _groups(self) -> Iterator[Group]:
        """This rank's part of each optimizer step; counts the time that waiting for data takes."""
        samples = self.batches.of_epoch(self.progress.epoch)
        counts = [(self._supervised[batch].sum(), self._positions[batch].sum()) for batch in samples]
        starts = range(self.progress.batch, len(counts), self.spec.accumulate)
        # All ranks know the whole step, and need not ask each other.
        steps = [counts[start : start + self.spec.accumulate] for start in starts]
        dealt = [self.ranks.deal(len(step)) for step in steps]
        mine = [start + i for start, numbers in zip(starts, dealt, strict=True) for i in numbers]
        self.batches.select([samples[number] for number in mine])
        # A step's batches are on the device one after the other.
        moves = max(map(len, dealt), default=0) <= 1
        batches = read_ahead(map(partial(self._ready, moves=moves), self.train_loader))
        for step, numbers in zip(steps, dealt, strict=True):
            started = time.monotonic()
            ready = [next(batches) for _ in numbers]
            self.progress.wait_s += time.monotonic() - started
            num_supervised, num_positions = (int(sum(column)) for column in zip(*step, strict=True))
            own = [int(step[i][0]) for i in numbers]
            yield Group(len(step), num_supervised, num_positions, numbers, own, ready, started)

    def _ready(self, batch: Batch, moves: bool) -> Batch | Moving:
        """A batch with what can be done ahead; runs beside a step."""
        batch = only_supervised(batch, self.spec.ttt_steps, self.bench.targets_multiple)
        return self.mover.start(batch) if moves else batch

    def _step(self, group: Group) -> None:
        progress, spec = self.progress, self.spec
        totals = self._no_losses()
        for number, ready, supervised in zip(group.numbers, group.batches, group.supervised, strict=True):
            batch = (ready if isinstance(ready, Moving) else self.mover.start(ready)).wait()
            batch["hidden_states"] = add_noise(batch["hidden_states"], spec.noise, spec.seed, progress.batches + number)
            loss, losses = self.loss(batch)
            # Each supervised token weighs the same, however the step's tokens fall into batches and ranks.
            share = supervised / max(group.num_supervised, 1)
            (loss * share).backward()
            totals += losses * share
        norm, rate = self._update()
        self.ranks.add_up(totals)
        progress.batch, progress.batches = progress.batch + group.num_batches, progress.batches + group.num_batches
        progress.tokens += group.num_positions
        progress.step += 1
        self._settle()
        results = Fetched.start(torch.cat([totals, norm[None].double()]))
        self._unsettled = Taken(progress.step, progress.epoch, group.num_supervised, rate, results)

    def _settle(self) -> None:
        """Counts and logs the last step taken, if it is not yet.

        That waits for the device; one step later, the device works on the next meanwhile. A step that diverged ends the
        run before anything of it is kept.
        """
        if (taken := self._unsettled) is None:
            return
        self._unsettled = None
        *losses, norm = taken.results.wait()
        values = self._named(losses)
        if not math.isfinite(values["loss"]):
            raise TrainingError(f"the loss became {values['loss']} at step {taken.step}; lower training.lr")
        self.progress.loss_sum += values["loss"] * taken.num_supervised
        self.progress.loss_tokens += taken.num_supervised
        self.log.add("step", taken.step, taken.epoch, "train", {**values, "lr": taken.rate, "grad_norm": norm})

    def _update(self) -> tuple[torch.Tensor, float]:
        """An optimizer step on the gradients that are there; the gradients' norm before clipping, the rate."""
        self.ranks.add_gradients(self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.max_grad_norm)
        rate = learning_rate(self.spec, self.progress.step, self.total_steps)
        set_learning_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return norm, rate

    def _no_losses(self) -> torch.Tensor:
        """On the device, to add losses to without waiting for them: that of all TTT steps, and of each."""
        return torch.zeros(1 + self.spec.ttt_steps, dtype=torch.float64, device=self.device)

    def _named(self, losses: list[float]) -> dict[str, float]:
        return dict(zip(("loss", *(f"loss_{i}" for i in range(self.spec.ttt_steps))), losses, strict=True))

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a batch on the device, its value and that of each TTT step."""
        found = self._forward(batch)
        return found.loss, found.losses

    def _forward(self, batch: Batch, want_tokens: bool = False) -> Unrolled:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.forward(batch, want_tokens)

    def _validate(self, epoch: int, train_loss: float | None = None) -> None:
        """Measures an epoch, logs it, and keeps the weights if it is the best so far; all ranks learn the result."""
        values = self._measure() if self.ranks.is_first else {}
        self._record_epoch(epoch, self.ranks.tell(values), train_loss)

    @torch.no_grad()
    def _measure(self) -> dict[str, float]:
        self.model.eval()
        meter, totals, tokens = AcceptanceMeter(self.spec.ttt_steps), self._no_losses(), 0
        choose = None if self._choices else self.bench.verifier_choice()
        for number, cpu_batch in enumerate(read_ahead(self.val_loader)):
            batch = self.bench.to_device(cpu_batch)
            if choose:
                # The verifier's choices do not depend on the draft: computed once.
                self._choices.append(choose(batch).to("cpu"))
            mask = supervised_mask(batch, self.spec.ttt_steps)
            found = self._forward(with_all_targets(batch, mask), want_tokens=True)
            meter.add(found.draft_tokens, self._choices[number].to(self.device), batch)
            count = int(mask.sum())
            tokens += count
            totals += found.losses * count
        accuracies = meter.result()
        values = {name: value / max(tokens, 1) for name, value in self._named(totals.tolist()).items()}
        values |= {f"full_acc_{i}": v for i, v in enumerate(accuracies["full_acc"])}
        values |= {f"conditional_acc_{i}": v for i, v in enumerate(accuracies["conditional_acc"])}
        values["acceptance_length"] = meter.acceptance_length
        values["outside_draft_vocab_share"] = meter.outside_draft_vocab_share
        return values

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
            if self.ranks.is_first:
                self.resume.save_best(epoch, self._trained())
        self.emit("epoch", epoch=epoch, step=progress.step, best_epoch=progress.best_epoch, **metrics, **self._speed())

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
        if not p.loss_tokens:
            self._settle()
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
        self._settle()
        if not self.ranks.is_first:
            return
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
            if self.resume.is_there():
                self.emit("log", message="the state of an earlier run cannot be used or read: training starts anew")
            return False
        self.progress = Progress(**state["progress"])
        self.log = MetricsLog(state["metrics"].numpy().tobytes())
        self.model.load_state_dict(state["model"], strict=False)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])
        self.emit("log", message=f"resumed at epoch {self.progress.epoch}, step {self.progress.step}")
        return True

    def _export(self) -> None:
        best, last = self.progress.best_epoch, len(self.progress.history) - 1
        layers = self.model.config.transformer_layer_config
        if best != last:
            # For whoever would rather go on from the end than from the best epoch.
            export_draft(self.model, self.job.output / LAST)
            check_export(self.job.output / LAST, self.job, layers, self.bench.vocab_map)
        self.model.load_state_dict(self.resume.load_best(best), strict=False)
        self.log.write(self.job.output)
        draw_curves(self.log.table().to_pylist(), self.job.output / CURVES_NAME)
        self.num_trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
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


def _say_nothing(_event: str, **_fields: Any) -> None: ...


def _rank(metrics: dict[str, float]) -> tuple[float, float]:
    """Orders epochs: by acceptance length, then by loss."""
    return metrics["val_acceptance_length"], -metrics["val_loss"]


def train(job: Job, emit: Emit) -> dict[str, Any]:
    """Runs the job; see `Trainer.run`.

    Raises:
        TrainingError: an input is wrong, the loss diverged, or the exported draft is not what vLLM loads.
    """
    trainer = Trainer(job, emit)
    result = trainer.run()
    trainer.ranks.leave()
    return result
