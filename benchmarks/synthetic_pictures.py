"""Features for small colour pictures, learnt from pictures that random processes make: no photograph is seen.

    python benchmarks/synthetic_pictures.py --out features.safetensors --minutes 3.5 [--device cuda] [--resume]
    python benchmarks/synthetic_pictures.py --show sheet.png

Half of the pictures are dead leaves with textures; the other half come from convolutional generators with random
oriented filters, as in Baradad et al. (2021), "Learning to See by Looking at Noise", https://arxiv.org/abs/2106.05963.
WRN-16-4 with GroupNorm (benchmarks/any_networks) learns to map two views of a picture near each other, and different
pictures far apart: the losses of Wang & Isola (2020), https://arxiv.org/abs/2005.10242. Settings are those of Tang
et al. (2023), https://arxiv.org/abs/2306.06076, but for the pictures, a hidden layer, the batch and the length.

The learning rate falls by a cosine over `--minutes`, so training ends annealed however fast the machine is. The file
holds the network's weights; with `--resume` training goes on from FILE.state with what is left of the minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn

from any_networks.networks import WideResNet

SIZE, CROP, WIDTH = 48, 32, 256
"""Pixels of a picture and of a view, and the number of features."""
LEAVES, TEXTURES, CHANNELS = 48, 512, 48
TURN = 0.4 * 2 * math.pi
"""The most by which colours are turned around grey."""


class PictureNetwork(WideResNet):
    """WRN-16-4 for pictures in [0, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - 0.5) * 4)

    def features(self, x: Tensor) -> Tensor:
        """What the last layer sees, [N, WIDTH]."""
        return torch.relu(self.norm(self.blocks((x - 0.5) * 4))).mean((2, 3))


class Projected(nn.Module):
    """The features on a sphere, through a hidden layer that is thrown away afterwards."""

    def __init__(self, network: PictureNetwork, outputs: int = 128) -> None:
        super().__init__()
        self.network = network
        self.projection = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.network.features(x)).float(), dim=1)


def uniform(random: Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=random, device=random.device)


def normal(random: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random, device=random.device)


