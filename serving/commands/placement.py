"""Options of `amoeba placement`, `replicate`, `evict`, `migrate`, `scale-out` and `scale-in`.

Each command imports its implementation when it runs, because `amoeba --help` must not wait for gRPC.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.errors import clean_exit
from serving.flags import Flags, with_flags
from serving.grpc_server.config import DEFAULT_PORT

if TYPE_CHECKING:
    from amoeba_jax.client import Client, PlacementChange


@dataclass(frozen=True)
class AdminConnection:
    """Connection of an administrator to a running server."""

    target: str = f"127.0.0.1:{DEFAULT_PORT}"
    """Host and port of the server."""
    token_file: Path | None = None
    """File with the admin token. Default: the token in the environment."""
    tls_ca: Path | None = None
    """PEM file with the trusted certificates; enables TLS."""
    tls_certificate: Path | None = None
    """PEM file with the certificate of this client, if the server requires one."""
    tls_key: Path | None = None
    """PEM file with the private key of the certificate."""


class Modules(StrEnum):
    """Parts of a layer that a command changes: the whole layer, its attention or its FFN."""

    LAYER = "layer"
    ATTENTION = "attention"
    FFN = "ffn"


class MovableModules(StrEnum):
    """Parts of a layer that can migrate to another device.

    `kv`: the attention and its KV cache move, and the old device keeps a copy of the attention weights.
    """

    LAYER = "layer"
    ATTENTION = "attention"
    FFN = "ffn"
    KV = "kv"


_CONNECTION = Flags(
    "Connection",
    AdminConnection,
    spellings={"target": ("--target", "-t")},
    defaults={"target": AdminConnection.target},
)
Layers = Annotated[str, typer.Argument(help="First and last layer, such as 5-14, or a single layer.")]
Instance = Annotated[int, typer.Option(min=0, help="Id of the instance, which is its first device.")]
_MODULES_HELP = "Modules of the layers: attention (with its KV cache), ffn, or layer for both"


@with_flags(_CONNECTION)
def placement(
    values: dict[str, Any],
    instance: Annotated[int | None, typer.Option(min=0, help="Id of one instance.", show_default="all")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="JSON output: an object of placements by instance; with --instance, the placement alone, as "
            "`amoeba serve --placement` reads it.",
        ),
    ] = False,
) -> None:
    """Show the devices that compute each layer of a running server, and changes in progress."""
    with clean_exit():
        from serving.commands.placement_run import show_placements

        with _connect(values) as client:
            show_placements(client, instance, as_json)


@with_flags(_CONNECTION)
def replicate(
    values: dict[str, Any],
    layers: Layers,
    device: Annotated[int, typer.Argument(min=0, help="Device that gets the replicas.")],
    instance: Instance = 0,
    modules: Annotated[Modules, typer.Option(help=f"{_MODULES_HELP}.")] = Modules.LAYER,
) -> None:
    """Replicate layers of a running server on another device, which then computes a share of the requests.

    Needs the admin token if the server has one.
    """
    _change(values, layers, lambda client, chosen: client.replicate(chosen, device, instance, modules))


@with_flags(_CONNECTION)
def evict(
    values: dict[str, Any],
    layers: Layers,
    device: Annotated[int, typer.Argument(min=0, help="Device that loses the replicas.")],
    instance: Instance = 0,
    modules: Annotated[Modules, typer.Option(help=f"{_MODULES_HELP}.")] = Modules.LAYER,
) -> None:
    """Remove replicas of layers from a device of a running server. The memory of these replicas becomes free.

    Needs the admin token if the server has one.
    """
    _change(values, layers, lambda client, chosen: client.evict(chosen, device, instance, modules))


@with_flags(_CONNECTION)
def migrate(
    values: dict[str, Any],
    layers: Layers,
    device: Annotated[int, typer.Argument(min=0, help="Device that gets the modules.")],
    instance: Instance = 0,
    modules: Annotated[
        MovableModules,
        typer.Option(
            help=f"{_MODULES_HELP}; or kv for attention whose weights also stay on the source.",
        ),
    ] = MovableModules.LAYER,
    move_kv: Annotated[
        bool, typer.Option("--move-kv/--keep-kv", help="KV cache: moves too, or stays together with attention.")
    ] = True,
) -> None:
    """Move layers of a running server to another device. The memory that the layers leave becomes KV cache.

    Needs the admin token if the server has one.
    """
    _change(values, layers, lambda client, chosen: client.migrate(chosen, device, instance, modules, move_kv))


@with_flags(_CONNECTION)
def scale_out(
    values: dict[str, Any],
    device: Annotated[int, typer.Argument(min=0, help="Empty device.")],
    instance: Annotated[int, typer.Option(min=0, help="Id of the instance with the layers to replicate.")] = 0,
) -> None:
    """Turn an empty device of a running server into an instance. The instance serves requests while its layers arrive.

    Needs the admin token if the server has one.
    """
    _change(values, None, lambda client, _: client.scale_out(device, instance))


@with_flags(_CONNECTION)
def scale_in(
    values: dict[str, Any],
    device: Annotated[int, typer.Argument(min=0, help="Device whose instance ends.")],
    instance: Annotated[int, typer.Option(min=0, help="Id of the instance that continues the requests.")] = 0,
) -> None:
    """End the instance on a device of a running server. The requests of the instance continue on another instance.

    Needs the admin token if the server has one.
    """
    _change(values, None, lambda client, _: client.scale_in(device, instance))


def _change(values: dict[str, Any], layers: str | None, change: Callable[["Client", Any], "PlacementChange"]) -> None:
    """Connect to a server, call `change(client, range of layers)`, and print the report.

    `layers` is the text that the user gave, such as `5-14`. None: the command takes no layers.
    """
    with clean_exit():
        from serving.commands.placement_run import parse_layers, run_change

        chosen = None if layers is None else parse_layers(layers)
        with _connect(values) as client:
            run_change(lambda: change(client, chosen))


def _connect(values: dict[str, Any]) -> "Client":
    from serving.commands.chat import open_client

    options = AdminConnection(**values)
    return open_client(
        options.target,
        options.token_file,
        os.environ.get("AMOEBA_ADMIN_TOKEN"),
        options.tls_ca,
        options.tls_certificate,
        options.tls_key,
    )
