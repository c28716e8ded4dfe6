"""Find sentences that readers have to read twice: `python tools/prose.py [--score] [PATH ...]`.

The rules look for syntax that plain technical English avoids, such as a clause in place of a noun. They apply to
docstrings, comments, help texts and Markdown. A hit marks a place to look at; ordinary English contains a few.

Without `--score`, list the hits by file, most hits first. With `--score`, print hits per 1,000 words for each package.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "amoeba_jax",
    "benchmarks",
    "docs",
    "examples",
    "kvcache",
    "pallas_kernels",
    "serving",
    "sharding",
    "tools",
    "README.md",
)

_VERBS = (
    r"be|become|begin|change|come|compute|do|end|fit|get|give|go|have|hold|keep|launch|leave|make|merge|move|read|run|"
    r"serve|split|start|stay|stop|switch|take|wait|write"
)
_IS = r"(?:is|are|was|were)"
_FINITE = rf"(?:{_IS}|has|have|had|does|do|did|can|may|must|comes?|needs?|runs?|waits?|goes|takes?|holds?)"
_DETERMINER = r"(?:a|an|the|its|their|no|some|all|each|every|others?)"
# After these verbs, "what" asks a question: "The table says what each flag does."
_QUESTION = (
    r"(?:say|tell|show|explain|describe|know|see|decide|ask|define|determine|report|learn|print)(?:s|ed|n|d|ing)?"
)
_PREPOSITION = r"(?:of|by|for|in|from|to|at|on|with|as|whose|which|what|that|where|who|whether it)"


@dataclass(frozen=True)
class Rule:
    """A kind of syntax to avoid.

    Attributes:
        name: short name for reports.
        advice: replacement to use.
        pattern: regular expression for running text.
    """

    name: str
    advice: str
    pattern: re.Pattern[str]


def _rule(name: str, advice: str, *alternatives: str) -> Rule:
    """Return a rule that matches any of the regular expressions. A space in an expression also matches a line break."""
    return Rule(name, advice, re.compile("|".join(alternatives).replace(" ", r"\s+")))


_ASKS = re.compile(rf"\b{_QUESTION}\s+(?:\w+\s+)?$", re.IGNORECASE)
FREE_RELATIVE = _rule(
    "clause for a noun",
    'name the thing: "the exchange programs", not "what moves pages"',
    rf"\b(?i:what|whatever|whoever|whichever) (?:\w+ )?{_FINITE}\b",
    r"\b(?i:what|whatever|whoever|whichever) (?:it|its|they|an?|the|each|one|that|he|you|programs?|steps?)\b",
    r"\b(?i:what|whatever|whoever|whichever) (?!happens\b)\w+(?:s|ed)\b",
    r"\bWhat (?!if\b|happens\b|about\b)\w+",
)
RULES = (
    FREE_RELATIVE,
    _rule(
        "pronoun as head",
        'repeat the noun: "extents of the old layout", not "those of the old layout"',
        r"\b(?i:those|these|that|ones?) (?:that|who|which|whose|whom)\b",
        r"\b(?i:those|these|that|ones) of\b",
        r"\bof (?:it|them)\b",
        r"\b(?:of|by|for) (?:these|those|that)(?=[.,;:)]|$| (?:is|are|has|have|and|or|in|at|with|by|to)\b)",
    ),
    _rule(
        "periphrasis",
        'use a plain verb: "compile the programs", not "have the programs compiled"',
        rf"(?:^|(?<=[.!?:]\s))Have {_DETERMINER} \w+",
        rf"\b(?:to|and|must|can|may|not) have {_DETERMINER} \w+ (?:{_VERBS})\b",
        rf"\b{_IS} (?:not )?to (?:{_VERBS})\b",
        r"\b(?i:take) note\b",
        r"\bin (?:the|its|their) place of\b",
    ),
    _rule(
        "archaic word",
        "use the everyday word: also, again, except, recently, until, any longer",
        r"\b(?i:besides|alike|but for|anew|of late|by then|to come|as far as|for want of|any more|whereof|thereof|"
        r"therein|held? up|let go of|nobody|likeliest|mended|falls? apart|held against|so be it)\b",
    ),
    _rule(
        '"where" for "if"',
        'write "if", and one condition for each sentence',
        rf"\b(?i:where|unless) (?:there|nothing|none|no one|it|they|that|one) {_FINITE}\b",
        rf"\b(?i:where|unless) {_DETERMINER} (?:[\w`-]+ )?[\w`-]+ (?:{_IS}|has|have|does|do)\b",
    ),
)
NO_NOUN = _rule(
    "attribute without a noun",
    'begin with a noun: "launcher: launches the steps", not "launcher: of its steps"',
    rf"^\s*[\w*`./]+(?:, [\w*`./]+)*: {_PREPOSITION}\b",
)


@dataclass(frozen=True)
class Passage:
    """A piece of prose.

    Attributes:
        line: number of its first line in the file.
        text: its lines.
    """

    line: int
    text: str


@dataclass(frozen=True)
class Hit:
    """A match of a rule."""

    line: int
    rule: Rule
    excerpt: str


@dataclass
class Report:
    """Hits and words of one file."""

    words: int = 0
    hits: list[Hit] = field(default_factory=list)


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a Python or Markdown file."""
    source = path.read_text(encoding="utf-8")
    yield from _markdown(source) if path.suffix == ".md" else _python(source)


