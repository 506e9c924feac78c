"""Our loader and model against speculators' own path; first-step acceptance against a computation by hand."""

from pathlib import Path

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaForCausalLM

from eagle3_pipeline.training.acceptance import AcceptanceMeter, VerifierChoice
from eagle3_pipeline.training.dataset import HiddenStateDataset, PackedCollate
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import supervised_mask
from eagle3_pipeline.training.prepare import Bench, prepare
from eagle3_pipeline_tests.training.conftest import HIDDEN, Events, Row, SpecMaker, TrainedRun, capture

Verifier = tuple[Path, LlamaForCausalLM]


@pytest.fixture
def bench(make_spec: SpecMaker, events: Events) -> Bench:
    return prepare(Job.parse(make_spec()), events)


def test_loss_and_accuracies_equal_speculators_on_the_same_samples(
    bench: Bench, verifier: Verifier, rows: list[Row]
) -> None:
    """The reference: whole captures, padded; a position is marked if its next token is trained on."""
    settings = {"ttt_steps": 3, "loss_config": resolve_loss_config("kl_div", "eager")}
    dataset = HiddenStateDataset(bench.table, [4, 5, 6])
    ours = PackedCollate(None)([dataset[i] for i in range(3)])
    ours["loss_mask"] = supervised_mask(ours, 3)
    samples = []
    for row in rows[4:7]:
        states = capture(verifier[1], row.input_ids)
        n = len(states)
        mask = [m and i >= 3 for i, m in enumerate(row.loss_mask[1:])]
        samples.append(
            {
                "hidden_states": states[:, :3].flatten(1),
                "verifier_last_hidden_states": states[:, 3],
                "input_ids": torch.tensor(row.input_ids[:n]),
                "loss_mask": torch.tensor(mask),
                "lengths": torch.tensor([n]),
                "position_ids": torch.arange(n),
            }
        )
    collated = CollateFn(100, HIDDEN, 3, torch.bfloat16, shift_batch)(samples)
    reference = {k: v for k, v in collated.items() if torch.is_tensor(v)}

    def run(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        full = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        bench.model.float()
        _, loss, metrics = bench.model(**full, **settings)
        return loss, metrics

    (our_loss, our_metrics), (loss, metrics) = run(ours), run(reference)
    assert our_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert our_loss.item() > 0.1
    assert our_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert our_metrics[name].item() == pytest.approx(value.item(), abs=1e-5), name


def _norm(values: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return values / (values.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(values: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [S, heads, d] in the half-split layout."""
    half = values.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = values[..., :half], values[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _first_step_logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Draft logits [S, D] of one sequence in plain tensor algebra: 4 heads of 8, 2 key-value heads."""
    w = {name.removeprefix("layers.0."): value.float() for name, value in weights.items()}
    hidden = aux.float() @ w["fc.weight"].T
    normed = _norm(hidden, w["hidden_norm.weight"])
    both = torch.cat([_norm(w["embed_tokens.weight"][tokens], w["input_layernorm.weight"]), normed], dim=-1)
    size, positions = len(tokens), torch.arange(1, len(tokens) + 1)
    q = _rotate((both @ w["self_attn.q_proj.weight"].T).view(size, 4, 8), positions, 5000.0)
    k = _rotate((both @ w["self_attn.k_proj.weight"].T).view(size, 2, 8), positions, 5000.0)
    v = (both @ w["self_attn.v_proj.weight"].T).view(size, 2, 8)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(size, 32)
    # norm_before_residual: the residual is the normalised state.
    hidden = normed + attended @ w["self_attn.o_proj.weight"].T
    inner = _norm(hidden, w["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(inner @ w["mlp.gate_proj.weight"].T)
    hidden = hidden + (gate * (inner @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return _norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T


def test_first_step_acceptance_by_hand(
    trained: TrainedRun, events: Events, verifier: Verifier, rows: list[Row], vocab_map: tuple[Path, list[int]]
) -> None:
    bench = prepare(Job.parse({**trained.spec, "checkpoint": str(trained.output)}), events)
    weights = {k: v.detach() for k, v in bench.model.state_dict().items()}
    right = positions = outside = 0
    for row in rows[:8]:
        ids, mask = row.input_ids, row.loss_mask
        logits = verifier[1](torch.tensor([ids[:-1]])).logits[0]
        aux = capture(verifier[1], ids)[:, :3].flatten(1)
        drafted = _first_step_logits(weights, torch.tensor(ids[1:-1]), aux[:-1]).argmax(-1)
        for k in range(1, len(ids) - 1):
            if mask[k] and mask[k + 1]:
                positions += 1
                wanted = int(logits[k].argmax())
                right += vocab_map[1][drafted[k - 1]] == wanted
                outside += wanted not in vocab_map[1]
    model, meter = bench.model.float(), AcceptanceMeter(1)
    dataset = HiddenStateDataset(bench.table, list(range(8)))
    batch = PackedCollate(None)([dataset[i] for i in range(8)])
    choice = bench.verifier_choice()(batch)
    tokens = model(
        hidden_states=batch["hidden_states"].float(),
        input_ids=batch["input_ids"],
        document_ids=batch["document_ids"],
        position_ids=batch["position_ids"],
        ttt_steps=1,
    )
    meter.add(tokens, choice, batch)
    assert meter.num_positions == positions
    assert meter.result()["full_acc"] == [right / positions]
    assert meter.outside_draft_vocab_share == outside / positions
    assert 0 < right < positions
    assert outside > 0


def test_choice_is_the_verifiers_own_next_token(
    bench: Bench, rows: list[Row], vocab_map: tuple[Path, list[int]]
) -> None:
    """The answers are greedy: the choice at a supervised position is the next token of the sequence."""
    choose: VerifierChoice = bench.verifier_choice()
    dataset = HiddenStateDataset(bench.table, list(range(len(rows))))
    same = total = 0
    for number, row in enumerate(rows):
        choice = choose(PackedCollate(None)([dataset[number]]))
        for k in range(1, len(row.input_ids) - 1):
            if row.loss_mask[k + 1]:
                wanted = row.input_ids[k + 1]
                same += int(choice[k - 1]) == (vocab_map[1].index(wanted) if wanted in vocab_map[1] else -1)
                total += 1
            else:
                assert choice[k - 1] == -1
    # bf16 near-ties may differ.
    assert same >= 0.97 * total
