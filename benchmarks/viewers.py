"""Cost of the live page: tokens/s and processor time of a server with and without viewers, in turns.

    python benchmarks/viewers.py --model smollm2-135m --viewers 20

Viewers are plain HTTP clients in another process, which read as fast as they can. Differences of tokens/s below the
spread of the turns mean nothing. The processor time that viewers take is measured exactly on an idle server. A server
that decodes loses the same processor time.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import jax

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import Client
from serving.commands.local_server import local_server
from serving.grpc_server.config import ServerConfig

_VIEWERS = """
import asyncio, sys

async def watch(host, port):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET /cluster/events HTTP/1.1\\r\\nhost: {host}:{port}\\r\\n\\r\\n".encode())
    while await reader.read(65536):
        pass

async def main():
    await asyncio.gather(*(watch(sys.argv[1], int(sys.argv[2])) for _ in range(int(sys.argv[3]))))

asyncio.run(main())
"""


@contextmanager
def viewers(url: str, count: int) -> Iterator[None]:
    """Run `count` viewers of the live page in another process until the `with` block ends."""
    parts = urlsplit(url)
    process = subprocess.Popen([sys.executable, "-c", _VIEWERS, parts.hostname or "", str(parts.port), str(count)])
    try:
        time.sleep(1.0)  # until all are connected
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model")
    parser.add_argument("--num-devices", type=int, default=4, help="devices")
    parser.add_argument("--device-memory", default="1GiB", help="memory of each device")
    parser.add_argument("--viewers", type=int, default=20, help="open pages, at most 64")
    parser.add_argument("--turns", type=int, default=4, help="turns without and with viewers")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a turn")
    parser.add_argument("--requests", type=int, default=8, help="requests that run at the same time")
    parser.add_argument("--compile-cache", default=None, help="directory of compiled programs")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.num_devices)
    cache = {"compile_cache": args.compile_cache} if args.compile_cache else {}
    llm = LLM(args.model, num_devices=args.num_devices, device_memory=args.device_memory, warmup=[1], **cache)
    config = ServerConfig(port=0, metrics_port=None, http_port=0)
    with llm, local_server(llm, config=config) as server:
        assert server.page_url is not None
        idle = {count: cpu_share(server.page_url, count, args.seconds) for count in (0, 1, args.viewers)}
        for count, share in idle.items():
            print(f"idle server, {count} viewers: {1000 * share:.1f} ms of processor time a second", flush=True)
        stop = threading.Event()
        threads = [threading.Thread(target=generate, args=(server.address, stop)) for _ in range(args.requests)]
        for thread in threads:
            thread.start()
        time.sleep(3.0)  # until all requests run
        rates: dict[int, list[float]] = {0: [], args.viewers: []}
        for _ in range(args.turns):
            for count, of in rates.items():
                with viewers(server.page_url, count):
                    before, start = llm.stats.decode_tokens, time.perf_counter()
                    time.sleep(args.seconds)
                    of.append((llm.stats.decode_tokens - before) / (time.perf_counter() - start))
                print(f"{count} viewers: {of[-1]:.1f} tokens/s", flush=True)
        stop.set()
        for thread in threads:
            thread.join()
    without, watched = (statistics.median(of) for of in rates.values())
    added = idle[args.viewers] - idle[0]
    print(f"median {without:.1f} and {watched:.1f} tokens/s: {watched / without:.3f}x")
    print(f"{args.viewers} viewers take {1000 * added:.1f} ms of processor time a second")


def cpu_share(url: str, count: int, seconds: float) -> float:
    """Return the processor time of this process for each second, with `count` viewers."""
    with viewers(url, count):
        before, start = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        return (time.process_time() - before) / (time.perf_counter() - start)


def generate(address: str, stop: threading.Event) -> None:
    """Send one request after another until `stop` is set."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with Client(address) as client:
        while not stop.is_set():
            client.generate("Once upon a time", params)


if __name__ == "__main__":
    main()
