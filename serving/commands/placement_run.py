"""Implementation of `amoeba placement`, and of the commands that change which devices compute which layers."""

import json
import re
import shutil
from collections.abc import Callable

from amoeba_jax.client import Client, PlacementChange
from amoeba_jax.errors import RequestError
from amoeba_jax.shorten import shorten
from serving.commands.chat import server_errors
from sharding.ledger import format_bytes
from sharding.placement import Placement

_LAYERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_DONE = {
    "replicate": "replicated {layers} of instance {instance} on device {device}",
    "evict": "evicted {layers} of instance {instance} from device {device}",
    "migrate": "migrated {layers} of instance {instance} to device {device}",
    "scale_out": "replicated instance {instance} on device {device}, which is now an instance",
    "scale_in": "ended the instance on device {device}; its requests continue on instance {instance}",
}
_INDENT = 11


def parse_layers(text: str) -> range:
    """Return the layers of a text such as `5-14` (first and last layer) or `7`.

    Raises `RequestError` for other text.
    """
    if not (match := _LAYERS.fullmatch(text.strip())):
        raise RequestError(f"layers {shorten(text)} must be a first and a last layer, such as 5-14, or one layer")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise RequestError(f"layers {text} must begin with the lowest layer")
    return range(first, last + 1)


def run_change(change: Callable[[], PlacementChange]) -> None:
    """Run a change of placement (layers copied, moved or removed), and print its report."""
    with server_errors():
        done = change()
    subject = _DONE[done.kind].format(layers=_span(*done.layers), instance=done.instance, device=done.device)
    print(
        f"{subject} in {done.seconds:.2f} s: {format_bytes(done.copied_bytes)} of weights copied, "
        f"{format_bytes(done.shared_bytes)} already there, {format_bytes(done.kv_moved_bytes)} of KV cache moved, "
        f"{done.steps} steps meanwhile"
    )
    deltas = [
        f"device {device} {'+' if size > 0 else ''}{format_bytes(size)}"
        for device, size in enumerate(done.device_bytes_delta)
        if size
    ]
    if deltas:
        print(f"memory: {', '.join(deltas)}")


def show_placements(client: Client, instance: int | None, as_json: bool) -> None:
    """Print which devices compute each layer of an instance, as a drawing or as JSON.

    If `instance` is None, print all instances. After the drawings, print the changes in progress.
    """
    with server_errors():
        cluster = client.cluster()
        placements = {it.id: it.placement for it in cluster.instances if it.placement is not None}
        if instance is not None:
            placements = {instance: client.placement(instance)}
    if as_json:
        data = {str(number): placement.to_dict() for number, placement in placements.items()}
        print(json.dumps(data if instance is None else data[str(instance)], indent=2))
        return
    width = shutil.get_terminal_size((120, 0)).columns
    print("\n\n".join(f"instance {number}\n{draw(it, width)}" for number, it in placements.items()))
    for it in cluster.placements:
        print(
            f"\nin progress: {it.kind.replace('_', '-')}, {_span(*it.layers)} of instance {it.instance}, device "
            f"{it.device}: {it.state}, {it.layers_switched} layers switched"
        )


def draw(placement: Placement, width: int) -> str:
    """Return a drawing of a placement: a row for each device and a column for each layer.

    A filled cell means that the device computes the whole layer. `A` means only the attention, and `F` only the FFN. If
    the layers do not fit in `width` characters, the drawing has several blocks. After the drawing, the returned string
    has the text form of the placement.
    """
    columns = max((width - _INDENT) // 10 * 10, 10)
    lines = []
    for start in range(0, placement.num_layers, columns):
        block = range(start, min(start + columns, placement.num_layers))
        lines.append(" " * _INDENT + "".join(f"{layer:<10}" for layer in block if layer % 10 == 0).rstrip())
        for device in placement.devices:
            cells = "".join(_cell(placement, device, layer) for layer in block)
            lines.append(f"{f'device {device}':<{_INDENT}}{cells}")
    microbatches = "" if placement.num_microbatches == 1 else f"; {placement.num_microbatches} microbatches"
    return "\n".join([*lines, f"layers {placement}", f"embedding and head {placement.head}{microbatches}"])


def _cell(placement: Placement, device: int, layer: int) -> str:
    attention, ffn = (
        any(device in home.devices for home in modules[layer]) for modules in (placement.attention, placement.ffn)
    )
    return "█" if attention and ffn else "A" if attention else "F" if ffn else "·"


def _span(first: int, end: int) -> str:
    if first == end:
        return "all layers"
    return f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}"