def spectral_noise(count: int, channels: int, size: int, random: Generator) -> Tensor:
    """Fields [count, channels, size, size] whose amplitude falls as 1/f^a, a between 0.5 and 2, of deviation 1."""
    frequency = torch.fft.fftfreq(size, device=random.device)
    distance = (frequency[:, None] ** 2 + frequency[: size // 2 + 1].abs() ** 2).sqrt().clamp(min=1 / size)
    falls = distance ** -uniform(random, count, 1, 1, 1, low=0.5, high=2.0)
    found = torch.fft.irfft2(torch.fft.rfft2(normal(random, count, channels, size, size)) * falls, s=(size, size))
    return (found - found.mean((2, 3), keepdim=True)) / found.std((2, 3), keepdim=True)


def dead_leaves(count: int, random: Generator) -> Tensor:
    """Pictures [count, 3, SIZE, SIZE] of shapes that hide one another; of sizes that differ ninefold."""
    textures = spectral_noise(TEXTURES, 3, SIZE, random)
    places = torch.linspace(-1, 1, SIZE, device=random.device)
    rows, columns = places[:, None], places[None, :]

    def each(low: float = 0.0, high: float = 1.0) -> Tensor:
        return uniform(random, count, 1, 1, low=low, high=high)

    def surface() -> Tensor:
        """A colour, with a texture or stripes on it."""
        colour = each().unsqueeze(1) + 0.2 * normal(random, count, 3, 1, 1)
        chosen = textures[torch.randint(TEXTURES, (count,), generator=random, device=random.device)]
        angle, pitch = each(0, math.pi), each(4, 40)
        stripes = torch.sin(pitch * (rows * angle.sin() + columns * angle.cos()) + each(0, 2 * math.pi)).unsqueeze(1)
        drawn = torch.where(each().unsqueeze(1) < 0.3, stripes * uniform(random, count, 3, 1, 1), chosen)
        return colour + 0.25 * each().unsqueeze(1) * drawn

    picture = surface()
    for _ in range(LEAVES):
        down, across, angle = rows - each(-1.1, 1.1), columns - each(-1.1, 1.1), each(0, math.pi)
        radius, aspect, power = torch.exp(each(math.log(0.1), math.log(0.9))), each(0.4, 1), each(-1, 3)
        first = (down * angle.cos() + across * angle.sin()).abs() / radius
        second = (across * angle.cos() - down * angle.sin()).abs() / (radius * aspect)
        inside = first ** (2.0**power) + second ** (2.0**power) < 1  # from a star over an ellipse to a rectangle
        picture = torch.where(inside.unsqueeze(1), surface(), picture)
    return picture.clamp(0, 1)


def oriented_filters(outputs: int, inputs: int, random: Generator) -> Tensor:
    """Kernels [outputs, inputs, 3, 3]: a derivative of a Gaussian at an angle that an output has, or a Gaussian."""
    places = torch.arange(-1.0, 2.0, device=random.device)
    angle, scale = (
        uniform(random, outputs, 1, 1, 1, high=2 * math.pi),
        uniform(random, outputs, 1, 1, 1, low=0.5, high=1.5),
    )
    along = places[:, None] * angle.sin() + places[None, :] * angle.cos()
    bell = torch.exp(-(places[:, None] ** 2 + places[None, :] ** 2) / (2 * scale**2))
    smooth = uniform(random, outputs, inputs, 1, 1) < 0.2
    kernels = torch.where(smooth, bell, bell * along) * normal(random, outputs, inputs, 1, 1)
    return kernels / kernels.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def generated(count: int, random: Generator) -> Tensor:
    """Pictures of one random generator: noise, enlarged by oriented filters, in styles of each picture."""
    size = SIZE // 8
    x, picture = (
        spectral_noise(count, CHANNELS, size, random),
        torch.zeros(count, 3, size, size, device=random.device),
    )
    while True:
        for _ in range(2):
            style = 1 + F.leaky_relu(normal(random, count, CHANNELS, 1, 1), 0.2)
            x = F.conv2d(F.pad(x * style, (1,) * 4, mode="reflect"), oriented_filters(CHANNELS, CHANNELS, random))
            x = x / (x.square().mean((2, 3), keepdim=True).sqrt() + 1e-3)  # a style changes no channel's size
            noise = spectral_noise(count, 1, size, random) * 0.2 * normal(random, 1, CHANNELS, 1, 1)
            x = F.leaky_relu(x + noise + uniform(random, 1, CHANNELS, 1, 1, low=-1, high=1), 0.05)
        colours = normal(random, count, 1, CHANNELS) + 0.5 * normal(random, count, 3, CHANNELS)
        picture = picture / 2 + torch.einsum("nkc,nchw->nkhw", colours, x)
        if size == SIZE:
            break
        size *= 2
        x, picture = (F.interpolate(each, size=(size, size), mode="bilinear") for each in (x, picture))
    picture = (picture - picture.mean((2, 3), keepdim=True)) / (picture.std((2, 3), keepdim=True) + 1e-6)
    middle, spread = 0.45 + 0.15 * normal(random, count, 3, 1, 1), 0.22 + 0.06 * normal(random, count, 3, 1, 1)
    return (picture * spread + middle).clamp(0, 1)


def pictures(count: int, random: Generator, at_once: int = 1024) -> Tensor:
    """So many pictures as bytes [count, 3, SIZE, SIZE], by both processes in turn; a new generator every time."""
    made, at_once = [], min(at_once, -(-count // 2))
    for number in range(-(-count // at_once)):
        process = dead_leaves if number % 2 else generated
        made.append((process(at_once, random) * 255).round().byte())
    return torch.cat(made)[:count]


def view(x: Tensor, random: Generator) -> Tensor:
    """A crop of each picture, made 32 x 32, perhaps flipped, in other colours: the augmentations of Tang et al."""
    count = len(x)
    side = uniform(random, count, low=0.15).sqrt()
    aspect = torch.exp(uniform(random, count, low=-1, high=1) * math.log(4 / 3) / 2)
    tall, broad = (side * aspect).clamp(max=1), (side / aspect).clamp(max=1)
    flip = torch.where(uniform(random, count) < 0.5, -1.0, 1.0)
    down, across = ((1 - length) * uniform(random, count, low=-1) for length in (tall, broad))
    nothing = torch.zeros_like(side)
    places = torch.stack([broad * flip, nothing, across, nothing, tall, down], 1).view(-1, 2, 3)
    grid = F.affine_grid(places, [count, 3, CROP, CROP], align_corners=False)
    found = F.grid_sample(x.float() / 255, grid, padding_mode="reflection", align_corners=False)

    turn = uniform(random, count, low=-TURN, high=TURN)
    cos, sin, third = turn.cos(), turn.sin() / math.sqrt(3), torch.full_like(turn, 1 / 3)
    one, two, three = cos + (1 - cos) * third, (1 - cos) * third - sin, (1 - cos) * third + sin
    turned = torch.stack([one, two, three, three, one, two, two, three, one], 1).view(-1, 3, 3)
    strength = uniform(random, count, low=0.6, high=1.4) * (uniform(random, count) >= 0.2)  # grey at times
    colours = strength.view(-1, 1, 1) * turned + (1 - strength.view(-1, 1, 1)) / 3
    found = torch.einsum("nij,njhw->nihw", colours, found)
    contrast, light = (uniform(random, count, 1, 1, 1, low=0.6, high=1.4) for _ in range(2))
    middle = found.mean((1, 2, 3), keepdim=True)
    return (((found - middle) * contrast + middle) * light).clamp(0, 1)


def losses(first: Tensor, second: Tensor) -> Tensor:
    """Alignment and uniformity, both with exponent or temperature 2."""
    apart = [torch.pdist(x).square().mul(-2).exp().mean().log() for x in (first, second)]
    return (first - second).square().sum(1).mean() + (apart[0] + apart[1]) / 2


def learn(given: argparse.Namespace) -> None:
    """Learn the features, and write them."""
    device, state = torch.device(given.device), given.out.with_suffix(".state")
    cuda, limit = device.type == "cuda", given.minutes * 60
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")
    model = Projected(PictureNetwork()).to(device, memory_format=torch.channels_last)
    weights = {name: each for name, each in model.named_parameters() if not name.startswith("network.head")}
    rate = 0.12 * given.batch / 256
    optimizer = torch.optim.SGD(weights.values(), lr=rate, momentum=0.9, weight_decay=1e-4)
    spent, steps = 0.0, 0
    if given.resume and state.exists():
        found = load_file(state, device=given.device)
        for name, weight in weights.items():
            weight.data.copy_(found[f"weight.{name}"])
            optimizer.state[weight]["momentum_buffer"] = found[f"momentum.{name}"]
        with safe_open(state, "pt") as file:
            notes = file.metadata()
        spent, steps = float(notes["seconds"]), int(notes["steps"])

    started = time.perf_counter() - spent
    random = Generator(device).manual_seed(given.seed + steps)
    with torch.no_grad():
        pool = pictures(given.pool, random)
    print(json.dumps({"pictures": len(pool), "seconds": round(time.perf_counter() - started - spent, 1)}), flush=True)
    run = torch.compile(model) if cuda and given.compile else model
    saved = time.perf_counter()
    while (seconds := time.perf_counter() - started) < limit:
        if cuda and steps % 20 == 19:
            torch.cuda.synchronize()  # so that the clock is the GPU's
        optimizer.param_groups[0]["lr"] = (
            rate * min(1, (steps + 1) / 100) * 0.5 * (1 + math.cos(math.pi * seconds / limit))
        )
        with torch.no_grad():
            chosen = pool[torch.randint(len(pool), (given.batch,), generator=random, device=device)]
            x = torch.cat([view(chosen, random), view(chosen, random)]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            first, second = run(x).chunk(2)
        loss = losses(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % given.log == 0 or steps == 1:
            line = {"step": steps, "loss": round(loss.item(), 4), "seconds": round(time.perf_counter() - started, 1)}
            print(json.dumps(line), flush=True)
        if time.perf_counter() - saved > 60:
            saved = time.perf_counter()
            _save(state, weights, optimizer, saved - started, steps)
    _save(state, weights, optimizer, time.perf_counter() - started, steps)
    notes = {"steps": str(steps), "batch": str(given.batch), "seconds": f"{time.perf_counter() - started:.1f}"}
    kept = {name: value.detach().cpu().contiguous() for name, value in model.network.state_dict().items()}
    save_file(
        kept, given.out, notes | {"seed": str(given.seed), "pool": str(given.pool), "loss": f"{loss.item():.4f}"}
    )
    print(json.dumps({"features": str(given.out)} | notes), flush=True)


def _save(path: Path, weights: dict[str, Tensor], optimizer: torch.optim.SGD, seconds: float, steps: int) -> None:
    momentum = {name: optimizer.state[weight]["momentum_buffer"] for name, weight in weights.items()}
    held = {f"weight.{name}": weight.detach() for name, weight in weights.items()}
    held |= {f"momentum.{name}": value for name, value in momentum.items()}
    notes = {"seconds": str(seconds), "steps": str(steps)}
    save_file({name: value.contiguous() for name, value in held.items()}, path, notes)


def show(path: Path, seed: int) -> None:
    """A sheet of pictures by each process."""
    from PIL import Image

    random = Generator().manual_seed(seed)
    made = torch.cat([*(generated(8, random) for _ in range(8)), dead_leaves(64, random)])
    sheet = (made.view(8, 16, 3, SIZE, SIZE).permute(0, 3, 1, 4, 2).reshape(8 * SIZE, 16 * SIZE, 3) * 255).byte()
    Image.fromarray(sheet.numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("features.safetensors"))
    parser.add_argument("--minutes", type=float, default=3.5, help="how long to learn, pictures included")
    parser.add_argument("--pool", type=int, default=400_000, help="pictures that are made")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=int, default=200, help="steps between lines of output")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--show", type=Path, metavar="FILE", help="draw some of the pictures, and end")
    given = parser.parse_args()
    if given.show:
        show(given.show, given.seed)
    else:
        learn(given)


if __name__ == "__main__":
    main()
