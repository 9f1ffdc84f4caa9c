"""Small networks in torch that together cover the common layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

ROWS = 3


def floats(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, (ROWS, *shape))


class Function(nn.Module):
    """Layers by name, and a function that computes with them."""

    def __init__(self, compute: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def activations() -> nn.Module:
    layers: list[nn.Module] = []
    for activation in (
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Hardswish(),
        nn.Hardsigmoid(),
        nn.ELU(),
        nn.SELU(),
        nn.CELU(1.3),
        nn.LeakyReLU(0.2),
        nn.PReLU(6),
        nn.Softplus(),
        nn.Softsign(),
        nn.Mish(),
        nn.ReLU6(),
        nn.LogSigmoid(),
        nn.Hardtanh(),
    ):
        layers += [nn.Linear(6, 6), activation]
    return nn.Sequential(*layers, nn.Linear(6, 6), nn.GLU())


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(2, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def depthwise() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = F.hardswish(m.norm0(m.wide(x)))
        h = F.relu6(m.norm1(m.deep(h)))
        h = h * F.hardsigmoid(m.up(F.relu(m.down(h.mean((2, 3), keepdim=True)))))
        return m.head((x + m.norm2(m.narrow(h))).mean((2, 3)))

    return Function(
        compute,
        wide=nn.Conv2d(4, 8, 1, bias=False),
        norm0=nn.BatchNorm2d(8),
        deep=nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        norm1=nn.BatchNorm2d(8),
        down=nn.Conv2d(8, 2, 1),
        up=nn.Conv2d(2, 8, 1),
        narrow=nn.Conv2d(8, 4, 1, bias=False),
        norm2=nn.BatchNorm2d(4),
        head=nn.Linear(4, 3),
    )


def convolutions() -> nn.Module:
    """Use convolutions in one, two and three dimensions, grouped, dilated and transposed."""

    def compute(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.grouped(x))
        h = torch.tanh(m.up(torch.tanh(m.dilated(h))))
        line = torch.tanh(m.line(h.flatten(2)))
        cube = torch.tanh(m.cube(h.unflatten(2, (2, -1))))
        return m.line_up(line).mean(2) + m.cube_up(cube).mean((2, 3, 4))

    return Function(
        compute,
        grouped=nn.Conv2d(4, 8, 3, padding=1, groups=2),
        dilated=nn.Conv2d(8, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 0)),
        up=nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        line=nn.Conv1d(4, 3, 5, stride=3),
        cube=nn.Conv3d(4, 3, (1, 2, 2)),
        line_up=nn.ConvTranspose1d(3, 5, 4, stride=2),
        cube_up=nn.ConvTranspose3d(3, 5, 2, bias=False),
    )


def norms() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = F.silu(m.groups(m.conv0(x)))
        h = F.silu(m.instances(m.conv1(h)))
        h = F.silu(m.local(m.conv2(h)))
        h = m.layer(h)
        return m.head(F.normalize(h.flatten(1), dim=1))

    return Function(
        compute,
        conv0=nn.Conv2d(2, 4, 3),
        groups=nn.GroupNorm(2, 4),
        conv1=nn.Conv2d(4, 4, 2),
        instances=nn.InstanceNorm2d(4, affine=True),
        conv2=nn.Conv2d(4, 4, 2),
        local=nn.LocalResponseNorm(3),
        layer=nn.LayerNorm([4, 2, 2]),
        head=nn.Linear(16, 3),
    )


def rms_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8, eps=1e-5), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))


def image() -> nn.Module:
    """Change the sizes of images."""

    def compute(m: Any, x: Tensor) -> Tensor:
        h = F.interpolate(torch.tanh(m.conv0(x)), scale_factor=2, mode="nearest")
        h = F.interpolate(torch.tanh(m.conv1(h)), scale_factor=1.5, mode="bilinear", align_corners=False)
        h = F.interpolate(torch.tanh(m.conv2(h)), size=(7, 5), mode="bilinear", align_corners=True)
        h = F.interpolate(h, scale_factor=2, mode="bicubic", align_corners=False)
        h = F.pixel_unshuffle(F.pixel_shuffle(m.conv3(h), 2), 2)
        return F.adaptive_max_pool2d(h, 1).flatten(1)

    return Function(
        compute,
        conv0=nn.Conv2d(2, 3, 3, padding=1),
        conv1=nn.Conv2d(3, 3, 3, padding=1),
        conv2=nn.Conv2d(3, 3, 3, padding=1),
        conv3=nn.Conv2d(3, 4, 3, padding=1),
    )


def pads() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.conv0(F.pad(x, (1, 2, 0, 1), mode="reflect")))
        h = torch.tanh(m.conv1(F.pad(h, (0, 1, 2, 0), mode="replicate")))
        h = torch.tanh(m.conv2(F.pad(h, (1, 1, 1, 1), value=0.5)))
        return F.max_pool2d(h, 3, 2, 1, ceil_mode=True).flatten(1)

    return Function(compute, conv0=nn.Conv2d(2, 3, 3), conv1=nn.Conv2d(3, 3, 2), conv2=nn.Conv2d(3, 2, 3))


def lstm() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        y, (h, c) = m.rnn(x)
        return m.head(y[:, -1]) + m.last(h[-1] + c[0])

    rnn = nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True)
    return Function(compute, rnn=rnn, head=nn.Linear(6, 2), last=nn.Linear(3, 2))


def gru() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        y, h = m.rnn(x)
        return m.head(y.mean(1)) + m.last(h[0])

    rnn = nn.GRU(4, 3, num_layers=2, batch_first=True, bidirectional=True)
    return Function(compute, rnn=rnn, head=nn.Linear(6, 2), last=nn.Linear(3, 2))


def recurrent() -> nn.Module:
    """Use plain recurrent layers without a bias; steps precede the batch."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return m.head(m.relu(m.tanh(x)[0])[0][-1])

    relu = nn.RNN(3, 4, nonlinearity="relu", bidirectional=True)
    return Function(compute, tanh=nn.RNN(4, 3, bias=False), relu=relu, head=nn.Linear(8, 2))


