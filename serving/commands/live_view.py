"""A server's instances in the terminal, as they are now."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Table

from amoeba_jax.client import Client, Cluster

_INTERVAL_S = 0.25
_BAR_WIDTH = 24


@contextmanager
def live_view(client: Client, enabled: bool = True) -> Iterator[None]:
    """Show a table of the server's instances on stderr until the block ends; it is wiped out then."""
    if not enabled:
        yield
        return
    stop = threading.Event()
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def follow() -> None:
            while not stop.wait(_INTERVAL_S):
                try:
                    live.update(cluster_table(client.cluster(timeout_s=5)), refresh=True)
                except grpc.RpcError:
                    continue  # it is only a picture: users of the server see what is wrong

        thread = threading.Thread(target=follow, name="amoeba-live-view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def cluster_table(cluster: Cluster) -> Table:
    """A row an instance: its devices, what it runs, and how full its KV cache is."""
    table = Table(caption=f"{cluster.waiting} waiting, {cluster.accepted} accepted")
    for name in ("instance", "devices", "running", "KV cache"):
        table.add_column(name)
    for instance in cluster.instances:
        used = instance.kv_used_pages / max(instance.kv_total_pages, 1)
        filled = round(_BAR_WIDTH * used)
        table.add_row(
            f"TP{instance.tensor_parallel_size}",
            " ".join(map(str, instance.devices)),
            str(instance.running),
            f"{'█' * filled}{'·' * (_BAR_WIDTH - filled)} {used:4.0%} of {instance.kv_total_pages} pages",
        )
    return table
