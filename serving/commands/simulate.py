"""The options of `amoeba simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from serving.errors import clean_exit


def simulate(
    ctx: typer.Context,
    more_slo: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="config.json, or its directory.")] = None,
    device: Annotated[str, typer.Option(help="A100-40, A100-80, A800, H100, H200, H20, or a .json file.")] = "H100",
    num_devices: Annotated[int | None, typer.Option(help="Devices of the cluster.", show_default="8")] = None,
    devices_per_scheduler: Annotated[
        int | None, typer.Option(help="Devices that one scheduler decides about.", show_default="those of a host")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="With commas between: amoeba, flying, static-tp1, static-mixed, seesaw, ...")
    ] = "amoeba,least_load_first,static-tp1",
    dataset_name: Annotated[str, typer.Option(help="random, mix (short and long requests), burst or trace.")] = "mix",
    trace: Annotated[Path | None, typer.Option(help=".npz, .csv or .jsonl file of times and lengths.")] = None,
    trace_length_scale: Annotated[float, typer.Option(help="Factor of a trace's lengths.")] = 1.0,
    trace_time_scale: Annotated[float, typer.Option(help="Factor of its times; below 1 is faster.")] = 1.0,
    trace_rate_scale: Annotated[float, typer.Option(help="Factor of its requests in the same time.")] = 1.0,
    duration_s: Annotated[float | None, typer.Option("--duration", help="Seconds in which requests come.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="The most requests.")] = None,
    request_rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    burstiness: Annotated[float, typer.Option(help="1: Poisson arrivals; less: in bursts; more: regular.")] = 1.0,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens of random and burst.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens that they generate.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Both are drawn from (1 - ratio) to (1 + ratio).")] = 0.0,
    short_input_len: Annotated[int, typer.Option(help="Prompt tokens of the mix's short requests.")] = 1000,
    short_output_len: Annotated[int, typer.Option(help="Tokens that they generate.")] = 128,
    short_per_minute: Annotated[float, typer.Option(help="How many come in a minute.")] = 60.0,
    long_input_len: Annotated[int, typer.Option(help="Prompt tokens of the mix's long requests.")] = 50000,
    long_output_len: Annotated[int, typer.Option(help="Tokens that they generate.")] = 128,
    long_per_minute: Annotated[float, typer.Option(help="How many come in a minute.")] = 1.0,
    low_rate: Annotated[str, typer.Option(help="Requests a second in burst's low phases, a range.")] = "2:5",
    high_rate: Annotated[str, typer.Option(help="Requests a second in burst's high phases, a range.")] = "10:30",
    phase_s: Annotated[float, typer.Option("--phase-s", help="Seconds of a phase of burst.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of lengths, arrivals, priorities and the router.")] = 0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits in seconds for ttft, tpot, e2el, such as ttft:10 tpot:0.1: amoeba and flying decide by the "
            "first two."
        ),
    ] = None,
    slo_share: Annotated[float, typer.Option(help="Share of requests that must keep them.")] = 0.99,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that a device runs at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Prompt tokens of one step.")] = 2048,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output in tokens.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens that clients allow.", show_default="those that come")
    ] = None,
    memory_utilization: Annotated[float, typer.Option(help="Share of a device's memory to use.")] = 0.9,
    activation_gb: Annotated[float | None, typer.Option(help="Temporaries of a device.")] = None,
    layers_per_step: Annotated[int, typer.Option(help="Layers that a transformation changes between steps.")] = 1,
    linger_s: Annotated[float, typer.Option(help="amoeba: seconds that a merged instance waits.")] = 60.0,
    merge_to: Annotated[int, typer.Option(help="amoeba: merges go to this degree at least.")] = 1,
    merge_again_after_s: Annotated[
        float | None, typer.Option(help="amoeba: a long request that waited this long may cause another merge.")
    ] = None,
    preemption: Annotated[str, typer.Option(help="flying: hard, soft or sequential, for urgent requests.")] = "hard",
    urgent_degree: Annotated[
        int | None, typer.Option(help="flying: degree of groups for urgent requests.", show_default="the highest")
    ] = None,
    max_pause_s: Annotated[float, typer.Option(help="flying: seconds for which requests pause at most.")] = 10.0,
    reserved_growth: Annotated[float, typer.Option(help="Share kept free of what requests may still grow by.")] = 0.0,
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds after which a request ends.")] = None,
    urgent_share: Annotated[float, typer.Option(help="Share of requests of higher priority.")] = 0.0,
    fail: Annotated[
        list[str] | None, typer.Option(help="Failures: transformations:2, or device:3@120+60 (at 120 s, for 60 s).")
    ] = None,
    router: Annotated[str, typer.Option(help="Of several schedulers: two_choices, round_robin.")] = "two_choices",
    profile: Annotated[list[Path] | None, typer.Option(help="Operator profiles of the device (vidur's CSV).")] = None,
    calibration: Annotated[Path | None, typer.Option(help="File that --calibrate wrote: simulate its engine.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure our own engine with --calibrate-model here, write this file and end.")
    ] = None,
    calibrate_model: Annotated[str, typer.Option(help="The model that --calibrate runs.")] = "smollm2-135m",
    kv_cache_tokens: Annotated[int | None, typer.Option(help="--calibrate: tokens of a device's KV cache.")] = None,
    json: Annotated[Path | None, typer.Option(help="File; the same seed gives the same bytes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture, such as run.png; needs matplotlib.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why policies lost.")] = False,
    find_max_rate: Annotated[bool, typer.Option("--find-max-rate", help="Find the highest rate within --slo.")] = False,
    find_min_devices: Annotated[
        bool, typer.Option("--find-min-devices", help="Find the fewest devices within --slo.")
    ] = False,
) -> None:
    """Simulate policies with a trace or a synthetic load, on devices that need not be here. docs/simulation.md."""
    flags = dict(locals())
    sources = {name: ctx.get_parameter_source(name) for name in flags}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    with clean_exit():
        if calibrate is not None:
            from serving.commands.calibrate import run_calibration

            run_calibration(
                calibrate, calibrate_model, num_devices or 4, max_num_seqs, max_num_batched_tokens, kv_cache_tokens,
                max_model_len, layers_per_step,
            )  # fmt: skip
            return
        from serving.commands.simulate_run import OutputConfig, run_simulation, simulation_config

        output = OutputConfig(json, plot, explain, find_max_rate, find_min_devices)
        if code := run_simulation(simulation_config(flags, given), output):
            raise typer.Exit(code)
