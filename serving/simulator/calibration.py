"""Times and sizes of this project's engine, measured on a machine. They can replace the cost model of a simulation."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serving.scheduler import DegreeLimits
from serving.simulator.errors import SimulationError
from serving.simulator.step_cost import TableStepCost
from serving.simulator.transformation_cost import MeasuredTransformation

VERSION = 2


@dataclass(frozen=True)
class Calibration:
    """Measured times and sizes of an engine. `amoeba simulate --calibrate` measures and writes them."""

    model: str
    num_devices: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    max_model_len: int
    num_layers: int
    layers_per_step: int
    capacity_tokens: dict[int, int]
    """Tokens that fit into the KV cache of an instance, by degree."""
    max_requests: dict[int, int]
    """Maximum number of running requests of an instance, by degree."""
    decode_s: dict[int, dict[int, float]]
    """Seconds of a decode step while no other instance runs, by degree and number of rows."""
    prompt_s: dict[int, dict[int, float]]
    """Seconds of a step with one chunk, padded to `few_rows` rows, by degree and chunk size."""
    prompts_s: dict[int, dict[int, float]]
    """Seconds of a step with four chunks, by degree and chunk size. Sizes that do not allow four chunks are missing."""
    few_rows: int
    """Rows of the smaller compiled shape of a step with one chunk. Steps with more sequences use the largest shape."""
    latency_s: float
    """Seconds that a request spends outside of steps: before the first launch, and after the last result."""
    context_s: dict[int, float]
    """Seconds of decode attention for each token of a decoding sequence, by degree."""
    crowding: dict[int, float]
    """Time of a step by number of busy instances, relative to one busy instance. Above 1 if devices share a CPU."""
    prompt_crowding: dict[int, float]
    """Like `crowding`, for a step with a prompt while the other busy instances decode."""
    up_layer_s: float
    """Seconds to switch one layer in a merge."""
    down_layer_s: float
    """Seconds to switch one layer in a split."""
    page_layer_s: float = 0.0
    """Additional seconds for each page in use, in each layer."""
    machine: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    def step_cost(self) -> TableStepCost:
        """Return the cost model of steps, from the measured times."""
        return TableStepCost(self.decode_s, self.prompt_s, self.prompts_s, self.few_rows, self.context_s)

    def transformation(self) -> MeasuredTransformation:
        """Return the cost model of merges and splits, from the measured times."""
        return MeasuredTransformation(
            self.num_layers, self.up_layer_s, self.down_layer_s, self.page_layer_s, self.page_size
        )

    def limits(self) -> tuple[DegreeLimits, ...]:
        """Return the capacity and the maximum number of requests of an instance, for each measured degree."""
        degrees = sorted(self.capacity_tokens)
        return tuple(DegreeLimits(d, self.capacity_tokens[d], self.max_requests[d]) for d in degrees)

    def save(self, path: Path) -> None:
        """Write the calibration to a JSON file. Raises `SimulationError` if that fails."""
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SimulationError(f"the calibration {path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read a file that `save` has written.

        Raises `SimulationError` if the file is invalid or of another version.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls._from_json(data)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise SimulationError(f"the calibration {path} cannot be read: {error}") from error

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> "Calibration":
        if data.get("version") != VERSION:
            raise ValueError(f"version={data.get('version')!r} must be {VERSION}: calibrate again")
        flat = ("capacity_tokens", "max_requests", "context_s", "crowding", "prompt_crowding")
        values = dict(data)
        for name in flat:
            values[name] = {int(k): v for k, v in data[name].items()}
        for name in ("decode_s", "prompt_s", "prompts_s"):
            values[name] = {int(d): {int(k): v for k, v in table.items()} for d, table in data[name].items()}
        return cls(**values)
