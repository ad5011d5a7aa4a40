"""What is checked, what tells most first. The limits of those for one GPU come to ten minutes."""

from __future__ import annotations

from gpu_check.check import Bar, Check

_EQUAL = Bar(most=0)
_FROM_MEASURES = "gpu_check.measures."


def _queues(count: int) -> Check:
    """With 32, which pd-train sets, no stream may wait for another; 1 and 8 show what it avoids."""
    return Check(
        f"hardware queues {count}",
        f"{_FROM_MEASURES}queues:stopped_pairs",
        20,
        _EQUAL if count == 32 else None,
        "pairs",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(count), "CUDA_MODULE_LOADING": "EAGER"},
    )


CHECKS = (
    Check(
        "tests",
        f"{_FROM_MEASURES}gpu_tests:failures",
        180,
        _EQUAL,
        "failures",
        {"path": "tests/gpu/test_gpu.py"},
    ),
    Check("nccl alone", f"{_FROM_MEASURES}world_of_one:difference", 40, _EQUAL, "difference"),
    Check(
        "pd-train alone",
        f"{_FROM_MEASURES}alone:loss_difference",
        50,
        Bar(most=1e-8),
        "of the loss",
    ),
    _queues(1),
    _queues(8),
    _queues(32),
    Check("streams", f"{_FROM_MEASURES}stream_pool:distinct_streams", 15, Bar(least=32), "streams"),
    Check(
        "synchronisations",
        f"{_FROM_MEASURES}synchronisations:per_minibatch",
        40,
        _EQUAL,
        "a minibatch",
    ),
    *(
        Check(
            f"efficiency {model}",
            f"{_FROM_MEASURES}one_worker_speed:efficiency",
            60,
            Bar(least=0.95),
            "of a loop",
            {"model": model},
        )
        for model in ("gpt2", "resnet50")
    ),
    Check(
        "memory gpt2",
        f"{_FROM_MEASURES}peak_memory:over_plan",
        30,
        Bar(-0.10, 0.10),
        "over plan",
        {"model": "gpt2"},
    ),
    Check(
        "two ranks gpt2",
        f"{_FROM_MEASURES}two_ranks:over_prediction",
        65,
        Bar(-0.25, 0.25),
        "over plan",
        {"model": "gpt2"},
    ),
    Check(
        "nccl",
        f"{_FROM_MEASURES}gpu_tests:failures",
        300,
        _EQUAL,
        "failures",
        {"path": "tests/gpu/test_nccl.py"},
        gpus=2,
    ),
)
