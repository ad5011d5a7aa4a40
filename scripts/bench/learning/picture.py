"""learning.svg: the losses of all updates, by number of stages and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SMOOTH = 40
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


def draw(curves: Mapping[int, Mapping[str, Sequence[float]]], path: Path) -> None:
    """`curves`: by number of stages and method the losses of the updates of one run."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9}
    from matplotlib import pyplot as plt

    size, shared = (3.2 * len(curves) + 2.2, 4.0), {"sharey": True, "squeeze": False}
    figure, axes = plt.subplots(1, len(curves), figsize=size, layout="constrained", **shared)
    lines = {}
    for axis, (stages, methods) in zip(axes[0], curves.items(), strict=True):
        for method, found in methods.items():
            color, line = STYLES[method]
            smooth = np.convolve(found, np.ones(SMOOTH) / SMOOTH, mode="valid")[::SMOOTH]
            updates = SMOOTH * np.arange(1, len(smooth) + 1)
            (lines[method],) = axis.plot(updates, smooth, color=color, ls=line)
        axis.set_title(f"{stages} stages")
        axis.set_xlabel("updates")
        axis.set_ylim(top=2.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel(f"loss, nats a byte, mean of {SMOOTH} updates")
    named = [each for each in STYLES if each in lines]
    figure.legend([lines[each] for each in named], named, loc="outside right center", frameon=False)
    figure.savefig(path, metadata={"Date": None})
