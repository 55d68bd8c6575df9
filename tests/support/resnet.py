"""A residual network as torchvision writes it, but for its norms: ReLU and sums in place, strided blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 4, channels)


class BasicBlock(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), norm(outs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), norm(outs)
        self.downsample = None
        if stride != 1 or ins != outs:
            self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), norm(outs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18 with 64 channels and two blocks a stage."""

    def __init__(self, channels: int = 64, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False), norm(channels)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        widths = [channels, channels, 2 * channels, 4 * channels, 8 * channels]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                *(BasicBlock(widths[n + (b > 0)], widths[n + 1], 2 if n and not b else 1) for b in range(blocks))
            )
            for n in range(4)
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(widths[4], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))
