"""Trial compilation of a grammar in a separate process: `python grammar_check.py < grammar`.

Deeply nested grammars overflow the native stack of the parser, which kills the process. Some grammars take seconds. The
server therefore first lets another process compile an unknown grammar, with limits on time, memory and stack. The stack
of that process is much smaller than the server's.

The grammar comes from standard input, in the form of llguidance. The answer on standard output is JSON: a list with the
error message, or with "" if there is no error.
"""

import json
import resource
import sys

import llguidance

CPU_LIMIT_S = 1
MEMORY_LIMIT = 1 << 30
STACK_LIMIT = 1 << 20


def limits() -> llguidance.LLParserLimits:
    """Return limits for the compilation of a grammar and for its masks.

    With these limits, a mask rarely takes more than a few ms.
    """
    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def main() -> None:
    grammar = sys.stdin.buffer.read().decode()
    for limit, value in (
        (resource.RLIMIT_CPU, CPU_LIMIT_S),
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_STACK, STACK_LIMIT),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    print(json.dumps([messages[0] if failed else ""]))


if __name__ == "__main__":
    main()
