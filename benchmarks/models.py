"""The models that the benchmarks train, each with its data, loss, batch size and optimizer.

A `Task` is everything that a training loop needs, so that evenstep and its peers train exactly the same thing. All
data is synthetic and deterministic. Nothing here knows how a step is timed or on how many workers it runs.

Parameters: ``mlp`` 12,590,080, ``resnet`` 175,258, ``transformer`` 3,438,080, ``tiny`` 144 (the base line of
``memory.py``). ``resnet50`` is not a task: ``batchnorm_gpu.py`` trains it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 10
VOCABULARY = 1024
SEQUENCE = 64


@dataclass(frozen=True)
class Task:
    """One model and all that is needed to train it.

    Attributes:
        name: The name in flags and tables.
        model: Makes the model, with the same weights on every call.
        dataset: Makes the data set; its argument is the number of samples.
        loss: The mean loss of a model on one part of a batch, ``loss(model, part)``.
        batch_size: The global batch size.
        optimizer: Makes the optimizer for the given parameters.
        steps: How many steps one measurement times unless told otherwise (a few seconds' worth).
    """

    name: str
    model: Callable[[], nn.Module]
    dataset: Callable[[int], TensorDataset]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    batch_size: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int


def mlp(widths: tuple[int, ...] = (1024, 2048, 2048, 2048, 1024)) -> nn.Module:
    """Make a multilayer perceptron with ReLU between its layers; 12,590,080 parameters at the default widths."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut; input [n, inputs, h, w], output [n, outputs, h', w']."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Make the block; a shortcut that changes shape is a 1x1 convolution with batch norm."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet(widths: tuple[int, ...] = (16, 32, 64), blocks: int = 2) -> nn.Module:
    """Make a residual network for images [n, 3, 32, 32] with `blocks` basic blocks at each width."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(BasicBlock(inputs, width, 2 if stage > 0 and block == 0 else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, NUM_CLASSES))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm around a shortcut; four times `width` channels come out."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Make the block; a shortcut that changes shape is a 1x1 convolution with batch norm."""
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        hidden = self.relu(self.norm1(self.conv1(x)))
        hidden = self.relu(self.norm2(self.conv2(hidden)))
        hidden = self.norm3(self.conv3(hidden))
        hidden += self.shortcut(x)
        return self.relu(hidden)


def resnet50() -> nn.Module:
    """Make a ResNet-50 for images [n, 3, 224, 224] and 1,000 classes; 25,557,032 parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage > 0 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a layer norm; [n, t, width] to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the block; the feed-forward layer is four times as wide."""
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        n, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        fed: Tensor = self.feed(self.norm2(x))
        return x + fed


class LanguageModel(nn.Module):
    """A causal language model: tokens [n, t] to logits [n, t, VOCABULARY], embedding and output weights tied."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        """Make the model for sequences of up to `SEQUENCE` tokens."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(SEQUENCE, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the token after each position."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def transformer(width: int = 256, layers: int = 4, heads: int = 4) -> nn.Module:
    """Make the causal language model, without dropout."""
    torch.manual_seed(0)
    return LanguageModel(width, layers, heads)


def vectors(num_samples: int, inputs: int = 1024, classes: int = 1024) -> TensorDataset:
    """Make random vectors [num_samples, inputs] with random classes [num_samples]."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, inputs, generator=generator),
        torch.randint(classes, (num_samples,), generator=generator),
    )


def images(num_samples: int) -> TensorDataset:
    """Make random images [num_samples, 3, 32, 32] with random classes [num_samples]."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 3, 32, 32, generator=generator),
        torch.randint(NUM_CLASSES, (num_samples,), generator=generator),
    )


def sentences(num_samples: int) -> TensorDataset:
    """Make random token sequences [num_samples, SEQUENCE + 1]; the model predicts each token from those before it."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(VOCABULARY, (num_samples, SEQUENCE + 1), generator=generator))


def classify(model: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy of a classifier on (inputs, classes)."""
    return F.cross_entropy(model(part[0]), part[1])


def predict_next(model: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy of a language model on (tokens,)."""
    tokens = part[0]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make plain SGD."""
    return torch.optim.SGD(parameters, lr=0.01)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4)


TASKS = {
    task.name: task
    for task in (
        Task("mlp", mlp, vectors, classify, 256, sgd, steps=16),
        Task("resnet", resnet, images, classify, 128, momentum, steps=10),
        Task("transformer", transformer, sentences, predict_next, 32, adamw, steps=8),
        Task("tiny", lambda: mlp((8, 8, 8)), lambda n: vectors(n, 8, 8), classify, 32, adamw, steps=20),
    )
}
