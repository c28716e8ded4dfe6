"""Load of all kinds of requests, in another process.

Some requests have known answers. Other requests are cancelled, miss their deadline, or are so long that instances
merge. Sometimes a client transforms the instances.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc

from amoeba_jax import SamplingParams
from amoeba_jax.client import AsyncClient
from amoeba_jax.client._proto import inference_pb2 as pb
from attacks.forwarder import forwarded
from attacks.pressure import ADMIN, INFERENCE, Attacker, Call, Tally, generate, infer, start
from attacks.processes import Child

_KNOWN = (
    "Once upon a time",
    "Lily and Tom went to the park",
    "The little dog was sad because",
    "Mom said, be careful with the big red ball",
    "One day, a boy named Ben found a key in the garden and",
)
_GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
_KNOWN_TIMEOUT_S = 60.0
_BUSY_SAMPLES, _BUSY_TOKENS = 8, 256


@dataclass
class MixReport:
    """Results of the load.

    Attributes:
        checked: number of answers that were compared with the first answer to the same prompt.
        wrong: descriptions of answers that differ from the first answer.
    """

    tally: Tally = field(default_factory=Tally)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)


class Mix:
    """Mixed load in another process, which this object controls.

    The constructor first requests an answer to each known prompt. Then it starts the load, which compares later answers
    to the same prompts with these first answers. Create this object while the server is idle.

    Args:
        one_device_tokens: tokens that fit on one device. Long requests have more tokens.
        source: source address of the load. None: the default address.
        busy: minimum number of long answers in progress at any time.
    """

    def __init__(self, target: str, seed: int, one_device_tokens: int, source: str | None = None, busy: int = 0):
        self._child = Child(_main, target, seed, one_device_tokens, source, busy)
        self._child.receive(_KNOWN_TIMEOUT_S * len(_KNOWN))

    def finish(self) -> MixReport:
        """Stop sending, wait for all answers, and return the results. Raises `ChildError` if the process fails."""
        self._child.send("finish")
        return self._child.receive(180)

    def __enter__(self) -> "Mix":
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.close()


def _main(pipe: Connection, target: str, seed: int, one_device_tokens: int, source: str | None, busy: int) -> None:
    asyncio.run(_serve(pipe, target, seed, one_device_tokens, source, busy))


async def _serve(
    pipe: Connection, target: str, seed: int, one_device_tokens: int, source: str | None, busy: int
) -> None:
    async with forwarded(target, source) if source else contextlib.nullcontext(target) as address:
        await _Load(pipe, address, seed, one_device_tokens, busy).run()


class _Load:
    def __init__(self, pipe: Connection, target: str, seed: int, one_device_tokens: int, busy: int):
        self._pipe, self._target, self._busy = pipe, target, busy
        self._dice = random.Random(seed)
        self._one_device_tokens = one_device_tokens
        self._report = MixReport()
        self._over = asyncio.Event()

    async def run(self) -> None:
        sender = Attacker(self._target, 0)
        sender.tally = self._report.tally
        await sender.connect()
        async with AsyncClient(self._target) as client:
            first = [(await client.generate(text, _GREEDY, timeout_s=_KNOWN_TIMEOUT_S))[0].token_ids for text in _KNOWN]
            self._pipe.send("ready")
            every_s: list[tuple[float, Callable[[], Awaitable[None]]]] = [
                (0.5, lambda: self._check(client, first)),
                (0.5, lambda: self._check_infer(sender, client, first)),
                (0.2, lambda: self._any(sender)),
                (0.3, lambda: self._any(sender)),
                (0.5, lambda: self._cancel(sender)),
                (1.0, lambda: self._abort(sender)),
                (5.0, lambda: self._long(sender)),
                (20.0, lambda: self._transform(sender)),
                *[(0.0, lambda: self._fill(sender))] * -(-self._busy // _BUSY_SAMPLES),
            ]
            loops = [asyncio.ensure_future(self._repeat(pause_s, what)) for pause_s, what in every_s]
            while not self._pipe.poll():
                await asyncio.sleep(0.2)
            self._over.set()
            await asyncio.gather(*loops)
        await sender.close()
        self._pipe.send(self._report)

    async def _repeat(self, pause_s: float, what: Callable[[], Awaitable[None]]) -> None:
        while not self._over.is_set():
            await what()
            try:
                async with asyncio.timeout(self._dice.uniform(0, 2 * pause_s)):
                    await self._over.wait()
            except TimeoutError:
                continue

    async def _check(self, client: AsyncClient, first: list[tuple[int, ...]]) -> None:
        which = self._dice.randrange(len(_KNOWN))
        try:
            answer = (await client.generate(_KNOWN[which], _GREEDY, timeout_s=_KNOWN_TIMEOUT_S))[0]
        except grpc.aio.AioRpcError as error:
            self._report.tally.add("known", error.code().name, error.details() or "")
            return
        # A server that shuts down returns partial answers.
        self._report.tally.add("known", "OK" if answer.finish_reason == "length" else answer.finish_reason)
        if answer.finish_reason == "length":
            self._compare(which, answer.token_ids, first[which])

    async def _check_infer(self, sender: Attacker, client: AsyncClient, first: list[tuple[int, ...]]) -> None:
        """Send a greedy request over the Open Inference Protocol, and compare its text with the first answer."""
        which = self._dice.randrange(len(_KNOWN))
        settings = json.dumps({"temperature": 0, "max_tokens": _GREEDY.max_tokens, "ignore_eos": True})
        call = infer("known, Open Inference", sender.info.model, settings, text=_KNOWN[which])
        try:
            text = (await client.detokenize(first[which], timeout_s=_KNOWN_TIMEOUT_S)).strip()
            data = await start(self._channel(sender), call)
        except grpc.aio.AioRpcError as error:
            self._report.tally.add(call.label, error.code().name, error.details() or "")
            return
        self._report.tally.add(call.label, "OK")
        self._compare(which, text.encode() in data, True)

    def _compare(self, which: int, answer: object, expected: object) -> None:
        self._report.checked += 1
        if answer != expected and len(self._report.wrong) < 20:
            self._report.wrong.append(f"{_KNOWN[which]!r}: {answer} instead of {expected}")

    async def _any(self, sender: Attacker) -> None:
        """Send a request with random settings. One in eight requests has a deadline of at most 0.2 s."""
        dice = self._dice
        tokens = dice.randint(1, 64)
        late = dice.random() < 0.125
        timeout_s = dice.uniform(0.01, 0.2) if late else 60.0
        params = {"max_tokens": tokens, "temperature": dice.choice((0.5, 1.0)), "top_k": dice.choice((0, 5, 50))}
        params |= dice.choice(({}, {"seed": 3}, {"n": 4}, {"stop": ["."]}, {"logprobs": 5}, {"presence_penalty": 1.0}))
        ids = dice.choices(range(3, sender.info.vocab_size), k=dice.randint(1, 200))
        match dice.randrange(4):
            case 0:
                call = infer("Open Inference", sender.info.model, json.dumps(params), timeout_s=timeout_s)
            case 1:
                settings = json.dumps(params)
                call = infer("Open Inference stream", sender.info.model, settings, stream=True, timeout_s=timeout_s)
            case _:
                message = pb.SamplingParams(**params)
                call = generate("sampled", message, token_ids=pb.TokenIds(ids=ids), timeout_s=timeout_s)
        if late:
            call = Call("too late", call.path, call.data, call.timeout_s)
        await sender.send(call, self._channel(sender))

    async def _cancel(self, sender: Attacker) -> None:
        params = pb.SamplingParams(max_tokens=500, ignore_eos=True, n=self._dice.choice((1, 3)))
        call = start(self._channel(sender), generate("cancelled", params))
        await asyncio.sleep(self._dice.uniform(0, 0.5))
        call.cancel()
        sender.tally.add("cancelled", "dropped")

    async def _abort(self, sender: Attacker) -> None:
        """Send a request and abort it by its id."""
        name = f"to be aborted {time.monotonic_ns()}"
        params = pb.SamplingParams(max_tokens=500, ignore_eos=True)
        channel = self._channel(sender)
        sending = asyncio.ensure_future(sender.send(generate("aborted", params, request_id=name), channel))
        await asyncio.sleep(self._dice.uniform(0, 0.3))
        message = pb.AbortRequest(request_id=name)
        await sender.send(Call("abort", INFERENCE + "Abort", message.SerializeToString()), channel)
        await sending

    async def _long(self, sender: Attacker) -> None:
        """Send a request that does not fit on one device, if the model's context is long enough."""
        most = sender.info.max_model_len - 40
        length = min(most, self._dice.randint(self._one_device_tokens, 2 * self._one_device_tokens))
        ids = pb.TokenIds(ids=self._dice.choices(range(3, sender.info.vocab_size), k=length))
        params = pb.SamplingParams(max_tokens=32, ignore_eos=True)
        await sender.send(generate("long", params, token_ids=ids, timeout_s=60), self._channel(sender))

    async def _fill(self, sender: Attacker) -> None:
        """Request long answers without streaming. They occupy slots, but are little work for the client."""
        settings = json.dumps({"n": _BUSY_SAMPLES, "max_tokens": _BUSY_TOKENS, "temperature": 1.0, "ignore_eos": True})
        await sender.send(infer("busy", sender.info.model, settings, timeout_s=60), self._channel(sender))

    async def _transform(self, sender: Attacker) -> None:
        """Request a transformation. The server may refuse the request while another transformation runs."""
        message = pb.TransformRequest(tensor_parallel_size=self._dice.choice((1, 2, 4)), layers_per_step=2)
        call = Call("transform", ADMIN + "Transform", message.SerializeToString(), timeout_s=60)
        await sender.send(call, self._channel(sender))

    def _channel(self, sender: Attacker) -> grpc.aio.Channel:
        return self._dice.choice(sender.channels)
