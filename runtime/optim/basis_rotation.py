"""Adam in the eigenbasis of the second moments of its gradients: basis rotation.

Late gradients hurt Adam where the directions along which a loss curves are not those of single
weights: its division by root mean squares, weight by weight, then oscillates ("Mitigating Staleness
in Asynchronous Pipeline Parallelism via Basis Rotation", arXiv 2602.03515, ICML 2026). So a matrix
W of m x n, with the gradient G, learns in the basis of the eigenvectors U and V of

    L = b2 L + (1 - b2) G G^T        (m x m)
    R = b2 R + (1 - b2) G^T G        (n x n)

where Adam's moments are those of the rotated gradient:

    M = b1 M + (1 - b1) G            v = b2 v + (1 - b2) (U^T G V)^2
    W = (1 - lr decay) W - lr U ((U^T M V) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)) V^T

U and V come from an eigendecomposition at the first step, and every `every` steps from one step of
QR iteration, U = qr(L U), its columns in descending order of their eigenvalues, as v is then (SOAP:
Vyas and others, "SOAP: Improving and Stabilizing Shampoo using Adam", ICLR 2025). A side of more
than `widest` stays as it is, with the basis I, as do parameters that are no matrices: with none
rotated this is torch's Adam or AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WIDEST = 4_096
"""Sides of matrices that are rotated have no more than this: a basis takes the square of it."""

_SIDES = (("left", "left_basis"), ("right", "right_basis"))


class RotatedAdam(Optimizer):
    """Adam, or with `decoupled` decay AdamW, whose moments are of rotated gradients: see the
    module. Bases are float32 at least.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        every: int = 10,
        widest: int = WIDEST,
    ) -> None:
        if every < 1:
            raise ValueError(f"every: {every} is less than 1")
        chosen = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, {**chosen, "decoupled": decoupled, "every": every, "widest": widest}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient, rate = self.state[parameter], parameter.grad, group["lr"]
        assert gradient is not None
        if group["decoupled"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (b1, b2) = int(state["step"]), group["betas"]
        self._observe(state, gradient, group, b2)
        moment, squares = state["exp_avg"], state["exp_avg_sq"]
        moment.lerp_(gradient, 1 - b1)
        squares.mul_(b2).add_(_rotated(gradient, state).square(), alpha=1 - b2)
        root = (squares / (1 - b2**step)).sqrt_().add_(group["eps"])
        change = _rotated(moment, state) / (1 - b1**step) / root
        parameter.add_(_rotated_back(change, state), alpha=-rate)

    def _observe(
        self, state: dict[str, Any], gradient: Tensor, group: dict[str, Any], b2: float
    ) -> None:
        """Adds a gradient to the second moments of both sides; turns the bases at their turn."""
        if gradient.dim() != 2:
            return
        wide = gradient.to(_precision(gradient.dtype))
        for side, ((moments, basis), size) in enumerate(zip(_SIDES, gradient.shape, strict=True)):
            if not 1 < size <= group["widest"]:
                continue
            square = wide @ wide.T if side == 0 else wide.T @ wide
            if moments not in state:
                state[moments] = square * (1 - b2)
                state[basis] = torch.linalg.eigh(state[moments]).eigenvectors.flip(1)
                continue
            state[moments].lerp_(square, 1 - b2)
            if (int(state["step"]) - 1) % group["every"] == 0:
                order, state[basis] = _turned(state[moments], state[basis])
                state["exp_avg_sq"] = state["exp_avg_sq"].index_select(side, order)


def _turned(moments: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order in which eigenvalues descend, and the basis one step of QR iteration on."""
    ahead = moments @ basis
    order = (basis * ahead).sum(0).argsort(descending=True)
    return order, torch.linalg.qr(ahead[:, order]).Q


def _rotated(tensor: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns U^T G V, of G's type."""
    left, right = state.get("left_basis"), state.get("right_basis")
    result = tensor if left is None and right is None else tensor.to(_precision(tensor.dtype))
    if left is not None:
        result = left.T @ result
    if right is not None:
        result = result @ right
    return result.to(tensor.dtype)


def _rotated_back(tensor: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns U N V^T, of N's type."""
    left, right = state.get("left_basis"), state.get("right_basis")
    result = tensor if left is None and right is None else tensor.to(_precision(tensor.dtype))
    if left is not None:
        result = left @ result
    if right is not None:
        result = result @ right.T
    return result.to(tensor.dtype)


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
