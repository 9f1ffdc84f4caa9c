"""Small networks for the zoo, each with a constant that is no parameter, or a parameter that resembles a constant."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

NetworkAndInputs = tuple[nn.Module, tuple[Tensor, ...]]


class GraphNetwork(nn.Module):
    """Messages along edges, with sum, mean and maximum at nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(48, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        h = F.relu(self.a(x))
        n = x.shape[0]
        total = torch.zeros(n, 16).index_add(0, target, h[source])
        count = torch.zeros(n, 1).index_add(0, target, torch.ones(source.shape[0], 1)).clamp(min=1)
        index = target[:, None].expand(-1, 16)
        largest = torch.full((n, 16), -1e9).scatter_reduce(0, index, h[source], "amax")
        least = torch.full((n, 16), 3.0).scatter_reduce(0, index, self.b(h)[source], "amin", include_self=True)
        out: Tensor = self.o(torch.cat([total / count, largest.clamp(min=-9), least], 1))
        return out


class Written(nn.Module):
    """Constants that are padded, joined, chosen and assigned in part."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.token, self.o = nn.Linear(8, 8), nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 3)
        self.mask_token = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h, torch.full((x.shape[0], 1, 8), 0.5)], 1)
        h = torch.where(h > 1, torch.ones_like(h) * 2, h)
        h = torch.where(h[..., :1] > 0.9, self.mask_token, h)
        canvas = torch.zeros(x.shape[0], 9, 8)
        canvas[:, 1 : 1 + h.shape[1]] = h
        canvas[:, 0] = 1.5
        out: Tensor = self.o(canvas).mean(1)
        return out


class Detector(nn.Module):
    """Distances from bins, at points of a grid, times strides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 4, 1)
        self.box = nn.Conv2d(8, 24, 1)
        self.dfl = nn.Conv2d(6, 1, 1, bias=False)
        self.dfl.weight.data = torch.arange(6.0).view(1, 6, 1, 1)
        self.dfl.weight.requires_grad_(False)
        ys, xs = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        fine = torch.stack([xs, ys], -1).reshape(-1, 2) + 0.5
        self.register_buffer("anchors", fine)
        self.register_buffer("strides", torch.full((16, 1), 4.0))
        self.register_buffer("project", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        raw = self.box(F.silu(self.conv(x))).flatten(2)
        b = x.shape[0]
        by_conv = self.dfl(raw.view(b, 4, 6, 16).transpose(1, 2).softmax(1)).view(b, 4, 16).transpose(1, 2)
        by_product = raw.transpose(1, 2).reshape(b, 16, 4, 6).softmax(-1) @ self.project
        near, far = (by_conv + by_product).chunk(2, -1)
        return torch.cat([self.anchors - near, self.anchors + far], -1) * self.strides


class Anchors(nn.Module):
    """Boxes of three sizes at the cells of a grid, as older detectors decode them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 21, 3, 8, 1)
        self.register_buffer("sizes", torch.tensor([[10.0, 13], [16, 30], [33, 23]]).view(1, 3, 1, 1, 2))
        ys, xs = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        self.register_buffer("grid", torch.stack([xs, ys], -1).view(1, 1, 4, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).view(x.shape[0], 3, 7, 4, 4).permute(0, 1, 3, 4, 2).sigmoid()
        xy = (y[..., :2] * 2 - 0.5 + self.grid) * 8
        wh = (y[..., 2:4] * 2) ** 2 * self.sizes
        return torch.cat([xy, wh, y[..., 4:]], -1)


class Groups(nn.Module):
    """Normalizations of groups, of one group, without scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(1, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(4, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(1, 8, affine=False),
            nn.InstanceNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 1, 3),
            nn.InstanceNorm2d(1, affine=True),
            nn.GroupNorm(1, 1),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Spectral(nn.Module):
    """Spectral normalizations and weight normalizations, in both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            spectral_norm(nn.Linear(8, 8)),
            nn.ReLU(),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            nn.Tanh(),
            weight_norm(nn.Linear(8, 6)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(6, 6)),
            nn.Tanh(),
            weight_norm(nn.Linear(6, 6), dim=None),
            nn.Tanh(),
            weight_norm(nn.Linear(6, 1)),
        )
        self.conv = spectral_norm(nn.Conv1d(1, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.layers(x)[:, None].expand(-1, -1, 5))
        return out


class Numbers(nn.Module):
    """Single numbers that are parameters, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.act = nn.PReLU()
        self.acts = nn.Module()
        self.acts.alpha = nn.Parameter(torch.ones(1))
        self.acts.beta = nn.Parameter(torch.zeros(()))
        self.logit_scale = nn.Parameter(torch.tensor(2.6))
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.tensor(0.3))])
        self.head = nn.Linear(8, 1)
        self.out = nn.Conv1d(1, 1, 1)
        self.affine = nn.Module()
        self.affine.alpha = nn.Parameter(torch.ones(1, 1, 1))
        self.affine.beta = nn.Parameter(torch.zeros(1, 1, 1))
        self.norm = nn.Module()
        self.norm.register_buffer("eps", torch.tensor(1e-5))
        self.l.register_buffer("embed_scale", torch.tensor(8**0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.l(x)) * self.l.embed_scale
        h = self.acts.alpha * h.relu() ** 2 + self.acts.beta
        h = F.normalize(h, dim=-1) * self.logit_scale.exp()
        h = h + self.gates[0].tanh() * h + self.gates[1] * x
        h = h / (h.var(-1, keepdim=True) + self.norm.eps).sqrt()
        y = self.out(self.head(h)[:, None])
        return self.affine.alpha * y + self.affine.beta


class Recurrent(nn.Module):
    """Recurrent layers with omitted, constant and learned initial states."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.LSTM(8, 6, batch_first=True), nn.GRU(6, 6), nn.RNN(6, 5)
        self.start = nn.Parameter(torch.randn(1, 1, 5))
        self.o = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.a(x)
        h, _ = self.b(h.transpose(0, 1), torch.full((1, x.shape[0], 6), 0.5))
        h, _ = self.c(h, self.start.expand(-1, x.shape[0], -1).contiguous())
        out: Tensor = self.o(h[-1])
        return out


class Coordinates(nn.Module):
    """A positional bias that a small network computes from coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.mlp = nn.Linear(8, 8), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2, bias=False))
        self.queries = nn.Parameter(torch.randn(4, 8))
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        at = torch.stack(torch.meshgrid(torch.arange(-3.0, 4), torch.arange(-3.0, 4), indexing="ij"), -1)
        self.register_buffer("table", torch.sign(at) * torch.log2(at.abs() + 1) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        bias = torch.sigmoid(self.mlp(self.table)).permute(2, 0, 1).reshape(2, 7, 7)
        scores = self.q(self.queries) @ self.k(h).transpose(1, 2)
        return scores.softmax(-1) @ h + bias[:, :4, :1].mean(0)


class FourierFeatures(nn.Module):
    """Image positions from linspace, their sines, and a grid that warps the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.theta = nn.Conv2d(5, 6, 3, padding=1), nn.Linear(6, 6)
        lin = torch.linspace(-1, 1, 8)
        self.register_buffer("position", torch.stack(torch.meshgrid(lin, lin, indexing="xy"))[None])
        self.register_buffer("frequencies", 2.0 ** torch.arange(3.0))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(torch.cat([x, self.position.expand(x.shape[0], -1, -1, -1)], 1)).relu()
        theta = self.theta(h.mean((2, 3))).view(-1, 2, 3) * 0.1
        grid = F.affine_grid(theta, list(h.shape), align_corners=False)
        h = F.grid_sample(h, grid, align_corners=False).mean((2, 3))
        h = self.head(h)
        return torch.cat([torch.sin(h[..., None] * self.frequencies), h[..., None]], -1)


class Shared(nn.Module):
    """Fresh normalizations with equal scales, and a table that two branches share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm(8)
        self.l = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.b(self.l(self.a(self.words(tokens))))
        return h @ self.words.weight.T


class Kernels(nn.Module):
    """Radial functions at regular centres, a smoothing filter, a table of levels, decays of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(4, 1), nn.Linear(8, 4)
        self.register_buffer("centres", torch.linspace(0, 5, 8))
        self.register_buffer("levels", torch.tensor([1.0, 2.0, 4.0, 8.0]))
        self.levels_bias = nn.Parameter(torch.tensor([0.5, -0.25, 0.125, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(-((self.l(x) - self.centres) ** 2))
        return self.o(h) * self.levels + self.levels_bias


def images(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape),)


OWN: dict[str, Callable[[], NetworkAndInputs]] = {
    "own-graph": lambda: (GraphNetwork(), (torch.randn(10, 8), torch.randint(0, 10, (2, 30)))),
    "own-written": lambda: (Written(), images(2, 6, 8)),
    "own-detector": lambda: (Detector(), images(2, 3, 16, 16)),
    "own-anchors": lambda: (Anchors(), images(2, 3, 32, 32)),
    "own-groups": lambda: (Groups(), images(2, 3, 16, 16)),
    "own-spectral": lambda: (Spectral(), images(4, 8)),
    "own-numbers": lambda: (Numbers(), images(4, 8)),
    "own-recurrent": lambda: (Recurrent(), images(3, 5, 8)),
    "own-coordinates": lambda: (Coordinates(), images(2, 5, 8)),
    "own-fourier": lambda: (FourierFeatures(), images(2, 3, 8, 8)),
    "own-shared": lambda: (Shared(), (torch.randint(0, 20, (3, 6)),)),
    "own-kernels": lambda: (Kernels(), images(3, 4)),
}
