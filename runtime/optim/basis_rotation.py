"""Adam in the eigenbasis of the second moments of its gradients: basis rotation.

Late gradients hurt Adam where the directions along which a loss curves are not those of single
weights: its division by root mean squares, weight by weight, then oscillates (arXiv 2602.03515,
ICML 2026). So a matrix W of m x n, with the gradient G, learns in the bases U and V of the
eigenvectors of

    L = b2 L + (1 - b2) G G^T        (m x m)
    R = b2 R + (1 - b2) G^T G        (n x n)

of all gradients before this one. Adam's moments are those of the rotated gradient:

    M = b1 M + (1 - b1) G            v = b2 v + (1 - b2) (U^T G V)^2
    W = (1 - lr decay) W - lr U ((U^T M V) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps + e)) V^T

The first step is the first one of Adam without a rotation, G / (|G| + eps), and finds the bases by
an eigendecomposition; M, v and t begin with the second. In the bases of its own, G would be
diagonal, and all other elements rounding errors, each with a step of Adam's length. Every `every`
steps U turns by one step of QR iteration, U = qr(L U), its columns in descending order of their
eigenvalues, as v is then; V likewise (SOAP: Vyas and others, "SOAP: Improving and Stabilizing
Shampoo using Adam", ICLR 2025, which leaves the first step out). What is
stored is U^T M V; a turn of the bases rotates it.

e is the rounding error of a rotation, ROUNDING times the precision times the norm of
sqrt(v / (1 - b2^t)), which is that of a gradient: along directions in which a matrix has no
gradient at all, steps would be of rounding errors divided by their own size.

A side of more than `widest` stays as it is, with the basis I, as do parameters that are no
matrices, or have one row or one column: with none rotated this is torch's Adam or AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.adam import adam

from pipedream.graph.run_config import BasisRotationConfig

DEFAULTS = BasisRotationConfig()

ROUNDING = 32
"""Units of rounding that an element of a rotated gradient may be wrong by, relative to its norm."""

_SIDES = (("left", "left_basis"), ("right", "right_basis"))


class RotatedAdam(Optimizer):
    """Adam, or with `decoupled` decay AdamW, whose moments are of rotated gradients: see the
    module. What is kept of a matrix that is rotated is float32 at least.

    State of a parameter: `step`, `exp_avg` and `exp_avg_sq` as torch's Adam has them, of a matrix
    that is rotated in its bases; L and R as `left` and `right`, U and V as `left_basis` and
    `right_basis`. Raises ValueError for complex parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        every: int = DEFAULTS.every,
        widest: int = DEFAULTS.widest,
    ) -> None:
        if every < 1:
            raise ValueError(f"every: {every} is less than 1")
        chosen = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, {**chosen, "decoupled": decoupled, "every": every, "widest": widest}
        )
        if any(each.is_complex() for group in self.param_groups for each in group["params"]):
            raise ValueError("complex parameters are not rotated")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            assert not any(each.grad.is_sparse for each in parameters)
            # All state comes before anything that is needed for a moment, for memory without gaps.
            states = [self._state(each, group["widest"]) for each in parameters]
            plain = []
            for parameter, state in zip(parameters, states, strict=True):
                if _is_rotated(state):
                    _step_of_matrix(parameter, state, group)
                else:
                    plain.append(parameter)
            self._step_of_others(plain, group)

    def _step_of_others(self, parameters: Sequence[Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        b1, b2 = group["betas"]
        adam(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            decoupled_weight_decay=group["decoupled"],
            amsgrad=False,
            beta1=b1,
            beta2=b2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state(self, parameter: Parameter, widest: int) -> dict[str, Any]:
        """Returns the state of a parameter, with zeros where it has none yet."""
        state: dict[str, Any] = self.state[parameter]
        if state:
            return state
        rotated = BasisRotationConfig(widest=widest).rotates(parameter.shape)
        dtype = _precision(parameter) if any(rotated) else parameter.dtype
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        for names, each, size in zip(_SIDES, rotated, parameter.shape, strict=False):
            if each:
                state |= {name: parameter.new_zeros(size, size, dtype=dtype) for name in names}
        return state


def _is_rotated(state: dict[str, Any]) -> bool:
    return "left" in state or "right" in state


def _precision(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _step_of_matrix(parameter: Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    rate, eps, gradient = group["lr"], group["eps"], parameter.grad
    assert gradient is not None
    gradient = gradient.to(_precision(parameter))
    state["step"] += 1
    step, (b1, b2) = int(state["step"]) - 1, group["betas"]
    if group["decoupled"]:
        parameter.mul_(1 - rate * group["weight_decay"])
    elif group["weight_decay"]:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    if not step:
        parameter.sub_(rate * gradient / (gradient.abs() + eps))
        _begin(gradient, state, b2)
        return
    rotated = _rotated(gradient, state)
    moment = state["exp_avg"].lerp_(rotated, 1 - b1)
    squares = state["exp_avg_sq"].mul_(b2).addcmul_(rotated, rotated, value=1 - b2)
    bias = math.sqrt(1 - b2**step)
    root = squares.sqrt()  # times the bias, as what is added to it
    error = torch.linalg.vector_norm(root) * (ROUNDING * torch.finfo(root.dtype).eps)
    change = moment / root.add_(error + bias * eps)
    _add_rotated_back(parameter, change, state, -rate * bias / (1 - b1**step))
    for moments, matrix in _by_side(gradient, state):
        state[moments].addmm_(matrix, matrix.T, beta=b2, alpha=1 - b2)
    if not step % group["every"]:
        _turn(state)


def _begin(gradient: Tensor, state: dict[str, Any], b2: float) -> None:
    """Finds the bases of the sides that are rotated, from the first gradient."""
    for moments, matrix in _by_side(gradient, state):
        state[moments].addmm_(matrix, matrix.T, alpha=1 - b2)
        state[f"{moments}_basis"].copy_(_eigenvectors(state[moments]))


def _by_side(gradient: Tensor, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if "left" in state:
        yield "left", gradient
    if "right" in state:
        yield "right", gradient.T


def _turn(state: dict[str, Any]) -> None:
    """Turns the bases, and with them what is kept in them.

    All in its place: with new tensors in place of old ones memory would come to consist of gaps.
    """
    moment = _rotated_back(state["exp_avg"], state)
    for side, (moments, basis) in enumerate(_SIDES):
        if moments in state:
            order = _turn_basis(state[moments], state[basis])
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(side, order))
    state["exp_avg"].copy_(_rotated(moment, state))


def _turn_basis(moments: Tensor, basis: Tensor) -> Tensor:
    """Does one step of QR iteration, and returns the order in which eigenvalues descended."""
    ahead = moments @ basis
    order = basis.mul_(ahead).sum(0).argsort(descending=True, stable=True)
    torch.index_select(ahead, 1, order, out=basis)
    del ahead  # of large matrices several do not have room
    basis.copy_(torch.linalg.householder_product(*torch.geqrf(basis)))  # qr without R
    return order


def _eigenvectors(moments: Tensor) -> Tensor:
    """Returns them in descending order of their eigenvalues; NaN if a gradient was not finite, as
    the weights are then: an error here would come before the run looks at its loss.
    """
    if not bool(torch.isfinite(moments).all()):
        return torch.full_like(moments, torch.nan)
    try:
        vectors: Tensor = torch.linalg.eigh(moments).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Single precision may not converge where eigenvalues are close.
        vectors = torch.linalg.eigh(moments.double()).eigenvectors.to(moments.dtype)
    return vectors.flip(1)


def _rotated(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns U^T G V."""
    if "left" in state:
        matrix = state["left_basis"].T @ matrix
    return matrix @ state["right_basis"] if "right" in state else matrix


def _add_rotated_back(
    parameter: Tensor, matrix: Tensor, state: dict[str, Any], factor: float
) -> None:
    """Adds `factor` times U N V^T to a parameter."""
    if parameter.dtype != matrix.dtype:
        parameter.add_(_rotated_back(matrix, state), alpha=factor)
        return
    if "right" not in state:
        parameter.addmm_(state["left_basis"], matrix, alpha=factor)
        return
    if "left" in state:
        matrix = state["left_basis"] @ matrix
    parameter.addmm_(matrix, state["right_basis"].T, alpha=factor)


def _rotated_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns U N V^T."""
    if "left" in state:
        matrix = state["left_basis"] @ matrix
    return matrix @ state["right_basis"].T if "right" in state else matrix
