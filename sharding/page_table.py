"""Program that prints the sizes of FFN tensors in pages, and the padding of their TP4 shards to whole pages.

    python -m sharding.page_table                                  # four well-known models, pages of 2 MiB
    python -m sharding.page_table --page-size 16 DIR/config.json   # KV pages of 16 tokens, as in the engine

GPUs map memory in pages of 2 MiB. A system that frees weights by unmapping them, such as Gyges, needs shards of whole
pages. In this engine, shards are whole pages too, but a page is the KV cache of `page_size` tokens in one layer.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sharding.heads import HeadLayout
from sharding.ledger import parse_bytes
from sharding.params import round_up_to_pages

TP = 4
"""Largest degree, and number of shards of each tensor."""
ITEM = 2
"""Bytes of an element: bf16."""


@dataclass(frozen=True)
class FfnShape:
    """Sizes of a model that determine its rows in the table."""

    name: str
    hidden_size: int
    ffn_size: int
    """Inner features of the FFN, or of each expert."""
    num_experts: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_hf(cls, name: str, config: dict) -> "FfnShape":
        """Return the sizes from the parsed `config.json` of a decoder with gated FFNs.

        Raises `ValueError` if a field is missing.
        """
        try:
            heads = config["num_attention_heads"]
            return cls(
                name=name,
                hidden_size=config["hidden_size"],
                ffn_size=config.get("moe_intermediate_size", config["intermediate_size"]),
                num_experts=config.get("num_local_experts", config.get("num_experts", 1)),
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads", heads),
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            )
        except KeyError as error:
            raise ValueError(f"{name}: config.json has no {error}") from None

    @property
    def tensors(self) -> dict[str, int]:
        """Number of elements of each FFN tensor of a layer, summed over experts.

        MoE models store gate and up as one tensor.
        """
        matrix = self.hidden_size * self.ffn_size * self.num_experts
        if self.num_experts > 1:
            return {"down": matrix, "gate_up": 2 * matrix}
        return {"down": matrix, "gate": matrix, "up": matrix}

    def kv_page_elems(self, page_size: int) -> int:
        """Return the number of elements of a KV page in the engine, including copies and padding of heads for TP4."""
        kv_heads = HeadLayout.plan(self.num_heads, self.num_kv_heads, TP).kv_heads
        return kv_heads * 2 * page_size * self.head_dim


# From the published config.json files.
MODELS = (
    FfnShape("GPT-OSS-120B", 2880, 2880, 128, 36, 64, 8, 64),
    FfnShape("GPT-OSS-20B", 2880, 2880, 32, 24, 64, 8, 64),
    FfnShape("Llama-3.1-70B", 8192, 28672, 1, 80, 64, 8, 128),
    FfnShape("Qwen2.5-32B", 5120, 27648, 1, 64, 40, 8, 128),
)


@dataclass(frozen=True)
class Row:
    """Size of one FFN tensor of one layer, in pages."""

    model: str
    tensor: str
    pages: float
    """Pages of the whole tensor, without padding."""
    shard_pages: float
    """Pages of a TP4 shard before padding."""
    stored_pages: int
    """Pages of a TP4 shard after padding to whole pages. The experts of a rank are padded together."""
    alone_pages: int | None = None
    """Pages of a TP4 shard if each expert is padded alone. None: the model has no experts."""

    @property
    def padding(self) -> float:
        """Padding of a TP4 shard, as a fraction of the shard before padding."""
        return self.stored_pages / self.shard_pages - 1

    @property
    def alone_padding(self) -> float | None:
        """Padding of a TP4 shard if each expert is padded separately, as a fraction. None: the model has no experts."""
        return None if self.alone_pages is None else self.alone_pages / self.shard_pages - 1


def rows(model: FfnShape, page_bytes: int) -> list[Row]:
    """Return the size of each FFN tensor of a model in pages of `page_bytes`. Each shard is padded separately.

    Raises `ValueError` if `page_bytes` is below 1.
    """
    if page_bytes < 1:
        raise ValueError(f"page_bytes is {page_bytes}; it must be at least 1")
    result, experts = [], model.num_experts
    for tensor, elements in model.tensors.items():
        shard = elements * ITEM // TP
        alone = None if experts == 1 or experts % TP else experts // TP * -(-elements * ITEM // experts // page_bytes)
        pages = elements * ITEM / page_bytes, shard / page_bytes, -(-shard // page_bytes)
        result.append(Row(model.name, tensor, *pages, alone))
    return result


def engine_rows(model: FfnShape, page_size: int) -> list[Row]:
    """Return the size of each FFN tensor of a model in KV pages of `page_size` tokens, padded as in the engine.

    The FFN size of a shard is rounded up until its gate-up tensor and its down tensor fill whole pages. If the model
    has experts, they are distributed over 4 ranks, and the experts of a rank are one tensor.

    Raises `ValueError` if the number of experts is not a multiple of 4.
    """
    page_elems = model.kv_page_elems(page_size)
    if model.num_experts % TP and model.num_experts > 1:
        raise ValueError(f"{model.name}: {model.num_experts} experts cannot be distributed evenly over {TP} ranks")
    matrices = model.num_experts // TP if model.num_experts > 1 else 1
    share = model.ffn_size if model.num_experts > 1 else -(-model.ffn_size // TP)
    rows = matrices * model.hidden_size
    shard = round_up_to_pages(share, (2 * rows, rows), page_elems)
    alone = round_up_to_pages(share, (2 * model.hidden_size, model.hidden_size), page_elems)
    result = []
    for tensor, columns in (("down", 1), ("gate_up", 2)):
        elements = columns * model.hidden_size * model.ffn_size * model.num_experts
        stored = columns * rows * shard // page_elems
        separate = None if model.num_experts == 1 else columns * rows * alone // page_elems
        result.append(Row(model.name, tensor, elements / page_elems, elements / TP / page_elems, stored, separate))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table that the command-line arguments select. None: the arguments of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m sharding.page_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "configs",
        nargs="*",
        type=Path,
        metavar="config.json",
        help="config files of models, or their directories (default: four well-known models)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--page-bytes", default="2MiB", help="size of a page (default: %(default)s)")
    size.add_argument("--page-size", type=int, help="tokens of a KV page, instead of a size in bytes")
    options = parser.parse_args(arguments)
    try:
        paths = [path / "config.json" if path.is_dir() else path for path in options.configs]
        models = [FfnShape.from_hf(path.resolve().parent.name, json.loads(path.read_text())) for path in paths]
        if options.page_size is None:
            title = f"pages of {options.page_bytes}"
            table = [row for model in models or MODELS for row in rows(model, parse_bytes(options.page_bytes))]
        else:
            if options.page_size < 1 or options.page_size & (options.page_size - 1):
                raise ValueError(f"--page-size is {options.page_size}; it must be a power of two, at least 1")
            title = f"pages of {options.page_size} tokens' KV of one layer"
            table = [row for model in models or MODELS for row in engine_rows(model, options.page_size)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    show(table, title)


def show(table: list[Row], title: str) -> None:
    """Print the rows, with a section for each model."""
    printed = Table(title=f"FFN tensors of one layer, bf16, {title}")
    for column in ("model", "tensor", "TP1", f"TP{TP}", f"TP{TP}, whole pages", "padding", "each expert alone"):
        printed.add_column(column, justify="left" if column in ("model", "tensor") else "right")
    previous = None
    for row in table:
        if previous not in (None, row.model):
            printed.add_section()
        name = "" if row.model == previous else row.model
        previous = row.model
        printed.add_row(
            name,
            row.tensor,
            f"{row.pages:,.10g}",
            f"{row.shard_pages:,.10g}",
            f"{row.stored_pages:,}",
            f"{row.padding:.2%}",
            "" if row.alone_padding is None else f"{row.alone_padding:.2%}",
        )
    Console(width=110).print(printed)


if __name__ == "__main__":
    main()
