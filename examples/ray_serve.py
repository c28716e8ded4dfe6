"""amoeba-jax as a deployment of Ray Serve, for teams that run Ray.

Run `pip install 'ray[serve]'` and `pip install -e '.[http]'`, then

    python examples/ray_serve.py --model smollm2-135m --replicas 2

It serves OpenAI's API on http://127.0.0.1:8000. A replica has all devices of its host, its own engine and its own
scheduler, and its instances merge and split as under `amoeba serve`. Ray starts the replicas, restarts a replica whose
engine has failed, and balances the requests.

Every token crosses two actors (the replica and Ray's proxy). A test version got 0.3 to 0.6 times the tokens/s of
`amoeba serve`. docs/many_hosts.md compares it with the gateway, which has no such cost.
"""

import argparse
import asyncio
from typing import Any

from fastapi import FastAPI
from ray import serve

from amoeba_jax import LLM
from serving.grpc_server.config import ServerConfig
from serving.grpc_server.request_handler import State
from serving.grpc_server.server import Server
from serving.http_server.app import create_app, with_gate
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig

ingress = FastAPI()


@serve.deployment(
    health_check_period_s=2,
    health_check_timeout_s=10,
    # As long as running requests may take after a replica is told to stop.
    graceful_shutdown_timeout_s=60,
    # The engine batches and queues requests. Ray must not hold them back.
    max_ongoing_requests=1024,
)
@serve.ingress(ingress)
class Amoeba:
    """A replica: an engine with its scheduler, and OpenAI's API in the event loop of the replica."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._server: Server | None = None
        self._starting: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        """Load the model and mount the API. gRPC listens on a free port of the loopback interface."""
        server = Server(ServerConfig(port=0, metrics_port=None))
        await server.start()
        llm = await asyncio.to_thread(lambda: LLM(**self._settings, warmup=[1], progress=False))
        scheduling = Scheduling(llm, SchedulingConfig(), server.metrics)
        await server.attach(llm, scheduling=scheduling)
        handler = server.request_handler
        ingress.mount("/", with_gate(create_app(handler), handler))
        self._llm, self._scheduling, self._server = llm, scheduling, server

    async def check_health(self) -> None:
        """Load the model at the first call, and raise an exception if the engine has failed.

        A replica gets requests after its first successful check.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)
        if self._server is not None and self._server.request_handler.state is State.DEAD:
            raise RuntimeError("the engine has failed")

    async def __del__(self) -> None:
        """End running requests, and free the devices."""
        if self._server is not None:
            await self._server.drain(30.0)
            await self._server.stop()
            await asyncio.to_thread(self._scheduling.close)
            await asyncio.to_thread(self._llm.close)


def main() -> None:
    """Start the deployment, and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model of each replica")
    parser.add_argument("--num-devices", type=int, default=1, help="devices of each replica")
    parser.add_argument("--device-memory", default="1GiB", help="memory of each device")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas: at most one for each host")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica; 0 on hosts without GPUs")
    args = parser.parse_args()
    settings = {"model": args.model, "num_devices": args.num_devices, "device_memory": args.device_memory}
    deployment = Amoeba.options(num_replicas=args.replicas, ray_actor_options={"num_gpus": args.gpus})
    serve.run(deployment.bind(settings), name="amoeba", route_prefix="/", blocking=True)


if __name__ == "__main__":
    main()
