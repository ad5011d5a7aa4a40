"""Every config that ships reads, and names factories that exist beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipedream.graph.run_config import read_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_config_reads(path: Path) -> None:
    config = read_config(path)
    assert hasattr(torch.optim, config.optimizer.name)
    for source in (config.model.source, config.data.source):
        module, name = source.split(":")
        assert f"\ndef {name}(" in (CONFIGS / f"{module}.py").read_text()
