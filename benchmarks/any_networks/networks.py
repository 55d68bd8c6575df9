"""Networks as users write them, with the inputs they take. It must not import Shoal.

None of them is random (no Dropout) or mixes records (GroupNorm instead of BatchNorm), so that every way of computing
their gradients gives the same. All of them tell ten classes apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

CLASSES, WORDS, TOKENS = 10, 1000, 64
PICTURE, SIGNAL = (3, 32, 32), (8, 256)


@dataclass(frozen=True)
class Case:
    """A network, the shape of a record, and how many clients take steps of how many records."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    batch: int
    few: tuple[int, int]
    """Clients and batch at the small scale."""

    @property
    def pictures(self) -> bool:
        return len(self.shape) == 3

    def module(self) -> nn.Module:
        """The network with its first weights, always the same."""
        torch.manual_seed(0)
        return self.build()

    def records(self, rows: int) -> tuple[Tensor, Tensor]:
        """Random ones: what is in them does not change the time."""
        random = torch.Generator().manual_seed(0)
        labels = torch.randint(CLASSES, (rows,), generator=random)
        if self.shape == (TOKENS,):
            return torch.randint(WORDS, (rows, TOKENS), generator=random), labels
        return torch.rand(rows, *self.shape, generator=random), labels


def group_norm(channels: int, groups: int = 32) -> nn.Module:
    return nn.GroupNorm(min(groups, channels // 2), channels)


def resnet18() -> nn.Module:
    """torchvision's where it is installed, else the same network."""
    try:
        from torchvision.models import resnet18 as build
    except ImportError:
        return ResNet18()
    found: nn.Module = build(num_classes=CLASSES, norm_layer=group_norm)
    return found


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = group_norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = group_norm(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), group_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """torchvision's resnet18, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = group_norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, CLASSES)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class WideBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, kind: type[nn.Conv2d], scale_norm: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = group_norm(inputs, 16), group_norm(outputs, 16)
        self.scale = group_norm(outputs, 16) if scale_norm else nn.Identity()
        self.conv1 = kind(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = kind(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = kind(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(torch.relu(self.norm2(self.conv1(out))))
        return self.scale(out + shortcut)


class WideResNet(nn.Module):
    """WRN-16-4 of Zagoruyko and Komodakis (2016) with GroupNorm.

    With convolutions of the `kind` StandardisedConv2d it is as De et al. (2022) train it. With `scale_norm` every
    sum of a block and its shortcut is normalised too (Klause et al. 2022, https://arxiv.org/abs/2203.00324).
    """

    def __init__(self, kind: type[nn.Conv2d] = nn.Conv2d, scale_norm: bool = False) -> None:
        super().__init__()
        widths = ((16, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        self.blocks = nn.Sequential(
            kind(3, 16, 3, 1, 1, bias=False), *(WideBlock(*width, kind, scale_norm) for width in widths)
        )
        self.norm, self.head = group_norm(256, 16), nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.blocks(x))).mean((2, 3)))


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        group_norm(inputs, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        group_norm(outputs, 8),
        nn.ReLU(inplace=True),
    )


def mobilenet() -> nn.Module:
    """Depthwise separable convolutions as in MobileNet (Howard et al., 2017), for small pictures."""
    widths = ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), group_norm(32, 8), nn.ReLU(inplace=True))
    body = [separable(*width) for width in widths]
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def conv1d() -> nn.Module:
    """For signals, such as those of a sensor."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 64), (64, 128), (128, 128)):
        layers += [nn.Conv1d(inputs, outputs, 5, padding=2), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, CLASSES))


class Transformer(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.rnn = kind(width, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.rnn(self.words(tokens))
        return self.head(out[:, -1])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (32 // patch) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Scores(nn.Module):
    """A model of `transformers` that takes tokens and gives scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens).logits
        return scores


def lora() -> nn.Module:
    """BERT of two layers, frozen, with adapters of rank 8 on its queries and values, and a trained head."""
    import peft
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    adapter = peft.LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    return Scores(peft.get_peft_model(transformers.BertForSequenceClassification(config), adapter))


CASES = (
    Case("resnet18", resnet18, PICTURE, 10, 32, (4, 8)),
    Case("transformer", Transformer, (TOKENS,), 50, 16, (10, 16)),
    Case("lstm", partial(Recurrent, nn.LSTM), (TOKENS,), 50, 16, (10, 16)),
    Case("gru", partial(Recurrent, nn.GRU), (TOKENS,), 50, 16, (10, 16)),
    Case("vit", ViT, PICTURE, 10, 32, (4, 8)),
    Case("mobilenet", mobilenet, PICTURE, 10, 32, (4, 8)),
    Case("conv1d", conv1d, SIGNAL, 50, 16, (10, 16)),
    Case("wrn-16-4", WideResNet, PICTURE, 10, 32, (4, 8)),
    Case("lora", lora, (TOKENS,), 50, 16, (10, 16)),
)
