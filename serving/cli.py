"""The `amoeba` command."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import amoeba_jax
from amoeba_jax.config import EngineConfig
from serving.commands.simulate import simulate
from serving.errors import EXIT_FAILURE, clean_exit

# Commands import what they need themselves: `amoeba --help` must not wait for JAX.

app = typer.Typer(
    name="amoeba",
    help="Serve large language models whose tensor-parallel degree is a run-time property.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, model directory, GGUF file, or hub name.")]
DEFAULT_TARGET = "127.0.0.1:50051"
Target = Annotated[str, typer.Option("--target", "-t", help="Host and port of the server.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token.", show_default="from the environment")]
TLSAuthority = Annotated[Path | None, typer.Option(help="PEM file with the certificates to trust; turns TLS on.")]
NumDevices = Annotated[int, typer.Option(help="Devices to use: 1, 2, 4 or 8 (on CPU they are virtual).")]


# Flags of `serve` that are none of a server's settings.
_NO_SETTINGS = ("config", "warmup", "wait_for", "shutdown_timeout")


class WaitFor(StrEnum):
    """Which programs a server waits for before it is ready."""

    START = "start"
    ALL = "all"


# Of a server and of `warmup`, which compiles for it. Without a flag, the file's value counts, or the default.
ServerModel = Annotated[
    str | None, typer.Option("--model", "-m", help="Built-in name, model directory, GGUF file, or hub name.")
]
ServerDevices = Annotated[int | None, typer.Option(help="Devices to use: 1, 2, 4 or 8.")]
DeviceMemory = Annotated[str | None, typer.Option(help='Budget per device, such as "2GiB".')]
DType = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt plus output in tokens.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences that an instance decodes at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Prompt tokens of one step.")]
KVCacheTokens = Annotated[
    int | None, typer.Option(help="Tokens of one device's KV cache.", show_default="what fits the budget")
]
SegmentLayers = Annotated[int | None, typer.Option(help="Most layers of one program.", show_default="4 on CPU, else 8")]
CompileCache = Annotated[
    str | None, typer.Option(help="Directory of the compile cache.", show_default="the user's cache directory")
]
CompileCacheSize = Annotated[str | None, typer.Option(help="The most that it holds.", show_default="8GiB")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"amoeba-jax {amoeba_jax.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    # It is not missing: transformers' models, which need torch, are not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@app.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to answer; - reads stdin.")],
    model: Model = EngineConfig.model,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 draws.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this sum.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Makes drawing repeatable.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the model's chat template.", show_default="if there is one"),
    ] = None,
    num_devices: NumDevices = 1,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="1, 2 or 4.")] = 1,
    device_memory: Annotated[
        str | None, typer.Option(help='Budget per device, such as "2GiB".', show_default="2GiB on CPU")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = EngineConfig.dtype,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output.", show_default="the model's own")
    ] = None,
) -> None:
    """Complete one prompt, printing text as it is produced. Figures go to stderr."""
    with clean_exit():
        from amoeba_jax.sampling_params import SamplingParams
        from serving.commands.generate import stream_to_stdout

        params = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
        )
        config = EngineConfig(
            model=model,
            num_devices=num_devices,
            tensor_parallel_size=tensor_parallel_size,
            device_memory=device_memory,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=seed,
        )
        stream_to_stdout(config, prompt, params, chat)


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings by the flags' names; flags win.")] = None,
    model: ServerModel = None,
    num_devices: ServerDevices = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Degree to start with: 1, 2 or 4.")
    ] = None,
    device_memory: DeviceMemory = None,
    dtype: DType = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_tokens: KVCacheTokens = None,
    segment_layers: SegmentLayers = None,
    compile_cache: CompileCache = None,
    compile_cache_size: CompileCacheSize = None,
    strict_compile: Annotated[
        bool | None, typer.Option(help="Refuse what would be compiled while serving.", show_default="no")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Who runs where, and when instances change: docs/scheduling.md.", show_default="amoeba"),
    ] = None,
    linger_s: Annotated[
        float | None, typer.Option(help="Seconds that a merged instance waits for more.", show_default="60")
    ] = None,
    layers_per_step: Annotated[
        int | None, typer.Option(help="Layers that a transformation changes between steps.", show_default="1")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 for any.", show_default="50051")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of AdminService.", show_default="the same as --port")
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="HTTP port of the metrics.", show_default="9400")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file; read again when it changes.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="PEM file; clients need a certificate by it.")] = None,
    api_token_file: Annotated[
        Path | None, typer.Option(help="File with the token of clients.", show_default="$AMOEBA_API_TOKEN")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="File with the token of admins.", show_default="$AMOEBA_ADMIN_TOKEN")
    ] = None,
    max_queued_requests: Annotated[int | None, typer.Option(help="Accepted requests without a token.")] = None,
    max_queued_tokens: Annotated[int | None, typer.Option(help="Prompt tokens of these.")] = None,
    max_requests_per_client: Annotated[int | None, typer.Option(help="Requests of an address at once.")] = None,
    max_refusals_per_second: Annotated[
        int | None, typer.Option(help="Refused calls of a client that are answered without a delay.", show_default="25")
    ] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that requests may go on after SIGTERM.", show_default="30")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of an OpenTelemetry collector; needs the extra otel.")
    ] = None,
    warmup: Annotated[bool, typer.Option(help="Compile programs before they are needed.")] = True,
    wait_for: Annotated[
        WaitFor,
        typer.Option(help="Be ready with the programs of the first layout (start; others follow), or with all (all)."),
    ] = WaitFor.START,
) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C."""
    flags = {name: value for name, value in locals().items() if name not in _NO_SETTINGS}
    with clean_exit():
        from serving.commands.serve import run_server
        from serving.commands.serve_config import read_file, serve_settings

        flags["shutdown_timeout_s"] = shutdown_timeout
        values = read_file(config) if config else {}
        values |= {name: str(v) if isinstance(v, Path) else v for name, v in flags.items() if v is not None}
        code = run_server(*serve_settings(values, os.environ), warm_up=wait_for if warmup else None)
        if code:
            raise typer.Exit(code)


