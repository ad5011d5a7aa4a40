"""Idioms that cannot be captured: each is refused in one line that names the user's own line, also
where it is deeper than `forward`, and what to do instead.
"""

from __future__ import annotations

import dataclasses
import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError

DATA = r"depends on the data; use torch\.where or masks of fixed shape"
PACKED = r"packs sequences.*pad them to one length"
GRADIENTS = "takes gradients in its forward pass"
DATA_WRITE = r"writes to a tensor's \.data"
NO_MEMORY = "tensors have no data during the capture"

Idiom = Callable[["Model", Tensor], Any]
IDIOMS: list[tuple[Idiom, str]] = []


def refused(told: str) -> Callable[[Idiom], Idiom]:
    """The idiom is refused with words that match `told`."""

    def note(function: Idiom) -> Idiom:
        IDIOMS.append((function, told))
        return function

    return note


class Model(nn.Module):
    """Layers, and what `idiom` does with them."""

    def __init__(self, idiom: Idiom) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.idiom = idiom

    def forward(self, x: Tensor) -> Any:
        return self.idiom(self, x)


def positive(x: Tensor) -> Tensor:
    return x[x > 0]  # line of index_in_a_helper


@refused(DATA)
def index_in_a_helper(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) + positive(x).mean()


@refused(DATA)
def boolean_index(model: Model, x: Tensor) -> Tensor:
    y = 2 * model.layer(x)
    return y[y > 0].sum()  # here


@refused(DATA)
def boolean_index_both_sides(model: Model, x: Tensor) -> Tensor:
    y = model.layer(x).clone()
    y[y > 0] = y[y > 0] * 2  # here
    return y


@refused(DATA)
def experts_by_nonzero(model: Model, x: Tensor) -> Tensor:
    chosen, out = model.router(x).argmax(-1), torch.zeros_like(x)
    for index, expert in enumerate(model.experts):
        rows = (chosen == index).nonzero(as_tuple=True)[0]  # here
        out[rows] += expert(x[rows])
    return out


@refused(DATA)
def experts_by_where(model: Model, x: Tensor) -> Tensor:
    chosen, out = model.router(x).argmax(-1), torch.zeros_like(x)
    for index, expert in enumerate(model.experts):
        (rows,) = torch.where(chosen == index)  # here
        out.index_add_(0, rows, expert(x[rows]))
    return out


@refused(DATA)
def experts_if_any(model: Model, x: Tensor) -> Tensor:
    chosen, out = model.router(x).argmax(-1), torch.zeros_like(x)
    for index, expert in enumerate(model.experts):
        if (chosen == index).any():  # here
            out[chosen == index] = expert(x[chosen == index])
    return out


@refused(DATA)
def experts_by_list(model: Model, x: Tensor) -> Tensor:
    chosen = model.router(x).argmax(-1)
    return torch.stack([model.experts[index](x[0]) for index in chosen.tolist()])  # here


@refused(DATA)
def expert_by_int(model: Model, x: Tensor) -> Tensor:
    expert = model.experts[int(model.router(x).sum(0).argmax())]  # here
    return expert(x)  # type: ignore[no-any-return]


@refused(DATA)
def tokens_of_experts(model: Model, x: Tensor) -> Tensor:
    chosen = model.router(x).argmax(-1)
    sizes = torch.bincount(chosen, minlength=3).tolist()  # here
    parts = x[chosen.argsort()].split(sizes)
    return torch.cat([expert(part) for expert, part in zip(model.experts, parts, strict=True)])


