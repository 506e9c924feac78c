"""The picture of a training run."""

from pathlib import Path
from typing import Any

CURVES_NAME = "curves.png"


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws loss (train per step, both splits per epoch) and validation acceptance over optimizer steps.

    Args:
        rows: rows of `metrics.parquet`.
        path: the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, acceptance) = pyplot.subplots(1, 2, figsize=(10, 4))
    losses.plot(*_series(rows, "step", "train", "loss"), color="tab:blue", alpha=0.3, label="train, step")
    losses.plot(*_series(rows, "epoch", "train", "loss"), color="tab:blue", marker="o", label="train, epoch")
    losses.plot(*_series(rows, "epoch", "val", "loss"), color="tab:orange", marker="o", label="validation")
    losses.set(xlabel="optimizer step", ylabel="loss (KL, summed over TTT steps)", title="Loss")
    losses.legend()
    names = sorted({r["name"] for r in rows if r["name"].startswith("full_acc_") and r["kind"] == "epoch"})
    for name in names:
        step = int(name.rsplit("_", 1)[1])
        acceptance.plot(*_series(rows, "epoch", "val", name), marker=".", label=f"first {step + 1} right")
    acceptance.set(xlabel="optimizer step", ylabel="share of positions", ylim=(0, 1), title="Validation acceptance")
    lengths = acceptance.twinx()
    lengths.plot(*_series(rows, "epoch", "val", "acceptance_length"), color="black", marker="o", label="length")
    lengths.set(ylabel="acceptance length (tokens)", ylim=(1, 1 + max(len(names), 1)))
    handles = [axes.get_legend_handles_labels() for axes in (acceptance, lengths)]
    acceptance.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _series(rows: list[dict[str, Any]], kind: str, split: str, name: str) -> tuple[list[int], list[float]]:
    chosen = [r for r in rows if (r["kind"], r["split"], r["name"]) == (kind, split, name)]
    return [r["step"] for r in chosen], [r["value"] for r in chosen]
