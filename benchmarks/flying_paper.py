"""Runs of Flying Serving's section 6 on the simulator: Llama-3-70B on 8 H200, for `papers.py`."""

from dataclasses import dataclass, replace

import numpy as np

from serving.bench.workload import WorkloadConfig
from serving.scheduler import FlyingConfig
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.model_shape import ModelShape
from serving.simulator.result import PolicyResult, collect
from serving.simulator.router import make_router
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import make_setup
from serving.simulator.simulate import request_table
from serving.simulator.slo import Slo

POLICIES = ("static-tp8", "static-tp2", "flying", "shift")
MAX_NUM_SEQS, PHASE_S = 64, 30.0
"""Requests that an engine runs at once, whatever its degree, as a setting of vLLM. Static TP's peak of 2,530 tokens/s
at 22 ms a token is 56 requests (Table 1)."""
PROMPT, OUTPUT = 1024, 512
"""Mean tokens; the text has lost the ranges (6.1.3). They are drawn from half to one and a half times these. With them
static DP has the peak of Figure 9."""


@dataclass(frozen=True)
class Served:
    """One policy's run."""

    result: PolicyResult

    def ttft_ms(self, rows: np.ndarray | None = None) -> float:
        """Mean milliseconds to the first token."""
        return float(np.nanmean(self.result.ttft_s if rows is None else self.result.ttft_s[rows])) * 1e3

    def tpot_ms(self, rows: np.ndarray | None = None) -> float:
        """Mean milliseconds of each further token."""
        return float(np.nanmean(self.result.tpot_s if rows is None else self.result.tpot_s[rows])) * 1e3

    def urgent(self) -> np.ndarray:
        """Requests of higher priority."""
        priority = self.result.requests.priority
        assert priority is not None, "some are"
        return priority < 0

    def in_phase(self, kind: str) -> np.ndarray:
        """Requests that came in low or high phases."""
        number = self.result.requests.arrival_s // PHASE_S % 2
        return number == ("low", "high").index(kind)

    def peak(self, window_s: float = 5.0) -> float:
        """Most generated tokens per second in a window."""
        tally = self.result.tally
        width = max(round(window_s / tally.bin_s), 1)
        sums = np.convolve(tally.tokens_per_bin, np.ones(width), "valid")
        return float(sums.max()) / (width * tally.bin_s)


def serve(
    model: ModelShape,
    policy: str,
    low: str,
    high: str,
    urgent_share: float,
    seed: int = 0,
    duration_s: float = 300.0,
    flying: FlyingConfig | None = None,
) -> Served:
    """Serve a load of phases of 30 s with one policy."""
    load = WorkloadConfig(
        dataset_name="burst", duration_s=duration_s, low_rate=low, high_rate=high, phase_s=PHASE_S, seed=seed,
        random_input_len=PROMPT, random_output_len=OUTPUT, random_range_ratio=0.5,
    )  # fmt: skip
    config = SimulationConfig(
        model, load, device="H200", degrees=(2, 4, 8), max_num_batched_tokens=8192, urgent_share=urgent_share,
        layers_per_step=20, seed=seed, flying_config=flying or FlyingConfig(),
    )  # fmt: skip
    setup = make_setup(config, policy)
    limits = tuple(replace(limit, max_requests=MAX_NUM_SEQS) for limit in setup.host.limits)
    table = request_table(config)
    host = replace(setup.host, limits=limits)
    cluster = Cluster(host, 1, setup.make_policy, table, make_router("round_robin", 1, seed, len(table)), bin_s=1.0)
    cluster.run(LoopConfig(drain_s=3600.0))
    return Served(collect(policy, cluster, Slo(), config.num_devices))
