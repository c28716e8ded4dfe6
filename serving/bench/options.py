"""The settings of `amoeba bench`: from flags, and those that are not about what is sent or measured."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from amoeba_jax.client import AsyncClient, Retries
from amoeba_jax.errors import ConfigError
from serving.bench.load import LoadConfig
from serving.bench.metrics import MetricsConfig
from serving.bench.plot import load_matplotlib
from serving.bench.workload import WorkloadConfig
from serving.token_file import read_token

_ONCE = Retries(attempts=1)


@dataclass(frozen=True)
class ConnectionConfig:
    """The server, and how to reach it. Raises `ConfigError`."""

    target: str
    """Host and port."""
    token: str | None = None
    tls_ca: Path | None = None
    """PEM file with the certificates to trust; None: no TLS."""
    admin_target: str | None = None
    """Of AdminService; None: the same."""
    admin_token: str | None = None
    """None: the same."""
    watch_interval_s: float = 0.5
    """Between two looks at the instances; 0 does not look."""
    ready_timeout_s: float = 0.0
    """How long a server that is still loading is waited for."""

    def __post_init__(self) -> None:
        if self.watch_interval_s != 0 and not 0.1 <= self.watch_interval_s <= 3600:
            raise ConfigError(f"watch_interval_s={self.watch_interval_s:g} must be 0, or from 0.1 to 3600")
        if not 0 <= self.ready_timeout_s < float("inf"):
            raise ConfigError(f"ready_timeout_s={self.ready_timeout_s:g} must be finite and at least 0")

    def open(self, admin: bool = False) -> AsyncClient:
        """A connection whose calls are not tried again: that would hide what the server did. Raises `ConfigError`."""
        target = (self.admin_target if admin else None) or self.target
        token = (self.admin_token if admin else None) or self.token
        try:
            return AsyncClient(target, token=token, ca=self.tls_ca, retries=_ONCE)
        except OSError as error:
            raise ConfigError(f"the certificate file {self.tls_ca} cannot be read: {error}") from error


@dataclass(frozen=True)
class OutputConfig:
    """Where the report goes besides the terminal. Raises `ConfigError` for what could not be written after the run."""

    label: str | None = None
    save_result: bool = False
    """Write JSON; naming a file or a directory asks for it too."""
    save_detailed: bool = False
    """With an entry for each request."""
    result_dir: Path | None = None
    result_filename: str | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.result_dir is not None and not self.result_dir.is_dir():
            raise ConfigError(f"result_dir={self.result_dir} is no directory: make it first")
        files = [(self.result_dir or Path()) / self.result_filename] if self.result_filename else []
        for path in (*files, *([self.plot] if self.plot else [])):
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise ConfigError(f"{path} cannot be written: it must be a file in a directory that exists")
        if self.plot is not None:
            load_matplotlib()

    @property
    def wants_file(self) -> bool:
        """Whether the report is written as JSON."""
        return self.save_result or self.save_detailed or bool(self.result_filename or self.result_dir)


@dataclass(frozen=True)
class BenchConfig:
    """All settings of a run. Raises `ConfigError`."""

    connection: ConnectionConfig
    workload: WorkloadConfig
    load: LoadConfig
    metrics: MetricsConfig
    output: OutputConfig
    num_warmups: int = 0
    """How often the first request is sent before, without being counted."""

    def __post_init__(self) -> None:
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups} must be at least 0")


def bench_config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> BenchConfig:
    """From the flags of `amoeba bench` by name, tokens possibly from the environment. Raises `ConfigError`."""
    goodput, more = flags["goodput"] or [], flags["more_goodput"] or []
    if more and not goodput:
        raise ConfigError(f"unexpected arguments {' '.join(more)}: only --goodput takes several")
    token = read_token(flags["token_file"], environment.get("AMOEBA_API_TOKEN"))
    admin_token = read_token(flags["admin_token_file"], environment.get("AMOEBA_ADMIN_TOKEN"))
    return BenchConfig(
        ConnectionConfig(**_fields(ConnectionConfig, flags), token=token, admin_token=admin_token),
        WorkloadConfig(**_fields(WorkloadConfig, flags)),
        LoadConfig(**_fields(LoadConfig, flags)),
        MetricsConfig.from_text(flags["percentile_metrics"], flags["metric_percentiles"], [*goodput, *more]),
        OutputConfig(**_fields(OutputConfig, flags)),
        flags["num_warmups"],
    )


def _fields(kind: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: flags[field.name] for field in fields(kind) if field.name in flags}
