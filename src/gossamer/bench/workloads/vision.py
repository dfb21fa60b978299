"""Small networks for images, in plain PyTorch."""

from torch import Tensor, nn


class Cnn(nn.Sequential):
    """Two convolutions and two linear layers, for 28 x 28 grey images.

    >>> sum(p.numel() for p in Cnn().parameters())
    206922
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is a strided 1 x 1 convolution where the shape changes."""

    def __init__(self, inner: int, outer: int, stride: int, norm: str) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False),
            _norm(norm, outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            _norm(norm, outer),
        )
        same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.path(x) + self.shortcut(x))


class ResNet20(nn.Sequential):
    """The network of the CIFAR papers, for 32 x 32 images with three channels.

    >>> sum(p.numel() for p in ResNet20().parameters())
    272282
    """

    def __init__(self, norm: str = "batch", classes: int = 10) -> None:
        blocks = list[nn.Module]()
        inner = 16
        for outer in (16, 32, 64):
            for place in range(3):
                stride = 2 if place == 0 and outer > 16 else 1
                blocks.append(Residual(inner, outer, stride, norm))
                inner = outer
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            _norm(norm, 16),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )
