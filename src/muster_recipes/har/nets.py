"""The 1-D convolutional residual network: signals [n, channels, 128] to logits [n, classes]."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

_GROUPS = 8


class ConvNet(nn.Module):
    """A strided first layer, three residual stages that halve time and double the channels, and
    the mean over time. GroupNorm, so that a result does not depend on how a batch is cut.
    """

    def __init__(self, channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, width, 7, stride=2, padding=3, bias=False)
        self.stages = nn.Sequential(
            _Residual(width, width, 1),
            _Residual(width, 2 * width, 2),
            _Residual(2 * width, 4 * width, 2),
        )
        self.norm = nn.GroupNorm(_GROUPS, 4 * width)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * width, num_classes))

    def forward(self, signals: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.stages(self.first(signals))))
        logits: Tensor = self.head(hidden.mean(-1))
        return logits


class _Residual(nn.Module):
    """A norm before each convolution; the skip connection is a 1x1 convolution if shapes differ."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, channels)
        self.conv1 = nn.Conv1d(channels, out, 5, stride=stride, padding=2, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, out)
        self.conv2 = nn.Conv1d(out, out, 5, padding=2, bias=False)
        self.around: nn.Module = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Conv1d(channels, out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.relu(self.norm1(x)))
        hidden = self.conv2(F.relu(self.norm2(hidden)))
        out: Tensor = self.around(x) + hidden
        return out
