"""Table of all attacks by name, and `Siege`, which runs one attack in another process."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

from attacks import lists, streams, texts
from attacks.pressure import Attacker, Tally
from attacks.processes import Child, ChildError

Attack = Callable[[Attacker], Awaitable[Callable[[], Awaitable[None]]]]
"""Function that prepares an attack and returns a function that sends it."""

ATTACKS: dict[str, Attack] = {
    "errors": texts.errors,
    "lists": lists.lists,
    "samples": lists.samples,
    "tokenizing": texts.tokenizing,
    "bad_words": lists.bad_words,
    "slow_readers": streams.slow_readers,
    "dropped": streams.dropped,
    "half_open": streams.half_open,
    "undecodable": lists.undecodable,
    "priorities": lists.priorities,
    "deadlines": streams.deadlines,
}
_PREPARED_WITHIN_S = 180.0
# Seconds beyond the length of an attack, in which its running calls end by their deadlines.
_LATE_S = 60.0
# Attackers have a low priority for the processor, because real attackers use other machines.
_NICE = 19


def chosen(names: str) -> list[str]:
    """Return the names in a comma-separated list; "" means all attacks. Raises `SystemExit` for an unknown name."""
    wanted = [name for name in names.split(",") if name] or list(ATTACKS)
    if unknown := sorted(set(wanted) - set(ATTACKS)):
        raise SystemExit(f"unknown attacks {', '.join(unknown)}: known are {', '.join(ATTACKS)}")
    return wanted


class Siege:
    """Attack in another process, from `begin` to `end`. Raises `ChildError` if it cannot prepare the attack."""

    def __init__(self, target: str, name: str, seconds: float):
        self._seconds = seconds
        self._child = Child(_main, target, name, seconds, nice=_NICE)
        try:
            if (problem := self._child.receive(_PREPARED_WITHIN_S)) != "ready":
                raise ChildError(problem)
        except ChildError:
            self._child.close()
            raise

    def begin(self) -> None:
        """Start the attack."""
        self._child.send("go")

    def end(self) -> Tally:
        """Wait until the attack ends, and return the counts of its calls. Raises `ChildError` if the attack does not
        end in time."""
        try:
            return self._child.receive(self._seconds + _LATE_S)
        finally:
            self._child.close()


def _main(pipe: Connection, target: str, name: str, seconds: float) -> None:
    asyncio.run(_attack(pipe, target, name, seconds))


async def _attack(pipe: Connection, target: str, name: str, seconds: float) -> None:
    attacker = Attacker(target, seconds)
    try:
        try:
            await attacker.connect()
            run = await ATTACKS[name](attacker)
        except Exception as error:
            pipe.send(f"{name} could not be prepared: {error!r}")
            return
        pipe.send("ready")
        pipe.recv()
        begin = time.monotonic()
        await run()
        attacker.tally.seconds = time.monotonic() - begin
    finally:
        await attacker.close()
    pipe.send(attacker.tally)
