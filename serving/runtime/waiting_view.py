"""Waiting sequences of the engine, in the form that the scheduler uses."""

from collections.abc import Iterable

from amoeba_jax.engine.engine import Engine
from amoeba_jax.instances.sequence import Sequence
from serving.scheduler import WaitingRequest


class WaitingView:
    """Waiting sequences by name (`by_name`), updated for each snapshot. Only the engine's thread uses it.

    A sequence is hidden from the scheduler while it cannot start. This is the case while its last token is still being
    computed, or while a program is being compiled for it.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._shown: dict[str, Sequence] = {}
        self._requests: dict[str, WaitingRequest] = {}
        self.hidden_tokens: tuple[int, ...] = ()
        """Maximum length of each hidden sequence, in tokens."""

    def snapshot(self) -> tuple[WaitingRequest, ...]:
        """Return the sequences that can start now. Also set `hidden_tokens` for the sequences that cannot start now."""
        awaits, hidden = self._awaited_programs(), []
        self._shown = {}
        for name, sequence in by_name(self._engine.waiting).items():
            if sequence.num_in_flight or awaits(sequence):
                hidden.append(sequence.max_total_tokens)
            else:
                self._shown[name] = sequence
        self.hidden_tokens = tuple(hidden)
        self._requests = {name: self._request(name, sequence) for name, sequence in self._shown.items()}
        return tuple(self._requests.values())

    def get(self, name: str) -> Sequence | None:
        """Return the waiting sequence that has this name in the last snapshot.

        Return None if the last snapshot has no sequence of this name, or if the sequence no longer waits.
        """
        sequence = self._shown.get(name)
        return sequence if sequence in self._engine.waiting else None

    @property
    def siblings(self) -> list[Sequence]:
        """Waiting samples that can share the prompt's KV pages with the first sample of their request."""
        return [sequence for sequence in self._engine.waiting if sequence.leader is not None]

    def _awaited_programs(self):
        """Return a function that tells whether a sequence must wait for the compilation of a program.

        The function calls `Admission.awaits_program` only once for all sequences that need the same programs.
        """
        known: dict[tuple[bool, bool, bool], bool] = {}

        def awaits(sequence: Sequence) -> bool:
            shares = bool(sequence.siblings) or (sequence.leader is not None and sequence.leader.slot >= 0)
            key = sequence.sampling.uses_state, shares, sequence.host_pages is not None
            if not any(key):
                return False
            if key not in known:
                known[key] = self._engine.admission.awaits_program(sequence)
            return known[key]

        return awaits

    def _request(self, name: str, sequence: Sequence) -> WaitingRequest:
        """Return the `WaitingRequest` of a sequence: the object of the last snapshot if nothing has changed."""
        known = self._requests.get(name)
        if (
            known is not None
            and known.prompt_tokens == sequence.num_known
            and known.arrival_s == sequence.arrival
            and known.beyond_share == sequence.beyond_share
            and known.waiting_since_s == sequence.waiting_since
            and known.offloaded == (sequence.host_pages is not None)
        ):
            return known
        return waiting_request(name, sequence)


def by_name(sequences: Iterable[Sequence]) -> dict[str, Sequence]:
    """Give each sequence a unique name. Return the sequences by name.

    The name of a request's first sample is the request id, such as `a`. Further samples are `a[1]`, `a[2]` and so on.
    If a name is taken, an apostrophe is added.
    """
    named: dict[str, Sequence] = {}
    for sequence in sequences:
        name = f"{sequence.request_id}[{sequence.index}]" if sequence.index else sequence.request_id
        while name in named:  # the id of another client's request may look like a numbered id
            name += "'"
        named[name] = sequence
    return named


def waiting_request(name: str, sequence: Sequence) -> WaitingRequest:
    """Convert a waiting sequence to the object that the scheduler uses."""
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
        offloaded=sequence.host_pages is not None,
    )