class Attention(nn.Module):
    """Attention with torch's fused function."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        return self.out(h.transpose(1, 2).flatten(2))


def attention() -> nn.Module:
    return nn.Sequential(Attention(8, 2, causal=False), nn.LayerNorm(8), Attention(8, 4, causal=True))


def encoder() -> nn.Module:
    first = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    second = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    return nn.Sequential(first, second)


def decoder() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        return m.layer(x[:, :3], m.memory(x[:, 3:]), tgt_mask=mask)

    layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Function(compute, layer=layer, memory=nn.Linear(8, 8))


def embedding() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        weights = (x != 0).unsqueeze(-1).to(m.table.weight.dtype)
        h = (m.table(x) * weights).sum(1) / weights.sum(1)
        return m.head(torch.relu(h))

    return Function(compute, table=nn.Embedding(11, 6, padding_idx=0), head=nn.Linear(6, 3))


def language_model() -> nn.Module:
    """Use GPT's block; the head is the table of the embedding."""

    def compute(m: Any, x: Tensor) -> Tensor:
        h = m.table(x) + m.places(torch.arange(x.shape[1]))
        h = h + m.attention(m.norm0(h))
        h = h + m.narrow(F.gelu(m.wide(m.norm1(h)), approximate="tanh"))
        return m.norm2(h) @ m.table.weight.T

    return Function(
        compute,
        table=nn.Embedding(11, 8),
        places=nn.Embedding(5, 8),
        norm0=nn.LayerNorm(8),
        attention=Attention(8, 2, causal=True),
        norm1=nn.LayerNorm(8),
        wide=nn.Linear(8, 12),
        narrow=nn.Linear(12, 8),
        norm2=nn.LayerNorm(8),
    )


class Weights(nn.Module):
    """A function with its own weights."""

    def __init__(self, compute: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.compute = compute
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, *self.weights)


