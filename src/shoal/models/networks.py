"""All networks by name, and the choice of one for a shape."""

from __future__ import annotations

from shoal.errors import ModelError
from shoal.models import (
    attack_networks,
    basic_networks,
    geyer_network,
    pfl_networks,
    ratings_network,
    scattering_networks,
    text_networks,
    thesis_networks,
    wei_networks,
)
from shoal.models.entry import Network, Shape
from shoal.registry import Registry


def _own() -> dict[str, Network]:
    families = (
        basic_networks,
        thesis_networks,
        geyer_network,
        pfl_networks,
        scattering_networks,
        wei_networks,
        attack_networks,
        ratings_network,
        text_networks,
    )
    return {network.name: network for family in families for network in family.NETWORKS}


NETWORKS = Registry("model", Network, _own, error=ModelError)
ALIASES = {"mlp": "thesis-mlp", "cnn": "thesis-cnn"}

TABLE = 256  # with more columns than this a flat input is taken for computed features, not for a table


def names() -> list[str]:
    """Every name that `build` knows, `auto` and the short forms included."""
    return ["auto", *ALIASES, *NETWORKS]


def network(name: str, shape: Shape) -> Network:
    """The network of that name; ModelError where there is none, or where it does not take the shape."""
    chosen = auto(shape) if name == "auto" else ALIASES.get(name, name)
    found = NETWORKS.find(chosen)
    _demand(found, shape)
    return found


def auto(shape: Shape) -> str:
    """A sensible network for the shape: small ones first, since noise grows with the parameters."""
    if len(shape) != 3:
        if len(shape) > 1 or shape[0] > TABLE:
            return "linear"
        return "adult-mlp" if shape[0] > 64 else "cancer-mlp"
    channels, side = shape[0], min(shape[1:])
    if channels % scattering_networks.GREY == 0:
        return "scatter-linear"
    if side < 4:
        return "linear"
    if side < 10:
        return "digits-cnn"
    return "alphacdp-cnn" if side <= 48 else "pfl-cifar-cnn"


def _demand(network: Network, shape: Shape) -> None:
    if network.least is None:
        return
    name, least = network.name, network.least
    if network.features == "scattering" and (len(shape) != 3 or shape[0] % scattering_networks.GREY):
        raise ModelError(
            f"model '{name}' takes scattering features (81 per colour channel, height, width), got shape "
            f"{shape}; set data.features=scattering, or choose model=auto"
        )
    if len(shape) != 3:
        raise ModelError(
            f"model '{name}' takes pictures (channels, height, width), got shape {shape}; choose model=auto"
        )
    if min(shape[1:]) < least:
        raise ModelError(
            f"model '{name}' takes pictures of at least {least}x{least}, got {shape[1]}x{shape[2]}; "
            f"choose model=auto, which picks '{auto(shape)}' here"
        )