@app.command()
def warmup(
    config: Annotated[Path | None, typer.Option(help="The server's YAML file; flags win.")] = None,
    model: ServerModel = None,
    num_devices: ServerDevices = None,
    degrees: Annotated[
        list[int] | None, typer.Option("--degree", help="Of the instances: 1, 2 or 4.", show_default="all")
    ] = None,
    device_memory: DeviceMemory = None,
    dtype: DType = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_tokens: KVCacheTokens = None,
    segment_layers: SegmentLayers = None,
    compile_cache: CompileCache = None,
    compile_cache_size: CompileCacheSize = None,
    jobs: Annotated[
        int | None, typer.Option(help="Programs to compile at once.", show_default="one a processor, at most 8")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Of the server's devices: cpu or cuda.", show_default="this machine's")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compile nothing to keep; exit 1 if any is missing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List programs and the memory plan; any devices.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compile all programs of a server into the compile cache, with the server's own sizes.

    Loads no weights: of a model's directory only config.json is needed.
    """
    flags = {
        "model": model,
        "num_devices": num_devices,
        "device_memory": device_memory,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_tokens": kv_cache_tokens,
        "segment_layers": segment_layers,
        "compile_cache": compile_cache,
        "compile_cache_size": compile_cache_size,
        "compile_jobs": jobs,
    }
    with clean_exit():
        from serving.commands.serve_config import read_file, serve_settings
        from serving.commands.warmup import run_warmup

        values = read_file(config) if config else {}
        values |= {name: value for name, value in flags.items() if value is not None}
        _, engine_config, _ = serve_settings(values, os.environ)
        code = run_warmup(engine_config, degrees, platform=platform, dry_run=dry_run, check=check, as_json=as_json)
        if code:
            raise typer.Exit(code)


@app.command()
def chat(
    target: Target = DEFAULT_TARGET,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 draws.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this sum.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes drawing repeatable.")] = None,
    token_file: TokenFile = None,
    tls_ca: TLSAuthority = None,
) -> None:
    """Talk with the model of a running server."""
    with clean_exit():
        from amoeba_jax.sampling_params import SamplingParams
        from serving.commands.chat import open_client, run_chat

        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
        token = os.environ.get("AMOEBA_API_TOKEN")
        with open_client(target, token_file, token, tls_ca) as client:
            run_chat(client, params, system)


@app.command()
def transform(
    tensor_parallel_size: Annotated[int, typer.Argument(help="Degree afterwards: 1, 2 or 4.")],
    devices: Annotated[list[int] | None, typer.Option("--device", help="Device of an instance that changes.")] = None,
    variant: Annotated[str, typer.Option(help="How; see docs/transformation.md.")] = "in_place_overlapped",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a degree whose programs are still being compiled.")
    ] = False,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TLSAuthority = None,
) -> None:
    """Ask a running server to merge or split its instances. Needs the admin token where there are tokens."""
    with clean_exit():
        from serving.commands.chat import open_client, run_transform

        token = os.environ.get("AMOEBA_ADMIN_TOKEN")
        with open_client(target, token_file, token, tls_ca) as client:
            run_transform(client, tensor_parallel_size, devices, variant, wait)


@app.command()
def bench(
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TLSAuthority = None,
    admin_target: Annotated[
        str | None, typer.Option(help="Host and port of AdminService.", show_default="--target")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="File with its token.", show_default="from the environment")
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, mix (short and long requests), burst or trace.")
    ] = "random",
    num_prompts: Annotated[
        int | None, typer.Option(help="The most requests.", show_default="1000, all of a trace, or by --duration")
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration", help="Seconds in which requests come; those that run may end.")
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second; inf: all at once.", show_default="the trace's times, or inf"),
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1: Poisson arrivals; less: in bursts; more: regular.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="The most requests at once; others wait here.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and prompts.")] = 0,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens of random.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens that random generates.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Both are drawn from (1 - ratio) to (1 + ratio).")] = 0.0,
    short_input_len: Annotated[int, typer.Option(help="Prompt tokens of the mix's short requests.")] = 1000,
    short_output_len: Annotated[int, typer.Option(help="Tokens that they generate.")] = 128,
    short_per_minute: Annotated[float, typer.Option(help="How many come in a minute.")] = 60.0,
    long_input_len: Annotated[int, typer.Option(help="Prompt tokens of the mix's long requests.")] = 50000,
    long_output_len: Annotated[int, typer.Option(help="Tokens that they generate.")] = 128,
    long_per_minute: Annotated[float, typer.Option(help="How many come in a minute.")] = 1.0,
    burst_rate: Annotated[float, typer.Option(help="Requests a second in bursts; --request-rate between them.")] = 20.0,
    burst_every_s: Annotated[float, typer.Option("--burst-every", help="Seconds from burst to burst.")] = 120.0,
    burst_s: Annotated[float, typer.Option("--burst-length", help="Seconds of a burst.")] = 30.0,
    trace: Annotated[Path | None, typer.Option(help=".npz, .csv or .jsonl file of times and lengths.")] = None,
    trace_length_scale: Annotated[float, typer.Option(help="Factor of a trace's lengths.")] = 1.0,
    trace_time_scale: Annotated[float, typer.Option(help="Factor of its times; below 1 is faster.")] = 1.0,
    trace_rate_scale: Annotated[float, typer.Option(help="Factor of its requests in the same time.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 draws.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate as much as planned, whatever the model says.")] = True,
    num_warmups: Annotated[int, typer.Option(help="Send the first request so often before, uncounted.")] = 0,
    request_id_prefix: Annotated[str, typer.Option(help="Of the requests' ids.")] = "bench-",
    ready_timeout_s: Annotated[
        float, typer.Option("--ready-check-timeout-sec", help="Seconds to wait for a server that is loading.")
    ] = 0.0,
    watch_interval_s: Annotated[
        float, typer.Option("--watch-interval", help="Seconds between looks at the instances; 0: none.")
    ] = 0.5,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits in ms for ttft, tpot, e2el, such as ttft:10000 tpot:100.")
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl, e2el, client_queue_time.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Such as 50,90,99.")] = "99",
    label: Annotated[str | None, typer.Option(help="Goes into the result.")] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the result as JSON.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With lists of all requests.")] = False,
    result_dir: Annotated[Path | None, typer.Option(help="Directory for it.", show_default="this one")] = None,
    result_filename: Annotated[str | None, typer.Option(help="Its name.", show_default="what and when")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture over time, such as run.png; needs matplotlib.")] = None,
) -> None:
    """Send load to a running server and report what it did. Options and results as `vllm bench serve` has them."""
    flags = dict(locals())
    with clean_exit():
        from serving.bench.options import bench_config
        from serving.bench.run import run_bench
        from serving.commands.chat import server_errors

        with server_errors():
            code = run_bench(bench_config(flags, os.environ))
        if code:
            raise typer.Exit(code)


@app.command()
def demo(
    model: Model = EngineConfig.model,
    num_devices: NumDevices = 4,
    device_memory: Annotated[str, typer.Option(help="Budget per device.")] = "1GiB",
) -> None:
    """Answer short prompts on small instances, which merge meanwhile for a long prompt, and split again."""
    with clean_exit():
        from serving.commands.demo import run_demo

        run_demo(model, num_devices, device_memory)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what would not work on this machine, and say what to do. Exits 1 if something would not."""
    with clean_exit():
        from serving.commands.doctor import examine, print_findings

        findings = examine()
        print_findings(findings, as_json)
        if any(finding.status == "fail" for finding in findings):
            raise typer.Exit(EXIT_FAILURE)


app.command()(simulate)


def main() -> None:
    """Entry point of the `amoeba` command."""
    app()


if __name__ == "__main__":
    main()
