"""Small models whose joint graphs (forward and backward as ATen operators) tests divide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from image_models import models
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipedream.capture.export import capture
from pipedream.capture.programs.divisible import sum_means
from pipedream.capture.programs.joint import Joint, joint
from pipedream.capture.segment import freeze_constants, segment

WORDS, WIDTH, HEADS, LENGTH = 24, 12, 6, 6


class FusedAttention(nn.Module):
    """Query, key and value by one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return result


class ChunkedAttention(FusedAttention):
    """As GPT-2: cut in three before the heads are."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return result


class SeparateAttention(nn.Module):
    """Three layers, and the softmax written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.mask = nn.Buffer(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / shape[-1] ** 0.5
        weights = self.drop(scores.masked_fill(self.mask, float("-inf")).softmax(-1))
        result: Tensor = self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return result


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.first, self.second = attention, *map(nn.LayerNorm, (WIDTH, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        result: Tensor = x + self.drop(self.down(F.gelu(self.up(self.second(x)))))
        return result


class Transformer(nn.Module):
    """A language model, which returns its loss."""

    def __init__(self, attention: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(attention()) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Perceptron(nn.Module):
    """Two layers, a bend between, and the mean of the squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), target)


class Classifier(nn.Module):
    """A network for images, with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), target)


class TinyVGG(models.VGG):
    """torchvision's forward pass over a few narrow layers, with dropout."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.features = models.vgg.make_layers([4, "M", 6, 6, "M"])
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            *(nn.Linear(24, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 10))
        )


def narrow_resnet() -> nn.Module:
    """ResNet-18 with an eighth of its channels."""
    model = models.resnet18(num_classes=10)
    for module in model.modules():
        for name in ("in_channels", "out_channels"):
            if isinstance(module, nn.Conv2d) and getattr(module, name) > 3:
                setattr(module, name, getattr(module, name) // 8)
        if isinstance(module, nn.Conv2d):
            shape = (module.out_channels, module.in_channels, *module.kernel_size)
            module.weight = nn.Parameter(torch.randn(shape))
        if isinstance(module, nn.BatchNorm2d):
            module.__init__(module.num_features // 8)  # type: ignore[misc]
    model.fc = nn.Linear(64, 10)
    return model


def _tokens() -> tuple[Tensor, Tensor]:
    first, second = torch.randint(0, WORDS, (2, 4, LENGTH))
    return first, second


def _images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, size, size), torch.randint(0, 10, (4,))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (Perceptron, lambda: (torch.randn(4, 6), torch.randn(4, 6))),
    "transformer, fused": (lambda: Transformer(FusedAttention), _tokens),
    "transformer, chunked": (lambda: Transformer(ChunkedAttention), _tokens),
    "transformer, separate": (lambda: Transformer(SeparateAttention), _tokens),
    "vgg": (lambda: Classifier(TinyVGG()), lambda: _images(16)),
    "resnet18": (lambda: Classifier(narrow_resnet()), lambda: _images(32)),
}


@dataclass(frozen=True)
class Traced:
    """A joint graph, and values for all its placeholders."""

    joint: Joint
    values: dict[fx.Node, Tensor]


def trace(model: nn.Module, inputs: tuple[Tensor, ...], means: bool = True) -> Traced:
    """The model with its loss, in float64; the gradients of the inputs that have one, too. Without
    `means` these are sums and divisions.
    """
    model = model.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    captured = capture(model, inputs)
    whole = segment(captured, captured.working, keep=captured.outputs)
    whole = freeze_constants(whole, captured.owner)
    read = {node.target for node in whole.module.graph.find_nodes(op="get_attr")}
    named = [*whole.module.named_parameters(), *whole.module.named_buffers()]
    state = {name: tensor for name, tensor in named if name in read}
    by_name = dict(zip(captured.inputs, inputs, strict=True))
    given = [by_name[name] for name in whole.inputs]
    wants = [x.is_floating_point() for x in given]
    traced = joint(whole.module, state, given, wants, torch.enable_grad())
    if not means:
        traced = sum_means(traced)
    values = {node: state[name].detach().clone() for name, node in traced.weights.items()}
    values.update(zip(traced.inputs, given, strict=True))
    values.update(zip(traced.draws.nodes, traced.draws.module(), strict=True))
    values.update(
        (node, torch.randn(node.meta["val"].shape, dtype=torch.float64)) for node in traced.tangents
    )
    return Traced(traced, values)


def traced_model(name: str, means: bool = True) -> Traced:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    return trace(make(), inputs(), means)
