"""torchvision's networks with fewer or narrower layers; named in run configs as image_models:X."""

from __future__ import annotations

from torch import nn

from pipedream.capture.errors.user_code import import_torchvision

models = import_torchvision().models


class SmallVGG(models.VGG):
    """The layers and the forward pass of vgg16, an eighth as wide."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        widths = [width if width == "M" else width // 8 for width in models.vgg.cfgs["D"]]
        self.features = models.vgg.make_layers(widths)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            *(nn.Linear(64 * 49, 512), nn.ReLU(), nn.Dropout(0.0)),
            *(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.0)),
            nn.Linear(512, 10),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)


def small_vit() -> nn.Module:
    """Four layers. The head, which torchvision sets to zero, begins with random weights."""
    model = models.VisionTransformer(
        32, 16, 4, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def small_densenet() -> nn.Module:
    """Four dense blocks of a few layers, and the transitions between them."""
    return models.DenseNet(
        growth_rate=8, block_config=(2, 4, 4, 2), num_init_features=16, num_classes=10
    )
