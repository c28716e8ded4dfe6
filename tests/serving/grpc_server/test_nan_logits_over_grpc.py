"""NaN logits: in every protocol, the affected request fails with INTERNAL and other requests succeed."""

import json
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from live_server import Live, code_and_text, wait_until
from prometheus_client import generate_latest
from tiny_models import byte_model, byte_token, poison
from tritonclient.utils import InferenceServerException

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client._proto import inference_pb2 as pb

pytestmark = pytest.mark.usefixtures("quick_compile")

POISON = "~"
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logit_bias={byte_token(POISON): -100})
TEXT = "the model's logits for this request are not numbers; other requests are not affected"


@pytest.fixture(scope="module")
def poisoned_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with a model in which one byte's embedding is NaN."""
    directory = byte_model(tmp_path_factory.mktemp("poisoned") / "tiny-nan", tie_word_embeddings=False)
    poison(directory, byte_token(POISON))
    settings = {"device_memory": "64MiB", "max_num_seqs": 4, "progress": False, "compile_cache": compile_cache}
    with LLM(directory, num_devices=2, **settings) as llm:
        yield llm


@pytest.fixture
def live(start: Callable[..., Live], poisoned_llm: LLM) -> Live:
    return start(poisoned_llm)


def counted(live: Live, name: str) -> float:
    """Return a metric after the engine's next report."""
    live.server.metrics.latest = None
    wait_until(lambda: live.server.metrics.latest is not None)
    text = generate_latest(live.server.metrics.registry).decode()
    (line,) = (line for line in text.splitlines() if line.startswith(f"amoeba:{name} "))
    return float(line.split()[1])


@pytest.mark.slow
def test_internal_for_that_request_alone(live: Live):
    expected = live.llm.generate("hello", LONG)[0].outputs[0].token_ids
    before = counted(live, "nan_logits_total")
    params = pb.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logit_bias={byte_token(POISON): -100})
    healthy = [live.generate(text="hello", params=params) for _ in range(3)]
    received = [[*next(stream).completions[0].token_ids] for stream in healthy]
    for text in (POISON, f"a long beginning {POISON}", f"{POISON} and more"):
        code, said = code_and_text(lambda text=text: list(live.generate(text=text)))
        assert (code, said) == (grpc.StatusCode.INTERNAL, TEXT)
    for tokens, stream in zip(received, healthy, strict=True):
        tokens += [token for message in stream for token in message.completions[0].token_ids]
        assert tokens == list(expected)
    assert counted(live, "nan_logits_total") == before + 3
    assert counted(live, 'request_success_total{finished_reason="error"}') == 3
    live.check_idle()


def test_internal_in_the_midst_of_a_stream(live: Live):
    only = pb.SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, allowed_token_ids=pb.TokenIds(ids=[byte_token(POISON)])
    )
    stream = live.generate(text="hello", params=only)
    code, said = code_and_text(lambda: list(stream))
    assert (code, said) == (grpc.StatusCode.INTERNAL, TEXT)
    live.check_idle()


def test_open_inference_says_so_too(live: Live):
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([f"x{POISON}"], dtype=object))
    settings = triton.InferInput("sampling_parameters", [1], "BYTES")
    settings.set_data_from_numpy(np.array([json.dumps({"temperature": 0, "max_tokens": 8})], dtype=object))
    with (
        triton.InferenceServerClient(live.target) as client,
        pytest.raises(InferenceServerException, match="not numbers") as caught,
    ):
        client.infer("tiny-nan", [text, settings])
    assert caught.value.status() == "StatusCode.INTERNAL"
    live.check_idle()
