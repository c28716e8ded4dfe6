"""Executor that connects the scheduler to an engine."""

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial

from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.reports import engine_stats
from amoeba_jax.errors import (
    ContextLengthError,
    DeadlineError,
    LayoutError,
    MemoryBudgetError,
    ProgramsNotReadyError,
    QueueFullError,
    RequestError,
)
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.options import LayersPerStep, PlacementKind, PlacementOptions, TransformOptions
from amoeba_jax.transform.report import PlacementReport, TransformReport
from serving.runtime.device_reader import DeviceReader
from serving.runtime.placements import placement_view
from serving.runtime.timings import Timings
from serving.runtime.waiting_view import WaitingView, by_name
from serving.scheduler import (
    Action,
    AmoebaConfig,
    ClusterView,
    DegreeLimits,
    Dispatch,
    Evict,
    InstanceView,
    LayerSizes,
    LimitBatch,
    Migrate,
    Offload,
    Outcome,
    PlacementChange,
    PlacementView,
    Policy,
    Preempt,
    Reject,
    RejectKind,
    Replicate,
    RunningRequest,
    ScaleDown,
    ScaleIn,
    ScaleOut,
    ScaleUp,
    Scheduler,
    invalid,
)
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.cocoserve.monitor import Monitor
from sharding.owners import Owner
from sharding.placement import Placement

logger = logging.getLogger(__name__)

_ERRORS = {
    RejectKind.NEVER_FITS: ContextLengthError,
    RejectKind.DEADLINE: DeadlineError,
    RejectKind.QUEUE_FULL: QueueFullError,
}
PLACEMENT_KINDS: dict[type[PlacementChange], PlacementKind] = {
    Replicate: "replicate",
    Evict: "evict",
    Migrate: "migrate",
    ScaleOut: "scale_out",
    ScaleIn: "scale_in",
}
"""Name of the kind of each action that changes a placement."""
OnTransformed = Callable[[ScaleUp | ScaleDown, "Future[TransformReport]"], None]
OnPlaced = Callable[[PlacementChange, "Future[PlacementReport]"], None]


