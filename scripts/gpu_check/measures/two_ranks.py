"""Two ranks that share a device, beside the time that is predicted for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from gpu_check.check import Measured, Setting
from gpu_check.measures.tools import folder_of, make_plan, measure_network, summary_of, train


def over_prediction(setting: Setting, model: str) -> Measured:
    """Returns by what share of the predicted time of a minibatch the measured one is longer.

    Each rank is planned as half as fast as the device: in a pipeline that is full both compute.
    """
    folder = folder_of(setting, model)
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(halves_of_a_device(measure_network(setting))))
    plan = make_plan(folder, "plan-2", "--cluster", str(cluster))
    summary = summary_of(train(setting, plan, "two", "--unchecked"))
    measured = summary["seconds_per_minibatch"]
    predicted = summary["predicted_seconds_per_minibatch"]
    words = f"{measured * 1e3:.2f} ms, predicted {predicted * 1e3:.2f} ms"
    return Measured(measured / predicted - 1, words)


def halves_of_a_device(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cluster with each device half as fast as the one that was profiled."""
    machines = cluster["levels"][-1]["count"]
    kinds = [{"name": "half", "speed": 0.5}]
    return {**cluster, "kinds": kinds, "machine_kinds": ["half"] * machines}
