"""Background compilation that a test holds back."""

import threading

from harness import engine_of
from serving_checks import TIMEOUT_S

from amoeba_jax import LLM
from amoeba_jax.programs.program_specs import ProgramSpec


class CompileGate:
    """Gate that holds background compilation until it is opened."""

    def __init__(self, llm: LLM):
        self.open = threading.Event()
        self.held: list[str] = []
        self._background = background = engine_of(llm).cluster.executables.background
        compile = background._compile

        def waiting(wanted: list[ProgramSpec]):
            self.held += [str(request) for request in wanted if not self.open.is_set()]
            assert self.open.wait(TIMEOUT_S)
            yield from compile(wanted)

        background._compile = waiting

    def asked(self) -> list[str]:
        """Return the programs that are not compiled yet."""
        background = self._background
        return [*self.held, *map(str, background._urgent.values()), *map(str, background._later.values())]