class JaxExecutor:
    """`Executor` that carries out a policy's actions on an engine. Only the engine's thread uses it.

    Args:
        engine: engine that carries out the actions.
        layers_per_step: number of layers that a merge or split changes between two steps, or "auto" (`LLM.transform`).
        on_transformed: function `(action, future)` that is called when a merge or split has ended. The future has the
            report or the error.
        on_placed: function `(action, future)` that is called when a change of placement has ended. The future has the
            report or the error.
        monitor: averages of three quantities: vacancy (free shares of devices), SLO violations, and load. `snapshot`
            updates the averages.

    Attributes:
        waiting: waiting requests.
    """

    def __init__(
        self,
        engine: Engine,
        layers_per_step: LayersPerStep,
        on_transformed: OnTransformed,
        on_placed: OnPlaced,
        monitor: Monitor,
    ):
        self._engine, self._on_transformed, self._on_placed = engine, on_transformed, on_placed
        self._monitor = monitor
        self._layers_per_step: LayersPerStep = layers_per_step
        self.waiting = WaitingView(engine)
        self._devices = DeviceReader(engine)
        self._running: dict[str, Sequence] = {}
        self._preparing: dict[tuple[tuple[int, ...], int], TransformOptions] = {}
        """Requested transformations whose programs are being compiled, by (devices, degree)."""
        self._timings = Timings()
        self._placement_views: dict[int, tuple[Placement, PlacementView | None]] = {}
        cluster = engine.cluster
        base = engine.config.tensor_parallel_size
        self._degrees = tuple(
            DegreeLimits(
                tp,
                engine.capacity_tokens(tp),
                cluster.plan.buckets(tp).max_num_seqs,
                kept_tokens=cluster.plan.capacity_tokens(tp, min(tp, base)),
            )
            for tp in cluster.plan.degrees
        )

    @cached_property
    def _layer_sizes(self) -> LayerSizes:
        return layer_sizes(self._engine)

    def snapshot(self) -> ClusterView:
        """Return the present state of the cluster.

        Waiting requests that cannot start yet are left out (see `WaitingView`).
        """
        engine = self._engine
        self._preparing = {
            key: options for key, options in self._preparing.items() if not engine.changes.request_programs(options)
        }
        self._running = by_name(s for i in engine.cluster.all_instances for s in i.running if not s.finished)
        names = {id(sequence): name for name, sequence in self._running.items()}
        targets = engine.changes.targets()
        changes = engine_stats(engine).placements
        changing = {change.instance for change in changes} | {
            change.device for change in changes if change.kind in ("scale_out", "scale_in")
        }
        degrees = tuple(
            replace(limits, ready=engine.background_warmup.is_ready(limits.degree)) for limits in self._degrees
        )
        groups = {limits.degree: engine.cluster.sub_meshes.groups(limits.degree) for limits in degrees}
        refused = frozenset((g.device_indices, d.degree) for d in degrees if not d.ready for g in groups[d.degree])
        view = ClusterView(
            now_s=time.monotonic(),
            instances=tuple(
                self._instance_view(i, names, targets.get(i.id), i.id in changing) for i in engine.instances
            ),
            queue=self.waiting.snapshot(),
            degrees=degrees,
            num_devices=len(engine.cluster.sub_meshes.devices),
            base_degree=engine.config.tensor_parallel_size,
            page_size=engine.dims.page_size,
            max_model_len=engine.max_model_len,
            refused=refused.union(self._preparing),
            timing=self._timings.take(engine.instances),
            hidden_tokens=self.waiting.hidden_tokens,
            layer=self._layer_sizes,
            devices=self._devices.read(),
        )
        self._monitor.update(view)
        return view

    def _instance_view(
        self, instance: Instance, names: dict[int, str], target: int | None, changes_placement: bool
    ) -> InstanceView:
        paused = tuple(_requests(member, names) for member in instance.paused) if instance.paused_sequences else ()
        return InstanceView(
            id=instance.id,
            devices=instance.group.device_indices,
            capacity_tokens=instance.capacity_tokens,
            free_tokens=instance.page_counts().available * self._engine.dims.page_size,
            free_slots=instance.num_free_slots,
            running=_requests(instance, names),
            transition_to=target,
            coming_tokens=None if target is None else self._engine.changes.capacity_to_come(instance)[0],
            joinable_tokens=_joinable_tokens(instance, self._engine.dims.page_size),
            step_s=instance.pace.step_s,
            paused=paused,
            paused_degree=instance.paused[0].tp if paused else None,
            placement=self._placement_view(instance),
            changes_placement=changes_placement,
            batch_limit=instance.batch_limit,
        )

    def _placement_view(self, instance: Instance) -> PlacementView | None:
        """Return the devices that compute an instance's layers, in the form that policies use.

        Return None if all layers are on the instance's own devices. If the placement has not changed, return the same
        object as in the last snapshot, because making a new object takes 0.1 ms.
        """
        placement, (known, view) = instance.runner.placement, self._placement_views.get(instance.id, (None, None))
        if known is not placement:
            view = placement_view(placement, instance.group.device_indices)
            self._placement_views[instance.id] = placement, view
        return view

    def apply(self, action: Action) -> Outcome:
        """Carry out an action of a policy, or refuse it. A refused action changes no request and no instance.

        A merge or split is refused if its programs are not compiled yet. The compilation of these programs then starts.
        """
        if (problem := invalid(action)) is not None:
            return Outcome(False, problem)
        try:
            self._apply(action)
        except (RequestError, LayoutError, MemoryBudgetError) as error:
            return Outcome(False, str(error), soon=isinstance(error, ProgramsNotReadyError))
        except Exception as error:
            if not isinstance(action, ScaleUp | ScaleDown | PlacementChange):
                raise
            # For example, a program does not compile or load. The change has restored the previous state.
            logger.exception("a transformation or a change of a placement could not start")
            return Outcome(False, f"{type(error).__name__}: {error}")
        return Outcome(True)

    def _apply(self, action: Action) -> None:
        engine = self._engine
        match action:
            case Dispatch(request_id, instance_id):
                engine.admission.start(engine.cluster.instance(instance_id), self._waits(request_id))
            case ScaleUp(devices, degree) | ScaleDown(devices, degree):
                if all(i.tp == degree for i in engine.instances if i.id in devices):
                    raise RequestError(f"the instances on devices {list(devices)} have degree {degree} already")
                if kept := [i.id for i in engine.instances if i.id in devices and i.has_parallel_attention]:
                    raise LayoutError(f"instance {kept[0]} has data-parallel attention, which policies keep")
                options = self._options(action)
                if not engine.changes.request_programs(options):
                    self._preparing[devices, degree] = options
                    raise ProgramsNotReadyError(
                        f"programs for TP{degree} on devices {list(devices)} are being compiled"
                    )
                future = engine.transform(options)
                future.add_done_callback(lambda done: self._transformed(action, done))
            case Replicate() | Evict() | Migrate() | ScaleOut() | ScaleIn():
                placed = engine.changes.request(_placement_options(action))
                placed.add_done_callback(partial(self._on_placed, action))
            case Offload(request_id):
                engine.admission.offload(_known(self._running, request_id))
            case LimitBatch(instance_id, size):
                engine.limit_batch(instance_id, size)
            case Preempt(request_id):
                engine.admission.preempt(_known(self._running, request_id))
            case Reject(request_id, kind, reason):
                engine.sequences.reject(self._waits(request_id), _ERRORS[kind](reason))
            case _:
                raise RequestError(f"this executor cannot carry out {type(action).__name__}")

    def _options(self, action: ScaleUp | ScaleDown) -> TransformOptions:
        options = TransformOptions(action.degree, action.devices, layers_per_step=self._layers_per_step)
        if isinstance(action, ScaleDown):
            return options
        return replace(options, release_weights=action.release_weights, running=action.running)

    def _waits(self, name: str) -> Sequence:
        if (sequence := self.waiting.get(name)) is None:
            raise RequestError(f"request {name!r} does not exist")
        return sequence

    def _transformed(self, action: ScaleUp | ScaleDown, done: "Future[TransformReport]") -> None:
        pauses = isinstance(action, ScaleUp) and action.running == "pause"
        if done.exception() is None and not pauses:
            self._timings.transformed(done.result())
        self._on_transformed(action, done)


