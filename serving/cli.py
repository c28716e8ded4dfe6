"""The `amoeba` command."""

import atexit
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import amoeba_jax
from amoeba_jax.config import EngineConfig
from amoeba_jax.sampling_params import SamplingParams
from serving.bench.load_config import LoadConfig
from serving.bench.options import BenchConfig, ConnectionConfig, OutputConfig
from serving.bench.workload import WorkloadConfig
from serving.commands import placement
from serving.commands.simulate import simulate
from serving.errors import EXIT_FAILURE, clean_exit, flush_or_discard
from serving.flags import Flags, fields_of, with_flags
from serving.grpc_server.config import Limits, SecretFiles, ServerConfig
from serving.runtime.scheduling_config import SchedulingConfig

# Each command imports its implementation when it runs: `amoeba --help` must not wait for JAX, and `amoeba doctor` must
# run if gRPC is missing.

app = typer.Typer(
    name="amoeba",
    help="Serve large language models on instances that merge and split while requests run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEFAULT_TARGET = "127.0.0.1:50051"
Target = Annotated[str, typer.Option("--target", "-t", help="Host and port of the server.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token.", show_default="from the environment")]
TLSAuthority = Annotated[Path | None, typer.Option(help="PEM file with the trusted certificates; enables TLS.")]
TLSCertificate = Annotated[
    Path | None, typer.Option(help="PEM file with the certificate of this client, if the server requires one.")
]
TLSKey = Annotated[Path | None, typer.Option(help="PEM file with the private key of the certificate.")]

_SPELLINGS = {
    "model": ("--model", "-m"),
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "engine_timeout_s": ("--engine-timeout",),
}
# Settings of the engine that do not change its programs.
_NOT_COMPILED_FOR = (
    *("load_format", "load_threads", "tensor_parallel_size", "prefix_caching"),
    *("compile_beside", "strict_compile", "compile_jobs", "seed", "expert_loads"),
)


class WaitFor(StrEnum):
    """Programs that must be compiled before a server is ready.

    `start`: the programs of the instances with which the server starts. `all`: the programs of all tensor-parallel
    degrees, and of changes from one degree to another.
    """

    START = "start"
    ALL = "all"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"amoeba-jax {amoeba_jax.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Version of amoeba-jax: print it and exit."
        ),
    ] = False,
) -> None:
    # transformers warns that torch is missing, but only its models need torch, and these are not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@app.command()
@with_flags(
    Flags(
        "Sampling",
        SamplingParams,
        only=("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        defaults={"max_tokens": 128, "temperature": 0.0, "seed": 0},
    ),
    Flags(
        "Engine",
        EngineConfig,
        only=("model", "num_devices", "tensor_parallel_size", "device_memory", "dtype", "max_model_len"),
        spellings=_SPELLINGS,
    ),
)
def generate(
    values: dict[str, Any],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to answer, or - for stdin.")],
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Chat template around the prompt.", show_default="if the model has one"),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the text must match.", show_default="free text")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the text must match.", show_default="free text")
    ] = None,
) -> None:
    """Complete one prompt and stream the text to stdout. Timings go to stderr."""
    with clean_exit():
        from serving.commands.generate import constraint, stream_to_stdout

        structured = constraint(json_schema, regex)
        params = SamplingParams(**fields_of(SamplingParams, values), structured=structured)
        stream_to_stdout(EngineConfig(**fields_of(EngineConfig, values)), prompt, params, chat)


@app.command()
@with_flags(
    Flags("Engine", EngineConfig, spellings=_SPELLINGS),
    Flags("Scheduling", SchedulingConfig),
    Flags(
        "Server",
        ServerConfig,
        without=("tls", "api_token", "admin_token", "limits"),
        spellings=_SPELLINGS,
    ),
    Flags("Certificates and tokens", SecretFiles),
    Flags("Limits", Limits),
)
def serve(
    values: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings, named like the options; options take precedence.")
    ] = None,
    warmup: Annotated[bool, typer.Option(help="Compilation of programs before their first use.")] = True,
    wait_for: Annotated[
        WaitFor,
        typer.Option(help="Programs to compile before the server is ready: of its first layout (start), or all."),
    ] = WaitFor.START,
) -> None:
    """Serve a model over gRPC, and over HTTP with --http-port, until SIGTERM or Ctrl-C."""
    with clean_exit():
        from serving.commands.serve import run_server
        from serving.commands.serve_config import merge_settings, serve_settings

        settings = serve_settings(merge_settings(config, values), os.environ)
        code = run_server(*settings, warm_up=wait_for if warmup else None)
        if code:
            raise typer.Exit(code)


