"""`amoeba simulate --calibrate`: measure this project's engine on this machine, for simulations of this machine."""

import asyncio
import platform
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.outputs import RequestOutput
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.transform.report import TransformReport
from serving.runtime.jax_executor import EngineScheduler
from serving.scheduler import Action, ClusterView, Dispatch, InstanceView, WaitingRequest
from serving.simulator.calibration import Calibration

_TOKENS, _FEWEST_TOKENS = 40, 8
"""Number of tokens to generate for each timed request, and its minimum if the cache is small."""
_SHORT = 4
"""Number of prompt tokens in a measurement of decode steps."""
_REPEATS = 3
_CHUNKS = 3
"""Number of chunks in the longest timed prompt."""


class _PinPolicy:
    """Policy that sends requests in turn to the first `width` instances, in device order."""

    name = "pin"

    def __init__(self, width: int):
        self._width, self._next = width, 0

    def decide(self, view: ClusterView) -> list[Action]:
        """Return actions that start waiting requests on the first `width` instances, in the order of the queue."""
        actions: list[Action] = []
        steady = [i for i in view.instances if i.transition_to is None][: self._width]
        given = {i.id: 0 for i in steady}
        for request in view.queue if steady else ():
            instance = steady[self._next % len(steady)]
            if given[instance.id] < instance.free_slots and _fits(instance, request):
                given[instance.id] += 1
                self._next += 1
                actions.append(Dispatch(request.request_id, instance.id, "measurement"))
        return actions


def _fits(instance: InstanceView, request: WaitingRequest) -> bool:
    return request.max_total_tokens <= instance.capacity_tokens


def run_calibration(
    path: Path,
    model: str,
    num_devices: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_tokens: int | None,
    max_model_len: int | None,
    layers_per_step: int,
) -> None:
    """Load a model, time its steps and transformations, and write the times to the file `path`.

    Raises `ConfigError` for invalid settings.
    """
    settings: dict[str, Any] = {"kv_cache_tokens": kv_cache_tokens, "max_model_len": max_model_len}
    with LLM(
        model,
        num_devices=num_devices,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=False,
        **{name: value for name, value in settings.items() if value is not None},
    ) as llm:
        calibration = calibrate(llm, layers_per_step)
    calibration.save(path)
    print(f"saved {path}", file=sys.stderr)


def calibrate(llm: LLM, layers_per_step: int = 1) -> Calibration:
    """Time the steps and transformations of an engine at each tensor-parallel degree that its devices allow.

    The engine must have no requests. In the end, the instances have the same degree as before.
    """
    engine = llm._engine
    config, layers = engine.config, engine.dims.config.num_layers
    degrees: list[int] = [*engine.cluster.sub_meshes.degrees()]
    before = _degree(llm)
    seqs = {tp: engine.cluster.plan.buckets(tp).max_num_seqs for tp in degrees}
    capacity = {tp: engine.capacity_tokens(tp) for tp in degrees}
    decode_s: dict[int, dict[int, float]] = {}
    prompt_s: dict[int, dict[int, float]] = {}
    prompts_s: dict[int, dict[int, float]] = {}
    latencies_s: list[float] = []
    context_s: dict[int, float] = {}
    crowding: dict[int, float] = {}
    prompt_crowding: dict[int, float] = {}
    up, down = [], []
    for tp in degrees:
        if tp != _degree(llm):
            llm.transform(tp)
        timer = _Timer(llm, capacity[tp])
        decode_s[tp] = timer.decodes([1 << power for power in range(seqs[tp].bit_length())])
        prompt_s[tp], alone_s = timer.prompts(engine.cluster.plan.buckets(tp).chunk_sizes)
        latencies_s += [max(alone_s[chunk] - step_s, 0.0) for chunk, step_s in prompt_s[tp].items()]
        prompts_s[tp] = timer.several_prompts(engine.cluster.plan.buckets(tp), alone_s, prompt_s[tp])
        context_s[tp] = timer.context_s(decode_s[tp][1])
        if tp == degrees[0] and len(engine.instances) > 1:
            crowding = timer.crowding(len(engine.instances), decode_s[tp])
            prompt_crowding = timer.prompt_crowding(len(engine.instances), alone_s, prompt_s[tp])
    for _ in range(_REPEATS if len(degrees) > 1 else 0):
        down.append(_layer_s(llm, degrees[0], layers_per_step, layers))
        up.append(_layer_s(llm, degrees[-1], layers_per_step, layers))
    page_layer_s = _page_layer_s(llm, degrees[0], degrees[-1]) if len(degrees) > 1 else 0.0
    if _degree(llm) != before:
        llm.transform(before)
    return Calibration(
        model=Path(config.model).name,
        num_devices=config.num_devices,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        page_size=config.page_size,
        max_model_len=llm.max_model_len,
        num_layers=layers,
        layers_per_step=layers_per_step,
        capacity_tokens=capacity,
        max_requests=seqs,
        decode_s=decode_s,
        prompt_s=prompt_s,
        prompts_s=prompts_s,
        few_rows=engine.cluster.plan.buckets(degrees[0]).few_rows,
        latency_s=median(latencies_s),
        context_s=context_s,
        crowding=crowding,
        prompt_crowding=prompt_crowding,
        up_layer_s=median(up) if up else 0.0,
        down_layer_s=median(down) if down else 0.0,
        page_layer_s=page_layer_s,
        machine={"platform": platform.platform(), "python": platform.python_version()},
    )


