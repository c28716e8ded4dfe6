"""Options of `amoeba simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from serving.errors import clean_exit


def simulate(
    ctx: typer.Context,
    more_slo: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Model: a config.json, or its directory.")] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Device: A100, A100-40, A100-PCIe, A800, B200, H100, H200, H20, L40S, MI300X, a JSON file, or several "
            "kinds with their numbers, such as H100:8+A100:16."
        ),
    ] = "H100",
    num_devices: Annotated[int | None, typer.Option(help="Devices of the cluster.", show_default="8")] = None,
    devices_per_scheduler: Annotated[
        int | None, typer.Option(help="Devices of each scheduler.", show_default="the devices of a host")
    ] = None,
    instances_at_start: Annotated[
        int | None,
        typer.Option(
            help="Instances of each scheduler at the start. The other devices are empty: only cocoserve uses them.",
            show_default="as many as fit",
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Policies with commas between: amoeba, flying, static-tp1, static:tp4x1+tp1x4, disaggregated, seesaw, "
            "..., or a class in a file: my_policy.py:Sjf."
        ),
    ] = "amoeba,least_load_first,static-tp1",
    dataset_name: Annotated[
        str, typer.Option(help="Workload: random, mix (short and long requests), burst or trace.")
    ] = "mix",
    trace: Annotated[Path | None, typer.Option(help="File of arrival times and lengths: .npz, .csv or .jsonl.")] = None,
    trace_length_scale: Annotated[float, typer.Option(help="Factor of the lengths of a trace.")] = 1.0,
    trace_time_scale: Annotated[
        float, typer.Option(help="Factor of the arrival times of a trace; below 1 is faster.")
    ] = 1.0,
    trace_rate_scale: Annotated[
        float, typer.Option(help="Factor of the number of requests of a trace in the same time.")
    ] = 1.0,
    duration_s: Annotated[float | None, typer.Option("--duration", help="Seconds in which requests arrive.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Maximum number of requests.")] = None,
    request_rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of arrivals: 1 is a Poisson process, less is burstier.")
    ] = 1.0,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens of random and burst.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Output tokens of random and burst.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Spread of these lengths: factors from 1 - ratio to 1 + ratio.")
    ] = 0.0,
    short_input_len: Annotated[int, typer.Option(help="Prompt tokens of short requests in mix.")] = 1000,
    short_output_len: Annotated[int, typer.Option(help="Output tokens of short requests in mix.")] = 128,
    short_per_minute: Annotated[float, typer.Option(help="Short requests per minute in mix.")] = 60.0,
    long_input_len: Annotated[int, typer.Option(help="Prompt tokens of long requests in mix.")] = 50000,
    long_output_len: Annotated[int, typer.Option(help="Output tokens of long requests in mix.")] = 128,
    long_per_minute: Annotated[float, typer.Option(help="Long requests per minute in mix.")] = 1.0,
    low_rate: Annotated[str, typer.Option(help="Range of requests per second in low phases of burst.")] = "2:5",
    high_rate: Annotated[str, typer.Option(help="Range of requests per second in high phases of burst.")] = "10:30",
    phase_s: Annotated[float, typer.Option("--phase-s", help="Seconds of each phase of burst.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of lengths, arrivals, priorities and the router.")] = 0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits in seconds of ttft, tpot, e2el, such as ttft:10 tpot:0.1, also of a class: chat:ttft:2. The "
            "policies amoeba and flying use ttft and tpot."
        ),
    ] = None,
    slo_share: Annotated[float, typer.Option(help="Share of requests that must meet the limits.")] = 0.99,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of running requests of a device.", show_default="one for each 1,024 tokens of cache"
        ),
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Maximum prompt tokens of one step.")] = 2048,
    max_model_len: Annotated[int | None, typer.Option(help="Maximum tokens of prompt and output.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output limit that clients send.", show_default="the output length")
    ] = None,
    memory_utilization: Annotated[float, typer.Option(help="Share of a device's memory that serving may use.")] = 0.9,
    activation_gb: Annotated[float | None, typer.Option(help="Gigabytes of temporaries on each device.")] = None,
    layers_per_step: Annotated[int, typer.Option(help="Layers that a transformation changes between two steps.")] = 1,
    linger_s: Annotated[float, typer.Option(help="Seconds before an idle merged instance splits (amoeba).")] = 60.0,
    merge_to: Annotated[int, typer.Option(help="Minimum degree of merges (amoeba).")] = 1,
    merge_again_after_s: Annotated[
        float | None,
        typer.Option(help="Seconds of waiting after which a long request may cause another merge (amoeba)."),
    ] = None,
    preemption: Annotated[
        str, typer.Option(help="Preemption by urgent requests (flying): hard, soft or sequential.")
    ] = "hard",
    urgent_degree: Annotated[
        int | None, typer.Option(help="Degree of groups for urgent requests (flying).", show_default="the highest")
    ] = None,
    max_pause_s: Annotated[float, typer.Option(help="Maximum seconds of a pause (flying).")] = 10.0,
    reserved_growth: Annotated[
        float, typer.Option(help="Reserved share of the tokens that requests may still generate.")
    ] = 0.0,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", help="Seconds after which a request is cancelled.")
    ] = None,
    urgent_share: Annotated[float, typer.Option(help="Share of requests with a higher priority.")] = 0.0,
    fail: Annotated[
        list[str] | None, typer.Option(help="Failures: transformations:2, or device:3@120+60 (at 120 s, for 60 s).")
    ] = None,
    router: Annotated[
        str, typer.Option(help="Router of several schedulers: two_choices or round_robin.")
    ] = "two_choices",
    profile: Annotated[list[Path] | None, typer.Option(help="Operator profiles of the device (vidur's CSV).")] = None,
    calibration: Annotated[Path | None, typer.Option(help="File of --calibrate, whose engine is simulated.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="File to write measurements of this machine's engine to; simulates nothing.")
    ] = None,
    calibrate_model: Annotated[str, typer.Option(help="Model that --calibrate measures.")] = "smollm2-135m",
    kv_cache_tokens: Annotated[int | None, typer.Option(help="Tokens of a device's KV cache for --calibrate.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the results; the same seed gives the same bytes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot, such as run.png; needs matplotlib.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Reasons why policies are slower than the best.")] = False,
    find_max_rate: Annotated[
        bool, typer.Option("--find-max-rate", help="Search for the highest rate within --slo.")
    ] = False,
    find_min_devices: Annotated[
        bool, typer.Option("--find-min-devices", help="Search for the fewest devices within --slo.")
    ] = False,
    sweep_rate: Annotated[
        str | None, typer.Option(help="Factors of the request rate for a table of goodput, such as 0.5,1,2.")
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Conclusions that survive 20% more or less of each constant.")
    ] = False,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of a device for an hour in USD.")] = None,
) -> None:
    """Simulate scheduling policies on devices that this machine need not have.

    The load is a trace or synthetic. See docs/simulation.md.
    """
    flags = dict(locals())
    sources = {name: ctx.get_parameter_source(name) for name in flags}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    with clean_exit():
        if calibrate is not None:
            from serving.commands.calibrate import run_calibration

            run_calibration(
                calibrate, calibrate_model, num_devices or 4, max_num_seqs or 64, max_num_batched_tokens,
                kv_cache_tokens, max_model_len, layers_per_step,
            )  # fmt: skip
            return
        from serving.commands.simulate_run import OutputConfig, read_factors, run_simulation, simulation_config

        factors = read_factors(sweep_rate)
        output = OutputConfig(json, plot, explain, find_max_rate, find_min_devices, factors, sensitivity)
        if code := run_simulation(simulation_config(flags, given), output):
            raise typer.Exit(code)
