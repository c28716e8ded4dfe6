"""Command-line options from dataclasses: a field's type, default and docstring describe its option."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer

T = TypeVar("T")
# How a docstring says what happens without a value, where the field's default is None.
_WITHOUT = re.compile(r"\b(?:Default|None): ([^.]+(?:\.\w[^.]*)*)\.(?=\s|$)\s*")
_NAME = re.compile(r"`(\w+)`")


@dataclass(frozen=True)
class Flags:
    """Options for the fields of a dataclass, under a heading of their own in the help."""

    heading: str
    """Title of the options in the help."""
    settings: type
    """Dataclass whose fields have docstrings, and one of the types bool, int, float, str and Path, or None."""
    only: tuple[str, ...] = ()
    """Names of the fields that get an option. Default: all, but those in `without`."""
    without: tuple[str, ...] = ()
    """Names of fields that get none."""
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options by field name, such as `{"model": ("--model", "-m")}`. Default: `--` and the name with hyphens."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values by field name that this command has instead of the dataclass's defaults."""

    def parameters(self) -> list[inspect.Parameter]:
        """A parameter for each option. Its default is None, which stands for an option that is not given."""
        docs = field_docs(self.settings)
        parameters = []
        for it in fields(self.settings):
            if it.name in self.without or (self.only and it.name not in self.only):
                continue
            if it.name not in docs:
                raise TypeError(f"{self.settings.__name__}.{it.name} needs a docstring: it is the help of its option")
            default = self.defaults.get(it.name, it.default)
            help_text, shown = self._help(it.name, docs, None if default is MISSING else default)
            option = typer.Option(
                *self.spelling(it.name), help=help_text, show_default=shown, rich_help_panel=self.heading
            )
            annotation = Annotated[_option_type(self.settings, it.name, it.type) | None, option]
            parameters.append(
                inspect.Parameter(it.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        return parameters

    def spelling(self, name: str) -> tuple[str, ...]:
        """The option strings of a field; none where typer's own rule gives the right ones."""
        return self.spellings.get(name, ())

    def _help(self, name: str, docs: Mapping[str, str], default: Any) -> tuple[str, str | bool]:
        """The help text of an option, and what it shows as its default."""
        text, without_value = docs[name], ""
        if match := _WITHOUT.search(text):
            without_value = match[1]
            text = text.replace(match[0], "", 1).strip()
        if isinstance(default, bool):
            shown = "yes" if default else "no"
        elif isinstance(default, float):
            shown = f"{default:g}"
        else:
            shown = without_value if default is None else str(default)

        def as_option(match: re.Match[str]) -> str:
            if match[1] not in docs or "_" not in match[1]:
                return match[1]
            return (*self.spelling(match[1]), f"--{match[1].replace('_', '-')}")[0]

        return _NAME.sub(as_option, text).replace("`", ""), _NAME.sub(as_option, shown) if shown else False


def with_flags(*groups: Flags) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a typer command the options of `groups` besides its own.

    The command's first parameter gets a dict with the values of the options that were given, by field name, and with
    the groups' own `defaults` for those that were not. Two groups must not have fields of the same name.
    """
    generated = [parameter for group in groups for parameter in group.parameters()]
    defaults = {name: value for group in groups for name, value in group.defaults.items()}

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def run(**arguments: Any) -> T:
            values = {parameter.name: arguments.pop(parameter.name) for parameter in generated}
            given = {name: value for name, value in values.items() if value is not None}
            return command(defaults | given, **arguments)

        own = [
            it.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for it in list(inspect.signature(command).parameters.values())[1:]
        ]
        parameters = [*own, *generated]
        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def fields_of(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass."""
    names = {it.name for it in fields(settings)}
    return {name: value for name, value in values.items() if name in names}


def field_docs(settings: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, each as one line, by field name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    name = None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = None
    return docs


def _option_type(settings: type, name: str, hint: Any) -> Any:
    """The type that an option's text is read as: text where a field takes text or a number."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    kinds.discard(NoneType)
    if str in kinds and kinds <= {str, int}:
        return str
    if len(kinds) != 1 or (not kinds <= {bool, int, float, str} and not all(_is_path(kind) for kind in kinds)):
        raise TypeError(f"{settings.__name__}.{name} of type {hint} can be no option: leave it out")
    return kinds.pop()


def _is_path(kind: Any) -> bool:
    return getattr(kind, "__name__", "") == "Path"
