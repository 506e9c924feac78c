"""Do the captured last-layer states predict the tokens that followed?

Catches a wrong or missing final layer, rows that are off by one and exchanged samples; for sampled text, garbage.
"""

import numpy as np

from eagle3_pipeline.data.verifier_head import VerifierHead
from eagle3_pipeline.engine.smoke import judge_sampling
from eagle3_pipeline.errors import CaptureError, DecodingError

MOST_ROWS = 256
# A gap of the two best logits below this share of (best - mean) may turn over by bf16 rounding of the states.
NEAR_TIE = 0.01
# Fewer rows agree with answers that were decoded wrongly; between this and the limit it may be rounding.
WRONG_AGREEMENT = 0.5
TOP_K = 20


def spread_rows(num_rows: int) -> np.ndarray:
    """At most `MOST_ROWS` of `num_rows`, evenly spread."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, MOST_ROWS)).astype(int))


def check_greedy(
    head: VerifierHead, states: np.ndarray, tokens: np.ndarray, minimum: float, where: str
) -> dict[str, float]:
    """Checks that argmax(lm_head(norm(state))) is the token that greedy decoding chose.

    Args:
        head: the verifier's norm and output layer.
        states: float32 [R, H], last layer before the final norm.
        tokens: int [R], the token after each row.
        minimum: smallest share of rows that must agree, near-ties apart.
        where: named in the error.

    Returns:
        num_checked_rows, num_near_ties, next_token_agreement.

    Raises:
        CaptureError: too few rows agree; DecodingError: so few that the answers are not the verifier's.
    """
    top, _ = head.top_tokens(states, TOP_K)
    clear = top.gap >= NEAR_TIE * top.spread
    agrees = top.best == tokens
    agreement = float(agrees[clear].mean()) if clear.any() else 1.0
    if agreement < minimum:
        first = int(np.flatnonzero(clear & ~agrees)[0])
        kind = DecodingError if agreement < WRONG_AGREEMENT else CaptureError
        raise kind(
            f"{where}: the captured states name the next token in {agreement:.1%} of {int(clear.sum())} rows, "
            f"capture.min_next_token_agreement asks for {minimum:.0%}; first: expected token {tokens[first]}, the "
            f"states say {top.best[first]}. The last layer is wrong, rows are shifted, or samples are exchanged"
        )
    return {
        "num_checked_rows": float(clear.sum()),
        "num_near_ties": float((~clear).sum()),
        "next_token_agreement": agreement,
    }


def check_sampled(head: VerifierHead, states: np.ndarray, tokens: np.ndarray, where: str) -> dict[str, float]:
    """Checks that sampled tokens are as often among the likely ones as they should be.

    Raises:
        DecodingError: they are too rarely.
    """
    top, logits = head.top_tokens(states, TOP_K)
    hits = int((logits[np.arange(len(tokens)), tokens] >= top.kth).sum())
    found = judge_sampling(hits, top.mass.tolist())
    if not found.may_sample:
        raise DecodingError(
            f"{where}: {hits} of {len(tokens)} sampled tokens are among the {TOP_K} likeliest under the captured "
            f"states, about {found.expected_hits:.0f} should be: the text is garbage, or the states are not its own"
        )
    return {"num_checked_rows": float(len(tokens)), "likely_token_share": hits / len(tokens)}


def check_teacher(
    head: VerifierHead,
    states: np.ndarray,
    tokens: list[list[int]],
    logprobs: list[list[float]],
    most: float,
    where: str,
) -> dict[str, float]:
    """Checks that the head, as training computes it, gives the log-probabilities that the engine itself gives.

    Both are of one forward pass, so nothing but rounding is between them. The argmax alone would not tell: a gain that
    is off by 4 % keeps it in all rows.

    Args:
        head: the verifier's norm and output layer.
        states: float32 [R, H], last layer before the final norm.
        tokens: of each row, the engine's most likely next tokens.
        logprobs: of each row, their log-probabilities.
        most: largest mean Kullback-Leibler divergence over rows, in nats.
        where: named in the error.

    Returns:
        teacher_kl: the mean over rows of sum p (log p - log q) over these tokens, p the engine's and q the head's.

    Raises:
        CaptureError: it is larger.
    """
    logits = head.logits(states).astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    log_q = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    gaps = []
    for row, (ids, values) in enumerate(zip(tokens, logprobs, strict=True)):
        log_p = np.asarray(values)
        gaps.append(float((np.exp(log_p) * (log_p - log_q[row, ids])).sum()))
    found, worst = float(np.mean(gaps)), int(np.argmax(np.abs(gaps)))
    if abs(found) > most:
        best = int(np.argmax(logprobs[worst]))
        token, engine = tokens[worst][best], logprobs[worst][best]
        raise CaptureError(
            f"{where}: the output layer that training would learn from is not the verifier's: in {len(gaps)} rows its "
            f"log-probabilities are {found:.3g} nats from the engine's on average, capture.max_teacher_kl allows "
            f"{most:g}; furthest apart: token {token} has {engine:.3f} in the engine and {log_q[worst, token]:.3f} here"
        )
    return {"teacher_kl": found}
