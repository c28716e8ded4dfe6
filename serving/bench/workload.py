"""Workloads of a benchmark: lengths and arrival times of the requests."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from amoeba_jax.errors import ConfigError
from amoeba_jax.sampling_params import MAX_SLO_S
from serving.bench.arrivals import draw_arrivals
from serving.bench.burst import HIGH, LOW, draw_phases, read_rates
from serving.bench.trace_file import BLOCK_TOKENS, Draw, fit_context, read_trace, scale_rate

DATASETS = ("random", "mix", "burst", "trace")
DEFAULT_NUM_PROMPTS = 1000
MAX_REQUESTS = 1_000_000
MIN_BURSTINESS = 0.01
"""Minimum of `burstiness`. Below it, nearly all requests would arrive at once."""
# Independent random streams, so that a change of one setting does not affect others.
_ARRIVALS, _LONG_ARRIVALS, _LENGTHS, _PROMPTS, _PRIORITIES, _TRACE = range(6)


@dataclass(frozen=True)
class WorkloadConfig:
    """Settings of a benchmark's workload. Lengths are in tokens. Raises `ConfigError` for an invalid value."""

    dataset_name: str = "random"
    """Kind of workload.

    `random`: lengths around two means. `mix`: many short and a few long requests. `trace`: lengths and times of a file.
    `burst`: lengths as in `random`, in phases of a low and a high rate.
    """
    num_prompts: int | None = None
    """Maximum number of requests. Default: all requests within `duration_s` or in the trace, else 1000."""
    duration_s: float | None = None
    """Time in which requests arrive, in seconds. Requests in flight may finish later.

    Default: until all have arrived.
    """
    request_rate: float | None = None
    """Mean number of requests per second. inf: all at once. Not for `mix` and `burst`.

    Default: the times of a trace, else inf.
    """
    burstiness: float = 1.0
    """Shape of the gamma distribution of intervals between arrivals. 1: Poisson process; below 1: burstier."""
    seed: int = 0
    """Seed of the random generator for lengths, arrivals and prompts."""
    random_input_len: int = 1024
    """Mean prompt length in tokens, for `random`."""
    random_output_len: int = 128
    """Mean output length in tokens, for `random`."""
    random_range_ratio: float = 0.0
    """Spread of the lengths of `random`. A length is from (1 - ratio) to (1 + ratio) times its mean."""
    short_input_len: int = 1000
    """Prompt length of short requests in tokens, for `mix`."""
    short_output_len: int = 128
    """Output length of short requests in tokens, for `mix`."""
    short_per_minute: float = 60.0
    """Number of short requests per minute, for `mix`."""
    long_input_len: int = 50000
    """Prompt length of long requests in tokens, for `mix`."""
    long_output_len: int = 128
    """Output length of long requests in tokens, for `mix`."""
    long_per_minute: float = 1.0
    """Number of long requests per minute, for `mix`."""
    trace: Path | None = None
    """File of a trace: .npz, .csv or .jsonl with input_tokens, output_tokens and arrival_s, or statistics (.npz)."""
    trace_length_scale: float = 1.0
    """Factor by which the lengths of a trace are multiplied. Lengths stay at least 1."""
    trace_time_scale: float = 1.0
    """Factor by which the arrival times of a trace are multiplied. A factor below 1 makes requests arrive faster."""
    trace_rate_scale: float = 1.0
    """Factor by which the number of requests of a trace is multiplied, in the same time.

    Below 1, requests are removed. Above 1, copies of requests are added.
    """
    low_rate: str = "2:5"
    """Range of requests per second in low phases of `burst`. The rate of each phase is drawn from it."""
    high_rate: str = "10:30"
    """Range of requests per second in high phases of `burst`. The rate of each phase is drawn from it."""
    phase_s: float = 30.0
    """Length of each phase of `burst` in seconds."""
    priority_share: float = 0.0
    """Share of requests with `urgent_priority`, from 0 to 1. All other requests have `best_effort_priority`.

    0: all requests have priority 0.
    """
    urgent_priority: int = 0
    """Priority of urgent requests. The lowest value is served first."""
    best_effort_priority: int = 1
    """Priority of the other requests if `priority_share` is above 0."""
    ttft_slo_s: float | None = None
    """SLO of each request for the time to the first token, in seconds. Default: the SLO of the server."""
    tpot_slo_s: float | None = None
    """SLO of each request for the mean time per further token, in seconds. Default: the SLO of the server."""
    urgent_ttft_slo_s: float | None = None
    """SLO of urgent requests for the time to the first token, in seconds. Default: `ttft_slo_s`."""
    urgent_tpot_slo_s: float | None = None
    """SLO of urgent requests for the mean time per further token, in seconds. Default: `tpot_slo_s`."""

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ConfigError(f"dataset_name={self.dataset_name!r} must be one of {', '.join(DATASETS)}")
        _check_range(self, ("num_prompts",), 1, MAX_REQUESTS)
        _check_range(self, ("seed",), 0, 2**32 - 1)
        lengths = [f"{kind}_{part}_len" for kind in ("random", "short", "long") for part in ("input", "output")]
        _check_range(self, lengths, 1, 2**31 - 1)
        for name in ("duration_s", "trace_length_scale", "trace_time_scale", "trace_rate_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be above 0 and finite")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate} must be above 0")
        if not self.burstiness >= MIN_BURSTINESS:
            raise ConfigError(f"burstiness={self.burstiness} must be at least {MIN_BURSTINESS}")
        for name in ("short_per_minute", "long_per_minute"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be finite and at least 0")
        read_rates("low_rate", self.low_rate)
        read_rates("high_rate", self.high_rate)
        if not 1 <= self.phase_s <= 86_400:
            raise ConfigError(f"phase_s={self.phase_s} must be from 1 to 86400 seconds")
        if not 0 <= self.priority_share <= 1:
            raise ConfigError(f"priority_share={self.priority_share} must be from 0 to 1")
        _check_range(self, ("urgent_priority", "best_effort_priority"), -(2**31), 2**31 - 1)
        for name in ("ttft_slo_s", "tpot_slo_s", "urgent_ttft_slo_s", "urgent_tpot_slo_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_SLO_S:
                raise ConfigError(f"{name}={value} must be seconds above 0 and at most {MAX_SLO_S:g}")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"random_range_ratio={self.random_range_ratio} must be at least 0 and below 1")
        self._check_together()

    def _check_together(self) -> None:
        if self.dataset_name == "trace":
            if self.trace is None:
                raise ConfigError("dataset_name='trace' needs a file: set --trace")
        elif self.trace is not None:
            raise ConfigError(f"dataset_name={self.dataset_name!r} takes no trace: {self.trace} needs 'trace'")
        if self.dataset_name == "mix":
            if self.request_rate is not None:
                raise ConfigError(
                    f"request_rate={self.request_rate} is not for the mix: set short_per_minute and long_per_minute"
                )
            if self.short_per_minute + self.long_per_minute == 0:
                raise ConfigError("short_per_minute=0 and long_per_minute=0: no request would arrive")
        if self.dataset_name == "burst" and self.request_rate is not None:
            raise ConfigError(f"request_rate={self.request_rate} is not for burst: set low_rate and high_rate")
        if self.dataset_name != "trace" and self.duration_s is not None:
            if math.isinf(self.rate):
                raise ConfigError(
                    f"duration_s={self.duration_s:g} needs a request_rate: without it, all arrive at once"
                )
            expected = min(self.rate * self.duration_s, self.num_prompts or math.inf)
            if expected > MAX_REQUESTS:
                raise ConfigError(
                    f"about {expected:.0f} requests would arrive, but the maximum is {MAX_REQUESTS}: set num_prompts"
                )

    @property
    def rate(self) -> float:
        """Mean number of requests per second. Infinite if all requests arrive at once.

        The number has no meaning for a trace that has times.
        """
        if self.dataset_name == "mix":
            return (self.short_per_minute + self.long_per_minute) / 60
        if self.dataset_name == "burst":
            return sum(read_rates("low_rate", self.low_rate) + read_rates("high_rate", self.high_rate)) / 4
        return math.inf if self.request_rate is None else self.request_rate

    @property
    def most(self) -> int | None:
        """Maximum number of requests. None: all requests within `duration_s`."""
        return DEFAULT_NUM_PROMPTS if self.num_prompts is None and self.duration_s is None else self.num_prompts


@dataclass(frozen=True)
class PlannedRequest:
    """Request that the load generator will send.

    Lengths are in tokens, `arrival_s` in seconds from the start of the run.
    """

    index: int
    kind: str
    """Kind of request: `random`, `short`, `long`, `trace`, `burst`, or a class of a trace."""
    arrival_s: float
    input_len: int
    output_len: int
    shortened: bool = False
    """Whether the request was shortened to the context of the model."""
    phase: str = ""
    """Phase of `burst` in which the request arrives: `low` or `high`. Empty for other datasets."""
    priority: int = 0
    """Priority of the request (`SamplingParams.priority`). The lowest value is served first."""
    ttft_slo_s: float | None = None
    """SLO for the time to the first token, in seconds (`SamplingParams.ttft_slo_s`)."""
    tpot_slo_s: float | None = None
    """SLO for the mean time per further token, in seconds (`SamplingParams.tpot_slo_s`)."""

    def prompt(self, seed: int, vocab_size: int) -> list[int]:
        """Return a random prompt as token ids. Calls with the same arguments return the same prompt.

        Call this only when the request is sent: all prompts together would fill the memory.
        """
        random = np.random.default_rng((seed, _PROMPTS, self.index))
        return random.integers(0, vocab_size, self.input_len).tolist()


@dataclass(frozen=True)
class Plan:
    """Table of planned requests in the order of arrival.

    Lengths are in tokens, times in seconds from the start of the run.
    """

    arrival_s: np.ndarray
    input_len: np.ndarray
    output_len: np.ndarray
    kinds: np.ndarray
    """Kind of each request, as an index into `kind_names`."""
    kind_names: tuple[str, ...]
    shortened: np.ndarray
    phases: np.ndarray
    """Phase of each request of `burst`: 0 is low, 1 is high. -1 for other datasets."""
    priorities: np.ndarray
    ttft_slo_s: np.ndarray
    """TTFT SLO of each request in seconds. NaN: the SLO of the server."""
    tpot_slo_s: np.ndarray
    """TPOT SLO of each request in seconds. NaN: the SLO of the server."""
    prefix_blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Ids of the prompt blocks of each request (`Trace.prefix_blocks`)."""
    prefix_block_tokens: float = BLOCK_TOKENS
    """Tokens of a prompt block. `trace_length_scale` is included."""

    def __len__(self) -> int:
        return len(self.arrival_s)


def plan_requests(config: WorkloadConfig, max_model_len: int) -> list[PlannedRequest]:
    """Plan the requests of a workload, in the order of arrival.

    Requests of a trace are shortened to the context of `max_model_len` tokens. Requests of any other dataset must fit
    this context. Raises `ConfigError` if a request does not fit, or if a trace is invalid or has too few requests.
    """
    plan = plan_columns(config, max_model_len)
    lengths = plan.input_len, plan.output_len
    slos_s = plan.ttft_slo_s.astype(object), plan.tpot_slo_s.astype(object)
    for column in slos_s:
        column[np.isnan(column.astype(float))] = None
    columns = (plan.kinds, plan.arrival_s, *lengths, plan.shortened, plan.phases, plan.priorities, *slos_s)
    names = {-1: "", 0: LOW, 1: HIGH}
    return [
        PlannedRequest(index, plan.kind_names[kind], arrival_s, input_len, output_len, cut, names[phase], *rest)
        for index, (kind, arrival_s, input_len, output_len, cut, phase, *rest) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]


def plan_columns(config: WorkloadConfig, max_model_len: int, shorten: bool = True) -> Plan:
    """Plan the requests of a workload as a table with columns. See `plan_requests`.

    If `shorten` is False, requests of a trace keep their lengths, even beyond `max_model_len`.
    """
    if config.dataset_name == "trace":
        plan = _plan_trace(config, max_model_len if shorten else None)
        return _with_urgent(config, plan)
    planners = {"random": _plan_random, "burst": _plan_burst, "mix": _plan_mix}
    return _with_urgent(config, planners[config.dataset_name](config, max_model_len))


def _with_urgent(config: WorkloadConfig, plan: Plan) -> Plan:
    """Return a copy of a plan with the priorities and latency limits (SLOs) in `config`.

    The share `priority_share` of the requests, chosen at random, is urgent. Raises `ConfigError` for an empty plan.
    """
    urgent = _stream(config, _PRIORITIES).random(len(plan)) < config.priority_share
    if config.priority_share:
        plan = replace(plan, priorities=np.where(urgent, config.urgent_priority, config.best_effort_priority))
    for name in ("ttft_slo_s", "tpot_slo_s"):
        others, own = (math.nan if value is None else value for value in _slos(config, name))
        plan = replace(plan, **{name: np.where(urgent, own, others)})
    if not len(plan):
        raise ConfigError(f"no request arrives within duration_s={config.duration_s}: raise it, or the rate")
    return plan


def _slos(config: WorkloadConfig, name: str) -> tuple[float | None, float | None]:
    """Return `(limit of normal requests, limit of urgent requests)` for the latency `name`, in seconds.

    `name` is `ttft_slo_s` or `tpot_slo_s`. None: these requests set no limit.
    """
    others, own = getattr(config, name), getattr(config, f"urgent_{name}")
    return others, others if own is None else own


def _plan_random(config: WorkloadConfig, max_model_len: int) -> Plan:
    arrivals = _synthetic_arrivals(config, config.most)
    kinds = np.zeros(len(arrivals), np.int64)
    inputs, outputs = _random_lengths(config, len(arrivals), max_model_len)
    return _plan(["random"], kinds, arrivals, inputs, outputs)


def _plan_burst(config: WorkloadConfig, max_model_len: int) -> Plan:
    rates = read_rates("low_rate", config.low_rate), read_rates("high_rate", config.high_rate)
    random = _stream(config, _ARRIVALS)
    drawn = list(draw_phases(random, *rates, config.phase_s, config.burstiness, config.most, config.duration_s))
    arrivals, phases = np.array([time_s for time_s, _ in drawn]), np.array([phase == HIGH for _, phase in drawn])
    kinds = np.zeros(len(arrivals), np.int64)
    inputs, outputs = _random_lengths(config, len(arrivals), max_model_len)
    plan = _plan(["burst"], kinds, arrivals, inputs, outputs)
    return replace(plan, phases=phases.astype(np.int64))


def _random_lengths(config: WorkloadConfig, count: int, max_model_len: int) -> list[np.ndarray]:
    """Draw `count` lengths of prompts and of outputs around their means. Return `[inputs, outputs]` in tokens."""
    ratio = config.random_range_ratio
    low, high = (
        [max(1, round_(n * factor)) for n in (config.random_input_len, config.random_output_len)]
        for round_, factor in ((math.floor, 1 - ratio), (math.ceil, 1 + ratio))
    )
    _check_context("random_input_len plus random_output_len", high, max_model_len)
    random = _stream(config, _LENGTHS)
    return [random.integers(low[part], high[part] + 1, count) for part in (0, 1)]


def _plan_mix(config: WorkloadConfig, max_model_len: int) -> Plan:
    planned = []
    for index, (kind, stream) in enumerate((("short", _ARRIVALS), ("long", _LONG_ARRIVALS))):
        per_minute, *lengths = (getattr(config, f"{kind}_{name}") for name in ("per_minute", "input_len", "output_len"))
        if per_minute == 0:
            continue
        _check_context(f"{kind}_input_len plus {kind}_output_len", lengths, max_model_len)
        random = _stream(config, stream)
        times = draw_arrivals(random, per_minute / 60, config.burstiness, config.most, config.duration_s)
        planned += [(time, index, *lengths) for time in times.tolist()]
    planned.sort(key=lambda request: (request[0], -request[1]))
    times, kinds, inputs, outputs = np.array(planned[: config.most], float).reshape(-1, 4).T
    return _plan(["short", "long"], kinds, times, inputs, outputs)


def _plan_trace(config: WorkloadConfig, max_model_len: int | None) -> Plan:
    assert config.trace is not None, "checked with the configuration"
    random = _stream(config, _TRACE)
    scale = config.trace_rate_scale
    whole_s = None if config.duration_s is None else config.duration_s / config.trace_time_scale
    draw = Draw(random, whole_s, scale, config.num_prompts)
    trace = read_trace(config.trace, draw)
    if scale != 1.0 and not _is_drawn(config.trace):
        if (most := len(trace.input_tokens) * scale) > MAX_REQUESTS:
            raise ConfigError(
                f"trace_rate_scale={scale:g} makes {most:.0f} requests, but the maximum is {MAX_REQUESTS}"
            )
        trace = scale_rate(trace, scale, random)
    if not (size := len(trace.input_tokens)):
        raise ConfigError(f"trace_rate_scale={scale:g} leaves no request of {config.trace}")
    if config.num_prompts is not None and config.num_prompts > size:
        raise ConfigError(f"num_prompts={config.num_prompts} is more than the {size} requests of {config.trace}")
    count = config.num_prompts or size
    if trace.arrival_s is not None and config.request_rate is None:
        arrivals = trace.arrival_s[:count] * config.trace_time_scale
        arrivals = arrivals if config.duration_s is None else arrivals[arrivals < config.duration_s]
    elif config.duration_s is not None and math.isinf(config.rate):
        raise ConfigError(f"duration_s={config.duration_s:g} needs a request_rate: {config.trace} has no times")
    else:
        arrivals = _synthetic_arrivals(config, count)
    scaled = [
        np.maximum(1, np.rint(lengths[: len(arrivals)] * config.trace_length_scale)).astype(np.int64)
        for lengths in (trace.input_tokens, trace.output_tokens)
    ]
    inputs, outputs = scaled
    shortened = np.zeros(len(arrivals), bool)
    if max_model_len is not None:
        shortened = inputs + outputs > max_model_len
        inputs, outputs = fit_context(inputs, outputs, max_model_len)
    kinds = np.zeros(len(arrivals), np.int64) if trace.kinds is None else trace.kinds[: len(arrivals)]
    names = trace.kind_names or ("trace",)
    plan = _plan(names, kinds, arrivals, inputs, outputs, shortened, trace.prefix_blocks or {})
    if trace.priorities is not None:
        plan = replace(plan, priorities=trace.priorities[: len(arrivals)])
    return replace(plan, prefix_block_tokens=BLOCK_TOKENS * config.trace_length_scale)


def _is_drawn(path: Path) -> bool:
    """Return whether a trace is a .npz file of statistics, from which requests are drawn."""
    if path.suffix != ".npz":
        return False
    with np.load(path, allow_pickle=False) as file:
        return "rate_rps" in file.files


def _synthetic_arrivals(config: WorkloadConfig, most: int | None) -> np.ndarray:
    """Draw random arrival times of requests, in seconds.

    If `duration_s` is None, all times are scaled so that the mean rate is exact, as in vLLM.
    """
    random = _stream(config, _ARRIVALS)
    arrivals = draw_arrivals(random, config.rate, config.burstiness, most, config.duration_s)
    if config.duration_s is None and not math.isinf(config.rate):
        arrivals *= len(arrivals) / config.rate / arrivals[-1]
    return arrivals


def _stream(config: WorkloadConfig, stream: int) -> np.random.Generator:
    return np.random.default_rng((config.seed, stream))


def _plan(
    kind_names: Iterable[str],
    kinds: np.ndarray,
    arrivals: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    shortened: np.ndarray | None = None,
    prefix_blocks: Mapping[int, tuple[int, ...]] | None = None,
) -> Plan:
    return Plan(
        arrivals.astype(np.float64),
        inputs.astype(np.int64),
        outputs.astype(np.int64),
        kinds.astype(np.int64),
        tuple(kind_names),
        np.zeros(len(arrivals), bool) if shortened is None else shortened,
        np.full(len(arrivals), -1, np.int64),
        np.zeros(len(arrivals), np.int64),
        np.full(len(arrivals), math.nan),
        np.full(len(arrivals), math.nan),
        prefix_blocks or {},
    )


def _check_range(config: WorkloadConfig, names: Iterable[str], least: int, most: int) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name}={value} must be from {least} to {most}")


def _check_context(what: str, lengths: list[int], max_model_len: int) -> None:
    if sum(lengths) > max_model_len:
        raise ConfigError(
            f"{what} is up to {lengths[0]} + {lengths[1]} = {sum(lengths)} tokens, but the server's maximum context is "
            f"{max_model_len}: lower them, or serve with more memory, devices or max_model_len"
        )