@app.command()
@with_flags(Flags("Engine", EngineConfig, without=_NOT_COMPILED_FOR, spellings=_SPELLINGS))
def warmup(
    values: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="YAML file of the server; options take precedence.")] = None,
    degrees: Annotated[
        list[int] | None,
        typer.Option("--degree", help="Degree to compile for, a power of two.", show_default="all"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Programs to compile at once.", show_default="one for each processor, at most 8")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Platform of the server: cpu or cuda.", show_default="of this machine")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check of the cache: write nothing, and exit with 1 if a program is missing."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List of programs and memory plan only, also for other devices."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON output.")] = False,
) -> None:
    """Compile all programs of a server into the compile cache.

    Takes the options of `amoeba serve` that affect programs. Loads no weights: a model's config.json is enough.
    """
    with clean_exit():
        from serving.commands.serve_config import merge_settings, serve_settings
        from serving.commands.warmup import run_warmup

        if jobs is not None:
            values["compile_jobs"] = jobs
        _, engine_config, _ = serve_settings(merge_settings(config, values), os.environ)
        code = run_warmup(engine_config, degrees, platform=platform, dry_run=dry_run, check=check, as_json=as_json)
        if code:
            raise typer.Exit(code)


@app.command()
@with_flags(
    Flags(
        "Sampling",
        SamplingParams,
        only=("max_tokens", "temperature", "top_p", "seed"),
        defaults={"max_tokens": 512, "temperature": 0.0},
    )
)
def chat(
    values: dict[str, Any],
    target: Target = DEFAULT_TARGET,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    token_file: TokenFile = None,
    tls_ca: TLSAuthority = None,
    tls_certificate: TLSCertificate = None,
    tls_key: TLSKey = None,
) -> None:
    """Chat with the model of a running server."""
    with clean_exit():
        from serving.commands.chat import open_client, run_chat

        params = SamplingParams(**values)
        token = os.environ.get("AMOEBA_API_TOKEN")
        with open_client(target, token_file, token, tls_ca, tls_certificate, tls_key) as client:
            run_chat(client, params, system)


@app.command()
def transform(
    tensor_parallel_size: Annotated[int, typer.Argument(help="New tensor-parallel degree, a power of two.")],
    devices: Annotated[
        list[int] | None, typer.Option("--device", help="Device whose instance changes.", show_default="all")
    ] = None,
    variant: Annotated[
        str,
        typer.Option(help="Method: 'in_place_overlapped', or 'in_place', which waits after each layer for timings."),
    ] = "in_place_overlapped",
    keep_weights: Annotated[
        bool, typer.Option("--keep-weights", help="Resident weights: unneeded shards do not become KV cache.")
    ] = False,
    running: Annotated[
        str,
        typer.Option(
            help="Treatment of running requests: 'migrate' moves them to the new instance; 'pause' stops them until "
            "the instance changes back (implies --keep-weights); 'wait' lets them end first."
        ),
    ] = "migrate",
    order: Annotated[
        str,
        typer.Option(
            help="Order of the modules: 'layer' changes each layer as a whole; 'memory_first' turns the FFN weights of "
            "all layers into KV cache before it moves pages, and restores them after it has moved pages."
        ),
    ] = "layer",
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Waiting for programs that are still being compiled, with progress, in place of an error."
        ),
    ] = False,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TLSAuthority = None,
    tls_certificate: TLSCertificate = None,
    tls_key: TLSKey = None,
) -> None:
    """Ask a running server to merge or split its instances.

    Needs the admin token if the server has one.
    """
    with clean_exit():
        from serving.commands.chat import open_client, run_transform

        token = os.environ.get("AMOEBA_ADMIN_TOKEN")
        with open_client(target, token_file, token, tls_ca, tls_certificate, tls_key) as client:
            run_transform(
                client,
                tensor_parallel_size,
                devices,
                variant,
                keep_weights=keep_weights or running == "pause",
                running=running,
                order=order,
                wait=wait,
            )


