"""The tensors that a module reads, each under all of its names."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx


@dataclass(frozen=True)
class ModuleTensors:
    """`names`: by the name under which an operator reads a parameter or buffer, all names of it."""

    module: fx.GraphModule
    names: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(module: fx.GraphModule) -> ModuleTensors:
        named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        named |= dict(module.named_buffers(remove_duplicate=False))
        names = {}
        for name in dict.fromkeys(str(n.target) for n in module.graph.find_nodes(op="get_attr")):
            own = operator.attrgetter(name)(module)
            if isinstance(own, Tensor):
                others = (other for other, tensor in named.items() if tensor is own)
                names[name] = tuple(dict.fromkeys((name, *others)))
        return ModuleTensors(module, names)

    def find(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the tensor that is given under any of its names, else the module's own."""
        known = next((tensors[each] for each in self.names[name] if each in tensors), None)
        own: Tensor = operator.attrgetter(name)(self.module) if known is None else known
        return own