@refused(DATA)
def item(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * x.max().item()  # here


@refused(DATA)
def tolist(model: Model, x: Tensor) -> Tensor:
    first, *_ = x.sum(1).tolist()  # here
    return model.layer(x) * first


@refused(DATA)
def number_of_a_tensor(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * float(x.sum())  # here


@refused(DATA)
def value_as_key(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * {0: 1.0}.get(x.sum().long().item(), 2.0)  # here


@refused(DATA)
def asserted(model: Model, x: Tensor) -> Tensor:
    y = model.layer(x)
    assert (y < 1e9).all()  # here
    return y  # type: ignore[no-any-return]


@refused(DATA)
def compared_by_allclose(model: Model, x: Tensor) -> Tensor:
    y = model.layer(x)
    return y if torch.allclose(x, y) else x  # here


@refused(DATA)
def compared_by_equal(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) if torch.equal(x, 2 * x) else x  # here


@refused(DATA)
def loop_over_a_count(model: Model, x: Tensor) -> Tensor:
    for _ in range(x.abs().sum().long()):  # here
        x = model.layer(x)
    return x


@refused(DATA)
def nonzero(model: Model, x: Tensor) -> Tensor:
    return model.layer(x)[torch.nonzero(x > 0)[:, 0]]  # here


@refused(DATA)
def where_of_one(model: Model, x: Tensor) -> Tensor:
    rows, columns = torch.where(x > 0)  # here
    return model.layer(x)[rows, columns]


@refused(DATA)
def unique(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * torch.unique(x.long()).sum()  # here


@refused(DATA)
def masked_select(model: Model, x: Tensor) -> Tensor:
    return model.layer(x).masked_select(x > 0).sum()  # here


@refused(DATA)
def repeat_interleave(model: Model, x: Tensor) -> Tensor:
    return model.layer(x).repeat_interleave(x.abs().sum(1).long(), 0)  # here


@refused(DATA)
def slice_to_a_tensor(model: Model, x: Tensor) -> Tensor:
    return model.layer(x)[: x.abs().sum().long() % 2]  # here


@refused(DATA)
def narrow_at_a_tensor(model: Model, x: Tensor) -> Tensor:
    return model.layer(x).narrow(0, x.abs().sum().long() % 2, 1)  # here


@refused(DATA)
def one_hot_without_classes(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * F.one_hot(x.argmax(-1)).sum()  # here


@refused("torch.distributions looks at the values.*validate_args=False")
def distribution(model: Model, x: Tensor) -> Tensor:
    return torch.distributions.Normal(model.layer(x), x.exp()).rsample()  # here


@refused("sparse tensors.*use dense ones")
def sparse(model: Model, x: Tensor) -> Tensor:
    weight = x.to_sparse()  # here
    return model.layer(torch.sparse.mm(weight, model.layer.weight))


@refused("nested tensors.*pad")
def jagged(model: Model, x: Tensor) -> Tensor:
    y = torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)  # here
    return model.layer(y).values()  # type: ignore[no-any-return]


@refused(PACKED)
def packed_sequence(model: Model, x: Tensor) -> Tensor:
    both = x.expand(2, 2, 4)
    packed = rnn.pack_padded_sequence(both, torch.tensor([2, 1]), batch_first=True)  # here
    _, last = model.gru(packed)
    return last  # type: ignore[no-any-return]


@refused(PACKED)
def packed_in_another_order(model: Model, x: Tensor) -> Tensor:
    both = x.expand(2, 2, 4)
    packed = rnn.pack_padded_sequence(both, [1, 2], True, enforce_sorted=False)  # here
    output, _ = model.gru(packed)
    return rnn.pad_packed_sequence(output, batch_first=True)[0]


@refused(PACKED)
def packed_from_a_list(model: Model, x: Tensor) -> Tensor:
    output, _ = model.gru(rnn.pack_sequence([x, x[:1]]))  # here
    return output.data  # type: ignore[no-any-return]


@refused("uses torch.func or vmap")
def vmap(model: Model, x: Tensor) -> Tensor:
    y = model.layer(x)
    return torch.vmap(lambda row: 2 * model.layer(row))(y)  # here


@refused("uses torch.func or vmap")
def jvp(model: Model, x: Tensor) -> Tensor:
    y, tangent = torch.func.jvp(model.layer, (x,), (x,))  # here
    return y + tangent


@refused(GRADIENTS)
def func_grad(model: Model, x: Tensor) -> Tensor:
    return torch.func.grad(lambda inner: model.layer(inner).sum())(x)  # here


@refused(GRADIENTS)
def jacobian(model: Model, x: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(model.layer, x).sum() + model.layer(x)  # here


@refused("changes what the backward pass keeps")
def saved_tensors_hooks(model: Model, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: 2 * kept, lambda kept: kept):  # here
        return model.layer(x).pow(2)


@refused("hooks a tensor's gradient")
def hook_on_a_parameter(model: Model, x: Tensor) -> Tensor:
    model.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # here
    return model.layer(x)


@refused("freezes or thaws a parameter")
def frozen_on_the_way(model: Model, x: Tensor) -> Tensor:
    model.layer.requires_grad_(False)  # here
    y = model.layer(x)
    model.layer.requires_grad_(True)
    return y + model.router(x).sum()


@refused("freezes or thaws a parameter")
def frozen_by_its_attribute(model: Model, x: Tensor) -> Tensor:
    model.layer.weight.requires_grad = False  # here
    return model.layer(x)


@refused("writes into a parameter.*make it a buffer")
def written_parameter(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight.mul_(0.5)  # here
    return model.layer(x)


@refused(DATA_WRITE)
def written_data(model: Model, x: Tensor) -> Tensor:
    model.layer.weight.data.clamp_(-1, 1)  # here
    return model.layer(x)


@refused(DATA_WRITE)
def assigned_data(model: Model, x: Tensor) -> Tensor:
    y = model.layer(x)
    y.data = 2 * y.data  # here
    return y  # type: ignore[no-any-return]


@refused("draws from a torch.Generator of its own")
def generator(model: Model, x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(0)
    return model.layer(x) + torch.randn(2, 4, generator=own)  # here


@refused("seeds torch")
def seeded(model: Model, x: Tensor) -> Tensor:
    torch.manual_seed(0)  # here
    return model.layer(x) + torch.randn(2, 4)


@refused("converts a tensor to numpy")
def numpy(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) + torch.as_tensor(np.asarray(x.detach()))  # here


@refused("torch.stack")
def tensor_of_tensors(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * torch.tensor([x.sum(), x.mean()]).sum()  # here


@refused(NO_MEMORY)
def saved(model: Model, x: Tensor) -> Tensor:
    torch.save(model.layer(x), io.BytesIO())  # here
    return model.layer(x)


@refused(NO_MEMORY)
def address(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * x.data_ptr()  # here


@refused("starts a thread")
def thread(model: Model, x: Tensor) -> Tensor:
    results: list[Tensor] = []
    other = threading.Thread(target=lambda: results.append(model.layer(x)))
    other.start()  # here
    other.join()
    return results[0]


@refused("calls torch.distributed")
def world_size(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) / torch.distributed.get_world_size()  # here


@refused("moves a tensor to a GPU, and there is none")
def other_device(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) + torch.zeros(4, device="cuda")  # here


@dataclasses.dataclass
class Result:
    value: Tensor


class DynamicCache:
    """As models for generation return one."""


@refused("returns a Result, an object.*register_dataclass")
def returns_an_object(model: Model, x: Tensor) -> Result:
    return Result(model.layer(x))


@refused(
    r"returns a DynamicCache at output\['cache'\], a cache .*use_cache = False.*use_cache=False"
)
def returns_a_cache(model: Model, x: Tensor) -> dict[str, Any]:
    return {"logits": model.layer(x), "cache": DynamicCache()}


@refused("returns no tensor; return what the loss")
def returns_nothing(model: Model, x: Tensor) -> None:
    model.layer(x)


def line_of(function: Idiom) -> int:
    """The line that is marked, else that of `forward`: what is returned has no line."""
    lines = Path(__file__).read_text().splitlines()
    marks = [f"  # line of {function.__name__}"]
    first = function.__code__.co_firstlineno
    body = list(enumerate(lines, 1))[first:]
    marked = [number for number, line in enumerate(lines, 1) if line.endswith(marks[0])]
    for number, line in body:
        if line.endswith("  # here"):
            marked.append(number)
        if not line:
            break
    return marked[0] if marked else Model.forward.__code__.co_firstlineno


@pytest.mark.slow
@pytest.mark.parametrize(
    ("idiom", "told"), IDIOMS, ids=[function.__name__ for function, _ in IDIOMS]
)
def test_it_is_refused_at_its_own_line(idiom: Idiom, told: str) -> None:
    if idiom is other_device and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError) as caught:
        capture(Model(idiom), (torch.randn(2, 4),))
    message = caught.value.message
    assert "\n" not in message
    assert len(message) < 500
    where = re.match(r"(.+?):(\d+): Model cannot be captured: ", message)
    assert where is not None, message
    assert where[1] == __file__
    own_lines = hasattr(fx.proxy.TracerBase, "_filter_traceback_frames")
    if own_lines or "# here" in Path(__file__).read_text().splitlines()[int(where[2]) - 1]:
        assert int(where[2]) == line_of(idiom), message
    assert re.search(told, message), message


def test_a_parameter_is_as_frozen_after_a_refused_capture_as_before() -> None:
    model = Model(frozen_by_its_attribute)
    with pytest.raises(UserError):
        capture(model, (torch.randn(2, 4),))
    assert all(parameter.requires_grad for parameter in model.parameters())
