"""Service amoeba.v1.AdminService: inspection and changes of a server's instances."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from amoeba_jax.errors import LayoutError, MemoryBudgetError, RequestError
from amoeba_jax.transform.options import ChangeOrder, PlacementKind, RunningRequests
from amoeba_jax.transform.report import PlacementReport, TransformVariant
from serving.grpc_server.messages import (
    placement_message,
    placement_report,
    placement_status,
    read_index,
    read_layers,
    read_modules,
)
from serving.grpc_server.request_handler import RequestHandler, State
from serving.grpc_server.statuses import LimitError, PreconditionError
from serving.grpc_server.transform_call import transform_instances
from serving.runtime.snapshot import take_snapshot

Context = grpc.aio.ServicerContext
_STATES = {
    State.LOADING: pb.SERVER_STATE_LOADING,
    State.READY: pb.SERVER_STATE_READY,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
    State.DEAD: pb.SERVER_STATE_DEAD,
}
_VARIANTS = {
    pb.TRANSFORM_VARIANT_UNSPECIFIED: TransformVariant.IN_PLACE_OVERLAPPED,
    pb.TRANSFORM_VARIANT_IN_PLACE_OVERLAPPED: TransformVariant.IN_PLACE_OVERLAPPED,
    pb.TRANSFORM_VARIANT_IN_PLACE: TransformVariant.IN_PLACE,
}
_RUNNING: dict[int, RunningRequests] = {
    pb.RUNNING_REQUESTS_MIGRATE: "migrate",
    pb.RUNNING_REQUESTS_PAUSE: "pause",
    pb.RUNNING_REQUESTS_WAIT: "wait",
}
_ORDERS: dict[int, ChangeOrder] = {pb.CHANGE_ORDER_LAYER: "layer", pb.CHANGE_ORDER_MEMORY_FIRST: "memory_first"}


class AdminService(pb_grpc.AdminServiceServicer):
    """RPCs with which operators inspect and change instances (copies of the model that serve requests)."""

    def __init__(self, request_handler: RequestHandler):
        self._handler = request_handler

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.Cluster:
        """Return the state of the server: instances, memory and queue."""
        return await self._cluster()

    async def WatchCluster(self, request: pb.WatchClusterRequest, context: Context) -> None:
        """Stream the state of the server (instances, memory and queue) at intervals."""
        interval_s = request.interval_s or 1.0
        if not 0.1 <= interval_s <= 3600:
            raise RequestError(f"interval_s={interval_s} must be from 0.1 to 3600")
        while True:
            await context.write(await self._cluster())
            await asyncio.sleep(interval_s)

    async def Transform(self, request: pb.TransformRequest, context: Context) -> pb.TransformResponse:
        """Merge or split instances."""
        variant = _VARIANTS.get(request.variant)
        if variant is None:
            known = ", ".join(f"{number} ({name})" for number, name in sorted(_VARIANTS.items()) if number)
            raise RequestError(f"variant={request.variant} is not known: it must be one of {known}")
        if (running := _RUNNING.get(request.running)) is None:
            raise RequestError(f"running={request.running} is not known")
        if (order := _ORDERS.get(request.order)) is None:
            raise RequestError(f"order={request.order} is not known")
        release = request.release_weights if request.HasField("release_weights") else True
        layers = request.layers_per_step or "auto"
        report = await transform_instances(
            self._handler,
            request.tensor_parallel_size,
            request.devices,
            variant=variant,
            release_weights=release,
            layers_per_step=layers,
            wait_for_programs=request.wait_for_programs,
            running=running,
            order=order,
        )
        return pb.TransformResponse(
            tensor_parallel_size=report.tensor_parallel_size,
            variant=request.variant or pb.TRANSFORM_VARIANT_IN_PLACE_OVERLAPPED,
            seconds=report.seconds,
            prepare_s=report.prepare_s,
            moved_bytes=report.moved_bytes,
            extra_bytes=report.extra_bytes,
            steps=report.steps,
            tokens=report.tokens,
            paused=sum(group.paused for group in report.groups),
            resumed=sum(group.resumed for group in report.groups),
            awaited_programs=report.awaited_programs,
            waited_s=report.waited_s,
        )

    async def GetPlacement(self, request: pb.GetPlacementRequest, context: Context) -> pb.Placement:
        """Return the placement of an instance: the devices that compute each of its layers."""
        backend = self._handler.backend
        instance = read_index("instance", request.instance, backend.num_devices)
        try:
            return placement_message(await self._handler.control(backend.placement, instance))
        except RequestError as error:
            raise PreconditionError(str(error)) from error

    async def Replicate(self, request: pb.ReplicateRequest, context: Context) -> pb.PlacementReport:
        """Replicate layers on another device."""
        return await self._change_placement("replicate", *self._read_change(request))

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.PlacementReport:
        """Remove copies of layers from a device."""
        return await self._change_placement("evict", *self._read_change(request))

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.PlacementReport:
        """Move layers to another device."""
        move_kv = request.move_kv if request.HasField("move_kv") else True
        return await self._change_placement("migrate", *self._read_change(request), move_kv)

    async def ScaleOut(self, request: pb.ScaleOutRequest, context: Context) -> pb.PlacementReport:
        """Turn an empty device into an instance, with a copy of the layers of another instance."""
        return await self._change_placement("scale_out", *self._read_devices(request))

    async def ScaleIn(self, request: pb.ScaleInRequest, context: Context) -> pb.PlacementReport:
        """End the instance on a device. Another instance continues the requests of the ended instance."""
        return await self._change_placement("scale_in", *self._read_devices(request))

    def _read_change(
        self, request: pb.ReplicateRequest | pb.EvictRequest | pb.MigrateRequest
    ) -> tuple[range, int, int, str]:
        layers = read_layers(request, self._handler.backend.dims.config.num_layers)
        return layers, *self._read_devices(request), read_modules(request.modules)

    def _read_devices(self, request: Any) -> tuple[int, int]:
        most = self._handler.backend.num_devices
        return read_index("device", request.device, most), read_index("instance", request.instance, most)

    async def _change_placement(self, kind: PlacementKind, *arguments: Any) -> pb.PlacementReport:
        """Call the method `kind` of the `LLM`, such as `replicate`. Return the report of the method."""
        if self._handler.state is not State.READY:
            raise PreconditionError("the server is shutting down: placements can no longer be changed")
        change = partial(getattr(self._handler.backend, kind), *arguments)
        # If the client leaves, the change continues and is still counted in the metrics.
        work = asyncio.ensure_future(self._counted(kind, change))
        return placement_report(await asyncio.shield(work))

    async def _counted(self, kind: PlacementKind, change: Callable[[], PlacementReport]) -> PlacementReport:
        handler, metrics = self._handler, self._handler.metrics
        try:
            report = await handler.transform(change)
        except LimitError:
            metrics.not_scaled(kind, "refused")
            raise
        except (LayoutError, RequestError, MemoryBudgetError) as error:
            metrics.not_scaled(kind, "refused")
            raise PreconditionError(str(error)) from error
        except Exception:
            metrics.not_scaled(kind, "failed")
            raise
        metrics.scaled(report)
        return report

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new requests, and wait until all running requests end. Return the number of aborted requests.

        Requests that still run after `request.timeout_s` seconds are aborted. If `timeout_s` is 0, none is
        aborted.
        """
        if not 0 <= request.timeout_s < float("inf"):
            raise RequestError(f"timeout_s={request.timeout_s} must be finite and at least 0")
        return pb.DrainResponse(aborted=await self._handler.drain(request.timeout_s or None))

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Context) -> pb.SetPolicyResponse:
        """Replace the scheduling policy of the server. Return the name of the previous policy."""
        scheduling = self._handler.scheduling
        if scheduling is None:
            raise PreconditionError("this server has no scheduler: only Transform changes instances")
        return pb.SetPolicyResponse(previous_policy=scheduling.set_policy(request.policy))

    async def _cluster(self) -> pb.Cluster:
        request_handler = self._handler
        snapshot = await request_handler.control(take_snapshot, request_handler.backend)
        weights, caches = snapshot.weight_bytes(), snapshot.kv_bytes()
        return pb.Cluster(
            state=_STATES[request_handler.state],
            instances=[
                pb.Instance(
                    id=view.id,
                    devices=view.devices,
                    tensor_parallel_size=view.tensor_parallel_size,
                    running=view.running,
                    kv_used_pages=view.kv_used_pages,
                    kv_total_pages=view.kv_total_pages,
                    kv_cached_pages=view.num_cached_pages,
                    paused=view.paused,
                    paused_degree=view.paused_degree,
                    phase=view.phase,
                    placement=placement_message(view.placement) if view.placement else None,
                )
                for view in snapshot.instances
            ],
            devices=[
                pb.DeviceMemory(
                    device=device,
                    budget_bytes=snapshot.memory.budget_bytes,
                    weight_bytes=weights[device],
                    kv_bytes=caches[device],
                    kv_used_bytes=snapshot.memory.kv_used_bytes[device],
                )
                for device in snapshot.memory.devices
            ],
            degrees=[
                pb.DegreePrograms(
                    tensor_parallel_size=it.degree,
                    ready=it.ready,
                    num_programs=it.num_programs,
                    num_ready=it.num_ready,
                )
                for it in snapshot.stats.degrees
            ],
            transformations=[
                pb.TransformStatus(
                    tensor_parallel_size=it.tensor_parallel_size,
                    devices=it.devices,
                    state=it.state,
                    programs_left=it.programs_left,
                    estimated_s=it.estimated_s,
                    layers_switched=it.layers_switched,
                    num_layers=it.num_layers,
                )
                for it in snapshot.stats.transformations
            ],
            placements=[placement_status(it) for it in snapshot.stats.placements],
            waiting=snapshot.waiting,
            accepted=len(request_handler.admission.ids),
        )