class EngineScheduler:
    """Scheduler of an engine, called by the engine (`SchedulerHook`). Any thread may replace `policy`.

    Args:
        engine: engine to schedule.
        policy: first policy.
        layers_per_step: see `JaxExecutor`.
        on_transformed: see `JaxExecutor`.
        on_placed: see `JaxExecutor`.
        monitor: see `JaxExecutor`. Any thread may read it.
    """

    interval_s = 1.0

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        layers_per_step: LayersPerStep = "auto",
        on_transformed: OnTransformed = lambda action, future: None,
        on_placed: OnPlaced = lambda action, future: None,
        monitor: Monitor | None = None,
    ):
        self._engine = engine
        monitor = monitor or Monitor(CocoServeConfig(), AmoebaConfig())
        self._executor = JaxExecutor(engine, layers_per_step, on_transformed, on_placed, monitor)
        self.scheduler = Scheduler(policy, self._executor)
        self._decided_on: object = None
        self._next_s = 0.0

    @property
    def policy(self) -> Policy:
        """Present policy. Any thread may replace it."""
        return self.scheduler.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.scheduler.policy = policy

    def schedule(self) -> None:
        """Start further samples (`n` above 1) of requests whose first sample runs. Then call the policy.

        While nothing changes, the policy is called only once a second.
        """
        engine = self._engine
        self._start_siblings()
        moving = [instance.id for instance in engine.instances if instance.transition is not None]
        placements = [instance.runner.placement for instance in engine.instances]
        state = (engine.sequences.num_changes, engine.instances, engine.changes.targets(), moving, placements)
        if state == self._decided_on and time.monotonic() < self._next_s:
            return
        # Decisions of the scheduler may change the state. If so, the next call runs the scheduler again.
        self._decided_on, self._next_s = state, time.monotonic() + self.interval_s
        present = engine.instances
        self.scheduler.tick()
        if any(instance.paused and instance not in present for instance in engine.instances):
            # Requests were paused, so the urgent request can start.
            self.scheduler.tick()

    def _start_siblings(self) -> None:
        """Start each waiting sample on the instance of its request's first sample, which has the prompt's pages."""
        engine = self._engine
        for sequence in [s for s in self._executor.waiting.siblings if not s.num_in_flight]:
            if (
                not sequence.beyond_share
                and not engine.admission.awaits_program(sequence)
                and (home := engine.admission.leader_home(sequence)) is not None
            ):
                with contextlib.suppress(RequestError):  # a step of this instance has failed
                    engine.admission.start(home, sequence)


