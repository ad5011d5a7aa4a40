"""ZeRO-1: the part of a stage's parameters that this replica updates, and whose state its optimizer
keeps; see `pipedream.comm.zero`.

The optimizer gets parameters of its own, the parts, which share memory with the whole ones. So its
state has their sizes, and nothing else of a run knows of the division: checkpoints have whole
tensors, under the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from pipedream.comm.messages import begin_messages, lost
from pipedream.comm.zero.rows import own_part, part


class DividedParameters:
    """`parts`: by name what is this replica's of the `whole` parameters, as `own_part` gives it;
    parameters of which it has nothing are not there.
    """

    def __init__(self, whole: Mapping[str, Parameter], replicas: int, replica: int) -> None:
        self.whole, self.replicas, self.replica = dict(whole), replicas, replica
        self.parts: dict[str, Parameter] = {}
        for name, parameter in self.whole.items():
            own = own_part(parameter.data, replicas, replica)
            if own is not None:
                self.parts[name] = Parameter(own, parameter.requires_grad)

    def follow(self) -> None:
        """Moves the parts to where the parameters are now."""
        for name, each in self.parts.items():
            own = own_part(self.whole[name].data, self.replicas, self.replica)
            assert own is not None
            each.data = own

    def own_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parts of this replica of gradients, some of which are no more than that."""
        own: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            if name in self.parts:
                is_whole = gradient.shape != self.parts[name].shape
                each = own_part(gradient, self.replicas, self.replica) if is_whole else gradient
                assert each is not None
                own[name] = each
        return own

    def own_state(self, name: str, tensor: Tensor) -> Tensor | None:
        """Returns this replica's part of what an optimizer remembers of a parameter, in memory of
        its own: of a number for the whole parameter, such as the count of steps, all; None if it
        has no part of the parameter.
        """
        if name not in self.parts:
            return None
        if tensor.shape != self.whole[name].shape:
            return tensor
        own = own_part(tensor, self.replicas, self.replica)
        return None if own is None else own.clone()

    def gathered(
        self, name: str, tensor: Tensor, group: dist.ProcessGroup, place: torch.device
    ) -> Tensor:
        """Returns, on the first replica, the whole of what the optimizer remembers, in memory of
        its own on the CPU; the others give it their parts. Called by all that have one, for the
        same tensors in the same order. `group`: the replicas; `place`: where it sends tensors from.
        Raises PeerLost.
        """
        own = self.parts[name]
        if tensor.shape != own.shape or not own.dim():
            return tensor.detach().cpu().clone()
        ranks, size = dist.get_process_group_ranks(group), self.whole[name].numel()
        parts = [part(size, self.replicas, replica) for replica in range(self.replicas)]
        flat, coming, going = tensor, list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        if self.replica:
            going = [(ranks[0], _real(tensor.detach().to(place)))]
        else:
            flat = torch.empty(size, dtype=tensor.dtype, device=place)
            flat[parts[0]] = tensor.detach()
            others = zip(ranks[1:], parts[1:], strict=True)
            coming = [(rank, _real(flat[each])) for rank, each in others if each.stop > each.start]
        with lost("a replica of this stage does not answer"):
            for work in begin_messages(group, going, coming):
                work.wait()
        return tensor if self.replica else flat.view(self.whole[name].shape).cpu()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
