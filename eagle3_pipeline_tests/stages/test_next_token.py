"""The next-token check, on a real tiny model: right states pass, each corruption is refused."""

from pathlib import Path

import numpy as np
import pytest

from eagle3_pipeline.data.verifier_head import VerifierHead, load_head
from eagle3_pipeline.errors import CaptureError
from eagle3_pipeline.stages.next_token import check_greedy, check_sampled, check_teacher, spread_rows
from eagle3_pipeline.verifiers.formula import HeadFormula
from eagle3_pipeline_tests.state_parity import reference_states
from eagle3_pipeline_tests.tiny_model import VOCAB_SIZE, make_tiny_llama

NUM_LAYERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def head(folder: Path) -> VerifierHead:
    found = load_head(str(folder))
    assert found
    return found


@pytest.fixture(scope="module")
def greedy(folder: Path) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """States by layer [R, H] and the greedy next token [R] of 60 tokens, all by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([[5, 60, 7, 100, 9]])
    with torch.no_grad():
        ids = model.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    states = reference_states(model, ids[:-1])
    first = prompt.shape[1] - 1
    return {layer: s[first:] for layer, s in states.items()}, np.asarray(ids[first + 1 :])


def rounded(states: np.ndarray) -> np.ndarray:
    """What bf16 storage leaves of float32 values."""
    return ((states.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def test_logits_equal_those_of_transformers(folder: Path, head: VerifierHead, greedy: tuple) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states = greedy[0][NUM_LAYERS]
    with torch.no_grad():
        expected = model.lm_head(model.model.norm(torch.tensor(states))).numpy()
    np.testing.assert_allclose(head.logits(states), expected, rtol=1e-4, atol=1e-4)


def test_greedy_states_name_their_tokens(head: VerifierHead, greedy: tuple) -> None:
    states, tokens = greedy
    found = check_greedy(head, rounded(states[NUM_LAYERS]), tokens, 0.99, "here")
    assert found["next_token_agreement"] == 1.0
    assert found["num_checked_rows"] + found["num_near_ties"] == len(tokens)


@pytest.mark.parametrize("kind", ["layer before", "one row late", "samples exchanged"])
def test_wrong_states_are_refused(head: VerifierHead, greedy: tuple, kind: str) -> None:
    states, tokens = greedy
    last = states[NUM_LAYERS]
    corrupted = {
        "layer before": states[NUM_LAYERS - 1],
        "one row late": np.roll(last, 1, axis=0),
        "samples exchanged": np.concatenate([last[30:], last[:30]]),
    }[kind]
    with pytest.raises(CaptureError, match=r"here: the captured states name the next token in .* the states say"):
        check_greedy(head, rounded(corrupted), tokens, 0.99, "here")


def confident_head(hidden: int, vocab: int) -> VerifierHead:
    """A head whose token i is as likely as component i is large."""
    rows = np.eye(vocab, hidden, dtype=np.float32) * 4
    return VerifierHead(HeadFormula("rms", 0.0, 1e-6), lambda block: rows[block], vocab)


def test_sampled_text_that_the_states_make_likely_passes_and_garbage_does_not() -> None:
    generator = np.random.default_rng(0)
    head = confident_head(200, 200)
    states = generator.normal(size=(200, 200)).astype(np.float32) * 3
    probabilities = np.exp(head.logits(states).astype(np.float64))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    tokens = np.asarray([generator.choice(200, p=p) for p in probabilities])
    assert check_sampled(head, states, tokens, "here")["num_checked_rows"] == 200
    with pytest.raises(CaptureError, match="the text is garbage"):
        check_sampled(head, states, generator.integers(0, 200, size=200), "here")


def test_rows_are_spread_over_the_chunk() -> None:
    assert spread_rows(3).tolist() == [0, 1, 2]
    chosen = spread_rows(10_000)
    assert (len(chosen), chosen[0], chosen[-1]) == (256, 0, 9_999)


def test_only_the_file_of_the_head_is_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that spreads the tensors: the other files do not even exist."""
    import json
    import shutil

    shutil.copytree(folder, tmp_path / "split")
    (tmp_path / "split" / "model.safetensors").rename(tmp_path / "split" / "b.safetensors")
    names = {
        "model.norm.weight": "b.safetensors",
        "lm_head.weight": "b.safetensors",
        "model.embed_tokens.weight": "b.safetensors",
        "model.layers.0.x": "a.safetensors",
    }
    (tmp_path / "split" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = load_head(str(tmp_path / "split"))
    assert found and found.logits(np.ones((1, 128), np.float32)).shape == (1, VOCAB_SIZE)


def _told(logits: np.ndarray, k: int = 20) -> tuple[list[list[int]], list[list[float]]]:
    """The k most likely tokens of each row and their log-probabilities, as an engine gives them."""
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    best = np.argsort(-log_p, axis=1)[:, :k]
    return best.tolist(), np.take_along_axis(log_p, best, axis=1).tolist()


def test_the_teacher_has_the_engines_log_probabilities(head: VerifierHead, greedy: tuple) -> None:
    states = greedy[0][NUM_LAYERS]
    tokens, logprobs = _told(head.logits(states))
    assert abs(check_teacher(head, rounded(states), tokens, logprobs, 0.03, "here")["teacher_kl"]) < 1e-3


@pytest.mark.parametrize("scale", [0.8, 1.25])
def test_a_teacher_with_the_same_argmax_and_other_log_probabilities_is_refused(
    head: VerifierHead, greedy: tuple, scale: float
) -> None:
    states = greedy[0][NUM_LAYERS]
    right, wrong = head.logits(states), scale * head.logits(states)
    assert (right.argmax(axis=1) == wrong.argmax(axis=1)).all()
    tokens, logprobs = _told(wrong, k=VOCAB_SIZE)
    p, q = (np.exp(x - x.max(axis=1, keepdims=True)) for x in (wrong, right))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    divergence = float((p * np.log(p / q)).sum(axis=1).mean())
    assert divergence > 0.03
    with pytest.raises(CaptureError, match=f"{divergence:.3g} nats"):
        check_teacher(head, states, tokens, logprobs, 0.03, "here")
