"""Settings of `amoeba bench`.

Imports no gRPC, so that the command line starts fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amoeba_jax.errors import ConfigError
from serving.bench.load_config import LoadConfig
from serving.bench.workload import WorkloadConfig
from serving.flags import fields_of
from serving.token_file import read_token

if TYPE_CHECKING:
    from amoeba_jax.client import AsyncClient
    from serving.bench.metrics import MetricsConfig


@dataclass(frozen=True)
class ConnectionConfig:
    """Settings of the connection to the server. Raises `ConfigError` for an invalid value."""

    target: str
    """Host and port of the server."""
    token: str | None = None
    """Token of a client."""
    tls_ca: Path | None = None
    """PEM file with the trusted certificates; enables TLS."""
    tls_certificate: Path | None = None
    """PEM file with the certificate of this client, if the server requires one."""
    tls_key: Path | None = None
    """PEM file with the private key of the certificate."""
    admin_target: str | None = None
    """Host and port of AdminService. Default: the same as `target`."""
    admin_token: str | None = None
    """Token for AdminService. Default: the same as `token`."""
    watch_interval_s: float = 0.5
    """Seconds between two samples of the server's instances; 0: no samples."""
    ready_timeout_s: float = 0.0
    """Maximum seconds to wait for a server that is still loading."""

    def __post_init__(self) -> None:
        if self.watch_interval_s != 0 and not 0.1 <= self.watch_interval_s <= 3600:
            raise ConfigError(f"watch_interval_s={self.watch_interval_s:g} must be 0, or from 0.1 to 3600")
        if not 0 <= self.ready_timeout_s < float("inf"):
            raise ConfigError(f"ready_timeout_s={self.ready_timeout_s:g} must be finite and at least 0")

    def open(self, admin: bool = False) -> "AsyncClient":
        """Return a client for the server. If `admin` is true, the client connects to AdminService.

        The client does not retry calls, because retries would hide errors of the server. Raises `ConfigError` if a
        certificate file cannot be read.
        """
        from amoeba_jax.client import AsyncClient, Retries

        target = (self.admin_target if admin else None) or self.target
        token = (self.admin_token if admin else None) or self.token
        try:
            return AsyncClient(
                target,
                token=token,
                ca=self.tls_ca,
                certificate=self.tls_certificate,
                key=self.tls_key,
                retries=Retries(attempts=1),
            )
        except OSError as error:
            raise ConfigError(f"the certificate file {error.filename} cannot be read: {error}") from error


@dataclass(frozen=True)
class OutputConfig:
    """Files that a benchmark run writes. Raises `ConfigError` if a file cannot be written."""

    label: str | None = None
    """Label in the report."""
    save_result: bool = False
    """Whether to write the report as JSON. The report is also written if `result_dir` or `result_filename` is given."""
    save_detailed: bool = False
    """Whether to write the report as JSON with an entry for each request."""
    result_dir: Path | None = None
    """Directory of the report. Default: the current directory."""
    result_filename: str | None = None
    """File name of the report. Default: a name with the workload and the time."""
    plot: Path | None = None
    """File for a plot of the run, such as run.png; needs matplotlib."""

    def __post_init__(self) -> None:
        if self.result_dir is not None and not self.result_dir.is_dir():
            raise ConfigError(f"result_dir={self.result_dir} is no directory: create it first")
        files = [(self.result_dir or Path()) / self.result_filename] if self.result_filename else []
        for path in (*files, *([self.plot] if self.plot else [])):
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise ConfigError(f"{path} cannot be written: it must be a file in an existing directory")
        if self.plot is not None:
            from serving.bench.plot import load_matplotlib

            load_matplotlib()

    @property
    def wants_file(self) -> bool:
        """Whether to write the report to a JSON file."""
        return self.save_result or self.save_detailed or bool(self.result_filename or self.result_dir)


@dataclass(frozen=True)
class BenchConfig:
    """All settings of a benchmark run. Raises `ConfigError` for an invalid value."""

    connection: ConnectionConfig
    workload: WorkloadConfig
    load: LoadConfig
    metrics: "MetricsConfig"
    output: OutputConfig
    num_warmups: int = 0
    """Number of warm-up requests before the run. All are copies of the first request."""

    def __post_init__(self) -> None:
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups} must be at least 0")


def bench_config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> BenchConfig:
    """Convert the options of `amoeba bench` (`flags`, by name) to settings. Raises `ConfigError` for invalid settings.

    An access token is read from the file that its option names. Without this option, the token is the value of
    `AMOEBA_API_TOKEN` or `AMOEBA_ADMIN_TOKEN` in `environment`.
    """
    from serving.bench.metrics import MetricsConfig

    goodput, more = flags["goodput"] or [], flags["more_goodput"] or []
    if more and not goodput:
        raise ConfigError(f"unexpected arguments {' '.join(more)}: only --goodput takes several values")
    token = read_token(flags["token_file"], environment.get("AMOEBA_API_TOKEN"))
    admin_token = read_token(flags["admin_token_file"], environment.get("AMOEBA_ADMIN_TOKEN"))
    return BenchConfig(
        ConnectionConfig(**fields_of(ConnectionConfig, flags), token=token, admin_token=admin_token),
        WorkloadConfig(**fields_of(WorkloadConfig, flags)),
        LoadConfig(**fields_of(LoadConfig, flags)),
        MetricsConfig.from_text(flags["percentile_metrics"], flags["metric_percentiles"], [*goodput, *more]),
        OutputConfig(**fields_of(OutputConfig, flags)),
        **fields_of(BenchConfig, flags),
    )
