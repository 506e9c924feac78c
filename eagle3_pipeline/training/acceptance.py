"""Simulated acceptance: how many drafted tokens greedy verification would accept, from teacher-forced drafting.

A drafting position k is one whose token x[k] the verifier generated (so it may start a draft in serving) and whose next
token is still part of the answer. Draft step i is right if the draft's token equals the verifier's argmax over its
*whole* vocabulary at k+i, given that steps 0..i-1 were right: a token outside the draft vocabulary is never right.
(The accuracies of speculators compare within the draft vocabulary, which is optimistic.)
"""

import torch

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.dataset import Batch
from eagle3_pipeline.training.draft_model import VerifierWeights

OUTSIDE_DRAFT_VOCAB = -1
_ROWS_AT_ONCE = 2048


class VerifierChoice:
    """The verifier's greedy next token at each position, as a draft id."""

    def __init__(
        self, weights: VerifierWeights, norm: torch.nn.Module, draft_ids: torch.Tensor, device: torch.device
    ) -> None:
        """Moves the full output layer to the device.

        Args:
            weights: the verifier's, of all its tokens.
            norm: the verifier's final norm, on the device.
            draft_ids: int64 [V], draft id of each verifier token, -1 outside.
            device: where the products run.
        """
        self._head = weights.output_layer().to(device)
        self._norm = norm
        self._draft_ids = draft_ids.to(device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> torch.Tensor:
        """Draft ids [S] int64 of the choices; -1 outside the draft vocabulary and where nothing is supervised."""
        mask = batch["loss_mask"][0].bool()
        states = batch["verifier_last_hidden_states"][0][mask]
        chosen = torch.full(mask.shape, OUTSIDE_DRAFT_VOCAB, dtype=torch.long, device=mask.device)
        with torch.autocast(states.device.type, torch.bfloat16):
            parts = [self._head(self._norm(rows)).argmax(-1) for rows in states.split(_ROWS_AT_ONCE)]
        if parts:
            chosen[mask] = self._draft_ids[torch.cat(parts)]
        return chosen


class AcceptanceMeter:
    """Adds up acceptance over batches; all counts are exact integers."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._counts = torch.zeros(3, num_steps, dtype=torch.long)
        self._served_counts = torch.zeros(2, num_steps, dtype=torch.long)
        self._outside = 0

    def add(self, draft_tokens: list[torch.Tensor], choice: torch.Tensor, batch: Batch) -> None:
        """Counts one packed batch.

        Args:
            draft_tokens: per step, draft ids [1, S] proposed at each position.
            choice: draft ids [S] of the verifier's choices, -1 outside.
            batch: `loss_mask` and `document_ids`, [1, S] each.
        """
        supervised, documents = batch["loss_mask"][0].bool(), batch["document_ids"][0]
        start = supervised & _earlier(supervised) & (documents == _earlier(documents))
        self._outside += int((start & (choice == OUTSIDE_DRAFT_VOCAB)).sum())
        counted, right, accepted, steps = start, start, torch.zeros_like(documents), []
        for step in range(self.num_steps):
            if step:
                same = _later(documents, step) == documents
                counted = counted & same & _later(supervised, step)
            reached = right & counted
            right = reached & (draft_tokens[step][0] == _later(choice, step)) & (_later(choice, step) >= 0)
            self._counts[:, step] += torch.stack([counted.sum(), reached.sum(), right.sum()]).cpu()
            steps.append((counted, right))
            accepted = accepted + right
        served = _starts_in_serving(start, accepted)
        for step, flags in enumerate(steps):
            self._served_counts[:, step] += torch.stack([(flag & served).sum() for flag in flags]).cpu()

    def result(self) -> dict[str, list[float]]:
        """Accuracies by step.

        Returns:
            `full_acc`: share of positions at which steps 0..i are all right; `conditional_acc`: share at which step i
            is right among those at which the steps before it are.

        Raises:
            TrainingError: no position was counted.
        """
        if not int(self._counts[0, 0]):
            raise TrainingError(
                "no position to measure acceptance on: no sequence has two consecutive supervised tokens"
            )
        counted, reached, right = self._counts.tolist()
        return {
            "full_acc": [r / max(c, 1) for r, c in zip(right, counted, strict=True)],
            "conditional_acc": [r / max(c, 1) for r, c in zip(right, reached, strict=True)],
        }

    @property
    def num_positions(self) -> int:
        """Positions that may start a draft."""
        return int(self._counts[0, 0])

    @property
    def outside_draft_vocab_share(self) -> float:
        """Share of positions at which the verifier's choice lies outside the draft vocabulary."""
        return self._outside / max(self.num_positions, 1)

    @property
    def acceptance_length(self) -> float:
        """Expected tokens per verification: 1 + the sum of `full_acc`; includes the bonus token."""
        return 1 + sum(self.result()["full_acc"])

    @property
    def served_acceptance_length(self) -> float:
        """The same at the positions at which serving drafts.

        A long run of accepted tokens has many positions, of which serving drafts at few: the mean over all is higher.
        """
        counted, right = self._served_counts.tolist()
        return 1 + sum(r / max(c, 1) for r, c in zip(right, counted, strict=True))


def _starts_in_serving(start: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """[S] bool: of the positions that may start a draft, those that do.

    The next draft starts behind the accepted tokens of the last one and the token that verification adds.
    """
    may_start, lengths, position = start.tolist(), accepted.tolist(), 0
    starts = [False] * len(may_start)
    while position < len(may_start):
        starts[position] = may_start[position]
        position += 1 + lengths[position] * may_start[position]
    return torch.tensor(starts, device=start.device)


def _earlier(values: torch.Tensor) -> torch.Tensor:
    """[S]: the value one position before; False or -1 before the first."""
    shifted = torch.full_like(values, False if values.dtype == torch.bool else -1)
    shifted[1:] = values[:-1]
    return shifted


def _later(values: torch.Tensor, step: int) -> torch.Tensor:
    """[S]: the value `step` positions later; False or -1 behind the last."""
    if step == 0:
        return values
    shifted = torch.full_like(values, False if values.dtype == torch.bool else -1)
    shifted[:-step] = values[step:]
    return shifted