def _python(source: str) -> Iterator[Passage]:
    yield from _comments(source)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Passage(node.lineno, text)
            case ast.keyword(arg="help", value=ast.Constant(value=str(text))):
                yield Passage(node.value.lineno, text)


def _comments(source: str) -> Iterator[Passage]:
    """Yield comments. Comments on successive lines are one passage, because a sentence may span lines."""
    lines: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row = token.start[0]
        if lines and row != last + 1:
            yield Passage(first, "\n".join(lines))
            lines = []
        if not lines:
            first = row
        last = row
        lines.append(token.string.lstrip("# "))
    if lines:
        yield Passage(first, "\n".join(lines))


def _markdown(source: str) -> Iterator[Passage]:
    """Yield paragraphs, and each row of a table alone. Headings and code blocks are not prose."""
    lines: list[str] = []
    in_code, first = False, 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        is_row = line.lstrip().startswith("|")
        is_prose = bool(line.strip()) and not (in_code or is_fence or is_row or line.startswith("#"))
        if lines and not is_prose:
            yield Passage(first, "\n".join(lines))
            lines = []
        if is_prose:
            first = first if lines else number
            lines.append(line)
        elif is_row and not in_code and not set(line) <= set("|-: "):
            yield Passage(number, line)


def find(passage: Passage) -> Iterator[Hit]:
    """Yield the hits of all rules in a passage."""
    for rule in RULES:
        for match in rule.pattern.finditer(passage.text):
            if rule is not FREE_RELATIVE or not _ASKS.search(passage.text, 0, match.start()):
                line = passage.line + passage.text.count("\n", 0, match.start())
                around = passage.text[max(0, match.start() - 40) : match.end() + 40]
                yield Hit(line, rule, " ".join(around.split()))
    for index, line in enumerate(passage.text.splitlines()):
        if NO_NOUN.pattern.search(line):
            yield Hit(passage.line + index, NO_NOUN, line.strip())


def check(path: Path) -> Report:
    """Return the number of words in a file and its hits."""
    report = Report()
    for passage in passages(path):
        report.words += len(passage.text.split())
        report.hits += find(passage)
    return report


def source_files(paths: Iterable[str] = SOURCES) -> Iterator[Path]:
    """Yield the Python and Markdown files below paths, without generated files."""
    for name in paths:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".md") and "_pb2" not in file.name:
                yield file


def package_of(path: Path) -> str:
    """Return the package of a file, such as `serving/bench` or `amoeba_jax`. Each document is its own package."""
    parts = path.resolve().relative_to(ROOT).parts
    return "/".join(parts if path.suffix == ".md" else parts[: min(2, len(parts) - 1)])


def by_package(paths: Iterable[str] = SOURCES) -> dict[str, Report]:
    """Return the hits and words of each package."""
    totals: dict[str, Report] = {}
    for path in source_files(paths):
        report, total = check(path), totals.setdefault(package_of(path), Report())
        total.words += report.words
        total.hits += report.hits
    return totals


def score(report: Report) -> float:
    """Return the hits per 1,000 words."""
    return 1000 * len(report.hits) / max(report.words, 1)


def _print_scores(paths: list[str]) -> None:
    totals = by_package(paths)
    for name, report in sorted(totals.items(), key=lambda item: -score(item[1])):
        print(f"{score(report):6.1f} per 1,000 words  {len(report.hits):5d} hits  {name}")
    everything = Report(sum(it.words for it in totals.values()), [hit for it in totals.values() for hit in it.hits])
    print(f"{score(everything):6.1f} per 1,000 words  {len(everything.hits):5d} hits  all {everything.words} words")


def _print_hits(paths: list[str]) -> None:
    kinds: Counter[Rule] = Counter()
    reports = [(path, check(path)) for path in source_files(paths)]
    for path, report in sorted(reports, key=lambda item: -len(item[1].hits)):
        for hit in sorted(report.hits, key=lambda hit: hit.line):
            kinds[hit.rule] += 1
            print(f"{path.relative_to(ROOT)}:{hit.line}: [{hit.rule.name}] {hit.excerpt}")
    for rule, count in kinds.most_common():
        print(f"{count:5d} {rule.name}: {rule.advice}")


def main() -> None:
    """Print hits or scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=list(SOURCES), help="files or folders, relative to the repository")
    parser.add_argument("--score", action="store_true", help="print hits per 1,000 words for each package")
    options = parser.parse_args()
    (_print_scores if options.score else _print_hits)(options.paths)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.stderr.close()
