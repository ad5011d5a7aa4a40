"""Whether an optimizer takes its arguments, before anything is captured or trained."""

from __future__ import annotations

from typing import Any

from pipedream.graph.errors import UserError


def try_arguments(option: str, name: str, args: dict[str, Any]) -> None:
    """Raises UserError, for this option of the run config, for what torch's class refuses."""
    import torch

    try:
        getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(()))], **args)
        _, _ = args.get("betas", (0.9, 0.999))  # of more than two it does not look at the rest
    except Exception as error:
        raise UserError(f"{option} {name} {args}: {type(error).__name__}: {error}") from error