def layer_sizes(engine: Engine) -> LayerSizes:
    """Return the bytes of a layer's weights and KV cache, measured on the first layer. Norms count as attention."""
    dims, plan = engine.dims, engine.cluster.memory_plan
    specs = engine.cluster.weights.specs.values()

    def num_bytes(layer: int | None, *owners: Owner) -> int:
        return sum(it.num_bytes(dims.dtype) for it in specs if it.layer == layer and (not owners or it.owner in owners))

    return LayerSizes(
        num_layers=dims.config.num_layers,
        attention_bytes=num_bytes(0, Owner.ATTENTION, Owner.NORM),
        ffn_bytes=num_bytes(0, Owner.FFN),
        kv_token_bytes=plan.page_bytes / dims.page_size,
        other_bytes=num_bytes(None),
    )


def _placement_options(action: PlacementChange) -> PlacementOptions:
    kind = PLACEMENT_KINDS[type(action)]
    if isinstance(action, ScaleOut | ScaleIn):
        return PlacementOptions(kind, action.device, action.instance_id)
    options = PlacementOptions(kind, action.device, action.instance_id, range(*action.layers), action.modules)
    return replace(options, move_kv=action.move_kv) if isinstance(action, Migrate) else options


def _joinable_tokens(instance: Instance, page_size: int) -> int:
    """Return the number of tokens that a new request could use on an instance that is merging or splitting.

    A new request would join one lane of the instance. A lane with a free slot has room for its free tokens, less one
    page for each of its running sequences. The result is the number for the lane with the most room. It is 0 if no lane
    has a free slot, or if the instance is neither merging nor splitting.
    """
    if instance.transition is None:
        return 0
    lanes = (lane for lane in instance.lanes if lane.has_free_slot)
    return page_size * max([0, *(lane.cache.num_available_pages - len(lane.running) for lane in lanes)])


def _known(sequences: dict[str, Sequence], name: str) -> Sequence:
    if name not in sequences:
        raise RequestError(f"there is no such request {name!r}")
    return sequences[name]


def _requests(instance: Instance, names: dict[int, str]) -> tuple[RunningRequest, ...]:
    return tuple(_running_request(names[id(s)], s) for s in instance.running if not s.finished)


def _running_request(name: str, sequence: Sequence) -> RunningRequest:
    return RunningRequest(
        name,
        num_tokens=sequence.num_tokens,
        max_total_tokens=sequence.max_total_tokens,
        # A decoding sequence has one token that is not computed: its last.
        uncomputed_tokens=max(max(len(sequence.prompt), sequence.num_tokens - 1) - sequence.num_computed, 0),
        priority=sequence.params.priority,
        arrival_s=sequence.arrival,
        deadline_s=sequence.deadline,
        beyond_share=sequence.beyond_share,
        queued_s=sequence.queued_s,
    )