def einsum() -> nn.Module:
    def compute(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        h = torch.tanh(torch.einsum("bij,hjk->bhik", x, a))
        h = torch.tanh(torch.einsum("bhik,bhjk,hk->bij", h, h, b) * 0.1)
        return torch.einsum("bii,ic->bc", h, c)

    return Weights(compute, (2, 4, 3), (2, 3), (4, 5))


def matrices() -> nn.Module:
    def compute(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        h = torch.tanh(x @ a)
        h = torch.baddbmm(b.expand(h.shape[0], 4, 4), h, h.transpose(1, 2), beta=0.5, alpha=0.1)
        h = torch.tril(h) + torch.triu(h, 1) * 0.5
        h = torch.matmul(h.unsqueeze(1), c)
        return (h @ d).squeeze(-1).flatten(1) + torch.addmm(x[0, :, :3], x[0], a)[0, 0]

    return Weights(compute, (4, 3), (1, 4, 4), (2, 4, 3), (3, 1))


def reductions() -> nn.Module:
    def compute(x: Tensor, a: Tensor) -> Tensor:
        h = x * a
        parts = [
            h.sum(1),
            h.mean(1),
            h.amax(1),
            h.amin(1),
            h.max(1).values,
            torch.logsumexp(h, 1),
            h.var(1),
            h.std(1, unbiased=False),
            h.norm(dim=1),
            h.abs().sum(1),
            (h.tanh() + 2).prod(1),
            torch.softmax(h, 1)[:, 0],
            torch.log_softmax(h, 2)[:, 1],
            torch.cumsum(h, 1)[:, -2],
            (h.square().mean(1) + 0.1).rsqrt(),
        ]
        return torch.stack(parts, 1)

    return Weights(compute, (4, 3))


def indexing() -> nn.Module:
    def compute(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = F.one_hot(x, 7).to(a.dtype) @ a + a[x]
        order = torch.tensor([[2, 0, 1, 3]]).expand(x.shape[0], 4).unsqueeze(-1).expand(-1, -1, 3)
        h = torch.gather(h, 1, order) + h.index_select(1, torch.tensor([3, 1, 1, 0]))
        spread = torch.zeros_like(h).scatter_add(1, order % 2, h * b)
        h = h.masked_fill(h.abs() < 0.1, 0.25) + torch.where(h > 0, spread, h * 0.5)
        return h.flip(1).roll(1, 2)[:, ::2]

    return Weights(compute, (7, 3), (4, 3))


def selection() -> nn.Module:
    def compute(x: Tensor, a: Tensor) -> Tensor:
        h = torch.tanh(x @ a)
        top, where = h.topk(2, dim=-1)
        low = h.sort(dim=-1).values[..., :1]
        parts = [
            top,
            torch.gather(h, -1, where - where % 2) * top,
            low,
            h.clamp(-0.5, 0.5),
            h.max(-1).values[..., None],
        ]
        return torch.cat(parts, -1)

    return Weights(compute, (4, 5))


def shapes() -> nn.Module:
    def compute(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = torch.tanh(x @ a).view(x.shape[0], -1, 2, 3)
        left, right = h.chunk(2, 1)
        h = torch.cat([left.permute(0, 1, 3, 2).reshape(x.shape[0], -1, 3), right.flatten(1, 2)], 1)
        one, two = h.split([3, h.shape[1] - 3], 1)
        h = torch.stack([one, two[:, :3]], 1) + b.expand(x.shape[0], 2, -1, -1)
        return h.repeat(1, 1, 2, 1).movedim(1, -1)

    return Weights(compute, (4, 6), (3, 3))


def branches() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 0, lambda h: m.one(h).tanh(), lambda h: m.two(h).sigmoid(), (x,))
        return m.head(h)

    return Function(compute, one=nn.Linear(4, 5), two=nn.Linear(4, 5), head=nn.Linear(5, 2))


class ScriptedBranches(nn.Module):
    """All rows of the batch use the same branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 100.0):
            h = torch.tanh(self.one(x))
        else:
            h = torch.sigmoid(self.two(x)) + torch.tanh(self.one(x)) * 0.5
        return self.head(h)


class ScriptedLoop(nn.Module):
    """A loop over the steps of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(7, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 3, dtype=x.dtype)
        for step in range(x.size(1)):
            h = torch.tanh(self.cell(torch.cat([x[:, step], h], 1)))
        return self.head(h)


Makers = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
NETS: dict[str, Makers] = {
    "activations": (activations, lambda: floats(6)),
    "attention": (attention, lambda: floats(5, 8)),
    "branches": (branches, lambda: floats(4)),
    "cnn": (cnn, lambda: floats(3, 8, 8)),
    "convolutions": (convolutions, lambda: floats(4, 8, 8)),
    "decoder": (decoder, lambda: floats(7, 8)),
    "depthwise": (depthwise, lambda: floats(4, 6, 6)),
    "einsum": (einsum, lambda: floats(4, 4)),
    "embedding": (embedding, lambda: tokens(11, 5)),
    "encoder": (encoder, lambda: floats(5, 8)),
    "gru": (gru, lambda: floats(5, 4)),
    "image": (image, lambda: floats(2, 4, 6)),
    "indexing": (indexing, lambda: tokens(7, 4)),
    "language_model": (language_model, lambda: tokens(11, 5)),
    "lstm": (lstm, lambda: floats(5, 4)),
    "matrices": (matrices, lambda: floats(4, 4)),
    "mlp": (mlp, lambda: floats(5)),
    "norms": (norms, lambda: floats(2, 6, 6)),
    "pads": (pads, lambda: floats(2, 5, 5)),
    "recurrent": (recurrent, lambda: floats(5, 4)),
    "reductions": (reductions, lambda: floats(4, 3)),
    "rms_norm": (rms_norm, lambda: floats(5)),
    "scripted_branches": (ScriptedBranches, lambda: floats(4)),
    "scripted_loop": (ScriptedLoop, lambda: floats(5, 4)),
    "selection": (selection, lambda: floats(3, 4)),
    "shapes": (shapes, lambda: floats(4, 4)),
}
