"""The `amoeba` command."""

import os
from typing import Annotated

import typer

import amoeba_jax
from amoeba_jax.config import EngineConfig
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
NumDevices = Annotated[int, typer.Option(help="Devices to use: 1, 2, 4 or 8 (on CPU they are virtual).")]


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
        from serving.generate import stream_to_stdout

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
def demo(
    model: Model = EngineConfig.model,
    num_devices: NumDevices = 4,
    device_memory: Annotated[str, typer.Option(help="Budget per device.")] = "1GiB",
) -> None:
    """Answer short prompts on small instances, which merge meanwhile for a long prompt, and split again."""
    with clean_exit():
        from serving.demo import run_demo

        run_demo(model, num_devices, device_memory)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what would not work on this machine, and say what to do. Exits 1 if something would not."""
    with clean_exit():
        from serving.doctor import examine, print_findings

        findings = examine()
        print_findings(findings, as_json)
        if any(finding.status == "fail" for finding in findings):
            raise typer.Exit(EXIT_FAILURE)


def main() -> None:
    """Entry point of the `amoeba` command."""
    app()


if __name__ == "__main__":
    main()
