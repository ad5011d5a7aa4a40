"""learning.svg: how much late gradients cost by the number of stages, and the curves of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

SMOOTH = 20
"""Updates whose losses are averaged."""

STYLES = {
    "flush AdamW": ("k", "-"),
    "flush Muon": ("0.55", "-"),
    "2bw AdamW": ("C0", "-"),
    "2bw AdamW feedback": ("C0", "--"),
    "2bw Muon": ("C2", "-"),
    "2bw Muon feedback": ("C2", "--"),
    "stashing AdamW": ("C3", "-"),
    "stashing nesterov": ("C1", "-"),
    "stashing rotation": ("C4", "-"),
    "stashing rotation feedback": ("C4", "--"),
    "stashing feedback": ("C3", "--"),
    "stashing Muon": ("C5", "-"),
    "stashing Muon feedback": ("C5", "--"),
    "stashing prediction": ("C3", ":"),
    "flush rotated": ("0.75", "-"),
}


def draw(table: pd.DataFrame, curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """`table`: as `learning.py` makes it; `curves`: by method the losses of the updates of one run
    at the most stages of all.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9}
    from matplotlib import pyplot as plt

    figure, (gaps, losses) = plt.subplots(1, 2, figsize=(9.6, 4.0))
    stages = sorted(set(table.stages))
    late = table[~table.method.str.startswith("flush")]
    for method, runs in late.groupby("method", sort=False):
        color, line = STYLES[str(method)]
        by_stages = runs.groupby("stages").over
        middle, least, most = by_stages.median(), by_stages.min(), by_stages.max()
        where = [stages.index(each) for each in middle.index]
        gaps.plot(where, 100 * middle, color=color, ls=line, marker=".", label=method)
        gaps.fill_between(where, 100 * least, 100 * most, color=color, alpha=0.12, lw=0)
    gaps.set_xticks(range(len(stages)), [str(each) for each in stages])
    gaps.set_xlabel("stages")
    gaps.set_ylabel("% above the same optimizer, not late")
    for method, found in curves.items():
        color, line = STYLES[method]
        smooth = np.convolve(found, np.ones(SMOOTH) / SMOOTH, mode="valid")
        losses.plot(np.arange(len(smooth)) + SMOOTH, smooth, color=color, ls=line, label=method)
    losses.set_xlabel("updates")
    losses.set_ylabel(f"loss, nats a byte, mean of {SMOOTH} updates")
    losses.set_title(f"{table.stages.max()} stages")
    losses.legend(frameon=False, fontsize=8)
    for axis in (gaps, losses):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
