"""The engine's queue as policies see it, kept up to date by what changes."""

from amoeba_jax.engine.engine import Engine
from amoeba_jax.instances.sequence import Sequence
from serving.scheduler import QueueSnapshot, WaitingQueue, WaitingRequest


class WaitingView:
    """Waiting sequences by the names that the scheduler knows. Used by the dispatcher thread only.

    Those that nothing can be done for are left out: their last token is still in flight from the device, or a program
    is being compiled for them.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._version = -1
        self._names: dict[int, str] = {}
        self._sequences: dict[str, Sequence] = {}
        self._shown = WaitingQueue()
        self._hidden: dict[str, Sequence] = {}
        self._special: dict[str, Sequence] = {}
        """Sequences that may wait for a program of their own, shown or not."""
        self.siblings: list[Sequence] = []
        """Continuations that may share the pages of their prompt's first one."""

    def update(self) -> None:
        """Take over what has changed since the last time."""
        waiting = self._engine.waiting
        changes = waiting.changes_since(self._version)
        if changes is None:
            changes = dict.fromkeys(self._names) | {id(sequence): sequence for sequence in waiting}
        self._version = waiting.version
        for number, sequence in changes.items():
            if (name := self._names.pop(number, None)) is not None:
                self._forget(name)
            if sequence is not None:
                self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        name = name_of(sequence)
        while name in self._sequences:  # a client may have chosen just that
            name += "'"
        self._names[id(sequence)], self._sequences[name] = name, sequence
        self._hidden[name] = sequence
        if sequence.sampling.uses_state or sequence.siblings or sequence.leader is not None:
            self._special[name] = sequence
        if sequence.leader is not None:
            self.siblings.append(sequence)

    def _forget(self, name: str) -> None:
        sequence = self._sequences.pop(name)
        self._special.pop(name, None)
        if self._hidden.pop(name, None) is None:
            self._shown.remove(name)
        if sequence.leader is not None:
            self.siblings.remove(sequence)

    def snapshot(self) -> QueueSnapshot:
        """The requests that can be placed now."""
        self.update()
        awaits = self._awaited()
        for name, sequence in self._special.items():
            if name not in self._hidden and awaits(sequence):
                self._shown.remove(name)
                self._hidden[name] = sequence
        for name, sequence in list(self._hidden.items()):
            if not sequence.num_in_flight and not (name in self._special and awaits(sequence)):
                del self._hidden[name]
                self._shown.add(waiting_request(name, sequence))
        return self._shown.snapshot()

    @property
    def hidden_tokens(self) -> tuple[int, ...]:
        """Most tokens of each request that waits and is not shown now."""
        return tuple(sequence.max_total_tokens for sequence in self._hidden.values())

    def _awaited(self):
        """`Engine.awaits_program`, asked once for all sequences that need the same programs."""
        known: dict[tuple[bool, bool], bool] = {}

        def awaits(sequence: Sequence) -> bool:
            shares = bool(sequence.siblings) or (sequence.leader is not None and sequence.leader.slot >= 0)
            key = sequence.sampling.uses_state, shares
            if key not in known:
                known[key] = self._engine.admission.awaits_program(sequence)
            return known[key]

        return awaits

    def get(self, name: str) -> Sequence | None:
        """A sequence that is shown, by its name."""
        return None if name in self._hidden else self._sequences.get(name)


def name_of(sequence: Sequence) -> str:
    """The name of its request, numbered where there are `n`."""
    return f"{sequence.request_id}[{sequence.index}]" if sequence.index else sequence.request_id


def waiting_request(name: str, sequence: Sequence) -> WaitingRequest:
    """What a policy sees of a waiting sequence."""
    return WaitingRequest(
        name,
        prompt_tokens=sequence.num_known,
        max_total_tokens=sequence.max_total_tokens,
        priority=sequence.params.priority,
        arrival_s=sequence.arrival,
        deadline_s=sequence.deadline,
        started=sequence.started_at is not None,
        beyond_share=sequence.beyond_share,
        waiting_since_s=sequence.waiting_since,
        ttft_slo_s=sequence.params.ttft_slo_s,
        tpot_slo_s=sequence.params.tpot_slo_s,
    )