def _degree(llm: LLM) -> int:
    return next(iter(llm.instances)).tensor_parallel_size


def _layer_s(llm: LLM, degree: int, layers_per_step: int, layers: int) -> float:
    report = llm.transform(degree, layers_per_step=layers_per_step)
    return max((group.seconds for group in report.groups), default=0.0) / layers


def _page_layer_s(llm: LLM, low: int, high: int) -> float:
    """Measure how many seconds each used KV page adds to the switch of one layer between the degrees `low` and `high`.

    Time a switch with a partly full cache and a switch with an empty cache. The result is the difference of the two
    times, divided by the number of used pages.
    """
    found = []
    for turn in range(_REPEATS + 1):
        for degree in (high, low):
            before = low + high - degree
            if before != _degree(llm):
                llm.transform(before)
            full = asyncio.run(_switch_beside(llm, low, high, degree))
            llm.transform(before)
            empty_s = _switch_s(llm.transform(degree, variant="in_place", layers_per_step=1000))
            if turn and full is not None:  # the first compiles
                pages, full_s = full
                found.append((full_s - empty_s) / pages)
    return max(median(found), 0.0) if found else 0.0


async def _switch_beside(llm: LLM, low: int, high: int, degree: int) -> tuple[int, float] | None:
    """Transform the first `high` devices to `degree` while requests use about two fifths of the devices' KV cache.

    Return `(used pages, mean seconds to switch a layer)`, or None if all requests ended before the transformation.
    `degree` must be `low` or `high`.
    """
    engine, random = llm._engine, np.random.default_rng(0)
    capacity, instances = engine.capacity_tokens(low), high // low
    longest = min(capacity, llm.max_model_len)
    count = max(min(capacity // longest, engine.cluster.plan.buckets(low).max_num_seqs), 1) * instances
    prompt = max(longest * 2 // 5, 1)
    params = SamplingParams(temperature=0, max_tokens=max(longest - prompt, 1), ignore_eos=True)
    prompts = random.integers(3, engine.dims.config.vocab_size, (count, prompt)).tolist()
    llm.use_scheduler_hook(lambda engine: EngineScheduler(engine, _PinPolicy(instances if degree == high else 1)))
    streams = [llm.astream(tokens, params) for tokens in prompts]
    try:
        for stream in streams:
            await anext(stream)
        pages = sum(view.kv_used_pages for view in llm.instances if view.devices[0] < high)
        report = await asyncio.to_thread(
            llm.transform, degree, list(range(high)), variant="in_place", layers_per_step=1000
        )
    finally:
        for stream in streams:
            await stream.aclose()
        llm.remove_scheduler_hook()
    return (pages, _switch_s(report)) if pages else None


def _switch_s(report: TransformReport) -> float:
    """Return the mean seconds to switch a layer in a transformation.

    If several groups of devices changed, return the mean of the slowest group.
    """
    return max(
        sum(layer.plan_s + layer.kv_s + layer.weights_s for layer in group.layers) / len(group.layers)
        for group in report.groups
    )


class _Timer:
    """Stopwatch for requests that run on the first instances of an engine. Results are seconds or factors."""

    def __init__(self, llm: LLM, capacity: int):
        self._llm, self._capacity = llm, capacity
        self._random = np.random.default_rng(0)
        self._vocab = llm._engine.dims.config.vocab_size

    def _run(self, count: int, prompt: int, tokens: int, width: int = 1) -> list[RequestOutput]:
        llm = self._llm
        prompts = self._random.integers(3, self._vocab, (count, prompt)).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.use_scheduler_hook(lambda engine: EngineScheduler(engine, _PinPolicy(width)))
        try:
            return llm.generate(prompts, params)
        finally:
            llm.remove_scheduler_hook()

    def _tpot_s(self, count: int, prompt: int, width: int = 1) -> float:
        """Measure the seconds of a decode step while each of `width` instances runs `count` requests.

        Each request has `prompt` prompt tokens.
        """
        found, tokens = [], min(_TOKENS, self._room(count) - prompt)
        for _ in range(_REPEATS):
            outputs = self._run(count * width, prompt, tokens, width)
            found.append(median(_value(o.metrics, "tpot_s") for o in outputs))
        return median(found)

    def _ttft_s(self, prompt: int, count: int = 1) -> float:
        """Send `count` requests of `prompt` tokens at once. Return the seconds until all have their first token."""
        runs = [self._run(count, prompt, 4) for _ in range(2 * _REPEATS + 1)]
        return median(max(_value(output.metrics, "ttft_s") for output in outputs) for outputs in runs)

    def decodes(self, sizes: list[int]) -> dict[int, float]:
        """Measure the seconds of a decode step for each batch size in `sizes`. Return a dict by batch size.

        If a batch size does not fit the KV cache, it is left out.
        """
        fitting = [size for size in sizes if self._room(size) >= _SHORT + _FEWEST_TOKENS] or sizes[:1]
        for size in fitting:
            self._run(size, _SHORT, 4)  # compiles
        return {size: self._tpot_s(size, _SHORT) for size in fitting}

    def _room(self, count: int) -> int:
        """Return the maximum number of tokens of each of `count` equal requests on one instance."""
        page = self._llm._engine.config.page_size
        return min(self._capacity // page // count * page, self._llm.max_model_len)

    def prompts(self, chunks: tuple[int, ...]) -> tuple[dict[int, float], dict[int, float]]:
        """Measure prompts of different lengths. Return `(steps_s, alone_s)`, two dicts by chunk size in tokens.

        `steps_s` has the seconds of a step that computes one chunk of a longer prompt. `alone_s` has the TTFT of a
        prompt that consists of one chunk.
        """
        steps_s, alone_s = {}, {}
        for chunk in chunks:
            longest = min(self._capacity, self._llm.max_model_len) - 32
            one = min(chunk, longest)
            several = max(min(_CHUNKS if chunk == chunks[-1] else 2, longest // one), 1)
            for count in {1, several}:
                self._run(1, count * one, 4)  # compiles
            alone_s[chunk] = steps_s[chunk] = self._ttft_s(one)
            if several > 1:
                added_s = (self._ttft_s(several * one) - alone_s[chunk]) / (several - 1)
                steps_s[chunk] = min(max(added_s, alone_s[chunk] / 4), alone_s[chunk])
        return steps_s, alone_s

    def several_prompts(
        self, buckets: Buckets, alone_s: dict[int, float], steps_s: dict[int, float]
    ) -> dict[int, float]:
        """Measure a step with as many prompt chunks as a step can have. Return seconds by chunk size in tokens.

        If the prompts of a chunk size do not fit the cache or the context, the chunk size is left out. `alone_s` and
        `steps_s` are the results of the method `prompts`.
        """
        found = {}
        for chunk in buckets.chunk_sizes:
            count = buckets.chunk_rows(chunk)[-1]
            if count > 1 and count * (chunk + 16) <= self._capacity and chunk + 16 <= self._llm.max_model_len:
                self._run(count, chunk, 4)
                latency_s = alone_s[chunk] - steps_s[chunk]
                found[chunk] = max(self._ttft_s(chunk, count) - latency_s, steps_s[chunk])
        return found

    def context_s(self, short_s: float) -> float:
        """Measure how many seconds each token of context adds to a decode step.

        Return 0 if the cache is too small to measure this. `short_s` is the seconds of a decode step of one request
        with a short context.
        """
        length = min(self._capacity, self._llm.max_model_len) - _TOKENS - 16
        if length < 128:
            return 0.0
        self._run(1, length, 2)
        return max(self._tpot_s(1, length) - short_s, 0.0) / (length - _SHORT)

    def crowding(self, instances: int, decode_s: dict[int, float]) -> dict[int, float]:
        """Measure how much longer decode steps take while several instances are busy.

        Return a factor, at least 1, for each number of busy instances from 2 to `instances`. For one batch size, the
        factor is the duration of a step divided by its duration with one busy instance. The returned factor is the
        median over the batch sizes in `decode_s`. `decode_s` is the result of the method `decodes`.
        """
        found = {}
        for busy in range(2, instances + 1):
            ratios = [self._tpot_s(size, _SHORT, busy) / alone_s for size, alone_s in decode_s.items()]
            found[busy] = max(median(ratios), 1.0)
        return found

    def prompt_crowding(self, instances: int, alone_s: dict[int, float], steps_s: dict[int, float]) -> dict[int, float]:
        """Measure how much longer a step with a prompt takes while other instances decode.

        Return a factor, at least 1, for each number of busy instances from 2 to `instances`. The factor is the duration
        of the step divided by its duration if no other instance is busy. `alone_s` and `steps_s` are the results of the
        method `prompts`.
        """
        chunk = min(steps_s)
        latency_s = alone_s[chunk] - steps_s[chunk]
        found = {}
        for busy in range(2, instances + 1):
            times_s = [asyncio.run(self._ttft_beside_s(chunk, busy - 1)) for _ in range(2 * _REPEATS + 1)]
            found[busy] = max((median(times_s) - latency_s) / steps_s[chunk], 1.0)
        return found

    async def _ttft_beside_s(self, prompt: int, decoding: int) -> float:
        """Measure the TTFT of a prompt on an idle instance while `decoding` other instances decode."""
        llm, random = self._llm, self._random
        llm.use_scheduler_hook(lambda engine: EngineScheduler(engine, _PinPolicy(decoding + 1)))
        try:
            params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
            streams = [llm.astream(random.integers(3, self._vocab, 16).tolist(), params) for _ in range(decoding)]
            for stream in streams:
                await anext(stream)
            few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            tokens = random.integers(3, self._vocab, prompt).tolist()
            found = [output.metrics async for output in llm.astream(tokens, few)]
            for stream in streams:
                async for _ in stream:
                    pass
        finally:
            llm.remove_scheduler_hook()
        return _value(found[-1], "ttft_s")


def _value(metrics: Any, name: str) -> float:
    value = getattr(metrics, name)
    assert value is not None, f"a finished request has no {name}"
    return value
