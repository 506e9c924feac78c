"""Which conversations validate: decided by a hash of the conversation's id, never by a seed or by order."""

import hashlib
from collections.abc import Iterable, Mapping

from eagle3_pipeline.errors import TrainingError


def conversation_position(conversation_id: str) -> float:
    """Where a conversation lies in [0, 1): the first 53 bits of the sha256 of its id."""
    digest = hashlib.sha256(conversation_id.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def conversation_groups(roots: Mapping[str, str | None]) -> dict[str, str]:
    """The id under which each conversation is split: of those that begin alike, the id of the first.

    So no prompt is on both sides, and a conversation that shares its beginning with no other is split by its own id.

    Args:
        roots: what each conversation begins with, in the order of chunks and rows; `None`: unknown.
    """
    first: dict[str, str] = {}
    return {name: first.setdefault(root, name) if root else name for name, root in roots.items()}


def validation_conversations(conversation_ids: Iterable[str], fraction: float, min_samples: int) -> set[str]:
    """The conversations held out for validation.

    A conversation validates if its position is below `fraction`. While that gives fewer than `min_samples`, the
    lowest `min_samples` positions validate instead. Either way a threshold decides, and more data can only lower it
    (down to `fraction`): a conversation that was trained on never becomes validation data, and once the data holds
    about `min_samples / fraction` conversations none moves at all.

    Args:
        conversation_ids: ids of all conversations, repeats allowed.
        fraction: share of conversations that validate, in [0, 1).
        min_samples: at least this many validate.

    Raises:
        TrainingError: no conversation would be left to train on.
    """
    positions = {c: conversation_position(c) for c in conversation_ids}
    if len(positions) <= min_samples:
        raise TrainingError(
            f"{len(positions)} conversations are too few: training.min_validation_samples holds out {min_samples} and "
            f"at least one must be left to train on; add data or lower training.min_validation_samples"
        )
    chosen = {c for c, position in positions.items() if position < fraction}
    if len(chosen) < min_samples:
        chosen = set(sorted(positions, key=lambda c: (positions[c], c))[:min_samples])
    if len(chosen) == len(positions):
        raise TrainingError(
            f"training.validation_fraction {fraction} holds out all {len(positions)} conversations; lower it"
        )
    return chosen