@app.command()
@with_flags(
    Flags(
        "Connection",
        ConnectionConfig,
        without=("token", "admin_token"),
        spellings={
            "target": ("--target", "-t"),
            "watch_interval_s": ("--watch-interval",),
            "ready_timeout_s": ("--ready-check-timeout-sec",),
        },
        defaults={"target": DEFAULT_TARGET},
    ),
    Flags("Workload", WorkloadConfig, spellings={"duration_s": ("--duration",)}),
    Flags("Requests", LoadConfig, without=("seed",)),
    Flags("Requests", BenchConfig, only=("num_warmups",)),
    Flags("Report", OutputConfig),
)
def bench(
    values: dict[str, Any],
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    token_file: TokenFile = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="File with the admin token.", show_default="from the environment")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits in ms of ttft, tpot, e2el, such as ttft:10000 tpot:100.", rich_help_panel="Report"),
    ] = None,
    percentile_metrics: Annotated[
        str,
        typer.Option(
            help="Metrics with percentiles: ttft, tpot, itl, e2el, client_queue_time, server_queue_time.",
            rich_help_panel="Report",
        ),
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles, such as 50,90,99.", rich_help_panel="Report")
    ] = "99",
) -> None:
    """Send load to a running server and report its performance.

    Options and results have the names of `vllm bench serve`.
    """
    values |= {name: value for name, value in locals().items() if name != "values"}
    with clean_exit():
        from serving.bench.options import bench_config
        from serving.bench.run import run_bench
        from serving.commands.chat import server_errors

        with server_errors():
            code = run_bench(bench_config(values, os.environ))
        if code:
            raise typer.Exit(code)


@app.command()
@with_flags(
    Flags(
        "Engine",
        EngineConfig,
        only=("model", "num_devices", "device_memory"),
        spellings=_SPELLINGS,
        defaults={"model": EngineConfig.model, "num_devices": 4, "device_memory": "1GiB"},
    )
)
def demo(
    values: dict[str, Any],
    opens_page: Annotated[bool, typer.Option("--open", help="Live page of the server, in a browser.")] = False,
) -> None:
    """Watch instances merge for a long prompt and split again.

    The demo serves short requests at the same time, on virtual CPU devices, and prints a report.
    """
    with clean_exit():
        from serving.commands.demo import run_demo

        run_demo(**values, opens_page=opens_page)


@app.command()
def gateway(
    workers: Annotated[list[str], typer.Option("--worker", help="URL of the HTTP port of a server; repeatable.")],
    more: Annotated[list[str] | None, typer.Argument(help="Further arguments of smg, after --.")] = None,
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the gateway.")] = 30000,
    metrics_port: Annotated[int, typer.Option(help="Port of its Prometheus metrics, on 127.0.0.1.")] = 29000,
    prints: Annotated[bool, typer.Option("--print", help="Command line of smg: print it and exit.")] = False,
) -> None:
    """Start the gateway smg in front of several servers. Needs the extra `gateway` of this package."""
    with clean_exit():
        from serving.commands.gateway import gateway_command, run_gateway

        run_gateway(gateway_command(workers, host, port, metrics_port, more or ()), prints)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON output.")] = False,
) -> None:
    """Check this machine and print advice for each problem. Exits with 1 if a check fails."""
    with clean_exit():
        from serving.commands.doctor import examine, print_findings

        findings = examine()
        print_findings(findings, as_json)
        if any(finding.status == "fail" for finding in findings):
            raise typer.Exit(EXIT_FAILURE)


app.command()(simulate)
for _command in ("placement", "replicate", "evict", "migrate", "scale_out", "scale_in"):
    app.command(_command.replace("_", "-"))(getattr(placement, _command))


def main() -> None:
    """Run the `amoeba` command."""
    atexit.register(lambda: flush_or_discard(sys.stderr))
    app()


if __name__ == "__main__":
    main()
