"""The two models of the GPU benchmarks, and how each is trained: ResNet-50 and GPT-2 (124 M parameters)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["TASKS", "GpuTask"]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, and a way around."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, 4 x width, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.around(x))


def resnet50() -> nn.Module:
    """The network of He et al. for 224 x 224 images and 1,000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and stage else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)).to(
        memory_format=torch.channels_last
    )


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, C] to [N, T, C]."""
        n, t, c = x.shape
        q, k, v = (z.view(n, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(n, t, c)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Gpt2(nn.Module):
    """GPT-2 of 124 M parameters, with tied embeddings."""

    def __init__(self, vocabulary: int = 50304, length: int = 1024, width: int = 768, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 12, dropout) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / (24**0.5 if name.endswith(("out.weight", "mlp.2.weight")) else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, T] to [N, T, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


@dataclass(frozen=True)
class GpuTask:
    """A model, its optimizer, its batch and its loss.

    Attributes:
        model: Makes the model.
        optimizer: Makes the optimizer.
        batch: Makes the global batch on a device.
        loss: Of the model on a part.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[str], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Any], Tensor]


def _images(device: str, count: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(count, 3, 224, 224, device=device, generator=generator)
    labels = torch.randint(0, 1000, (count,), device=device, generator=generator)
    return images.to(memory_format=torch.channels_last), labels


def _tokens(device: str, count: int = 64, length: int = 1024) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(0, 50304, (count, length + 1), device=device, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _classify(model: nn.Module, part: Any) -> Tensor:
    with torch.autocast(part[0].device.type, torch.bfloat16):
        return F.cross_entropy(model(part[0]), part[1])


def _continue(model: nn.Module, part: Any) -> Tensor:
    with torch.autocast(part[0].device.type, torch.bfloat16):
        return F.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten())


TASKS = {
    "resnet50": GpuTask(
        resnet50, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4), _images, _classify
    ),
    "gpt2": GpuTask(Gpt2, lambda p: torch.optim.AdamW(p, lr=6e-4, fused=True), _tokens, _continue),
}
