"""Command-line options from dataclasses. The name, type, default and docstring of a field define its option."""

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
# Text of a docstring that explains the default None.
_WITHOUT = re.compile(r"\b(?:Default|None): ([^.]+(?:\.\w[^.]*)*)\.(?=\s|$)\s*")
_NAME = re.compile(r"`(\w+)`")


@dataclass(frozen=True)
class Flags:
    """Group of options for the fields of a dataclass.

    Attributes:
        heading: title of the group in the help.
        settings: dataclass. A field that becomes an option needs a docstring. The type of the field is `str | int`, or
            one of bool, int, float, str and Path, possibly with `| None`.
        only: names of the fields that become options. Empty: all fields except the fields in `without`.
        without: names of the fields that do not become options.
        spellings: option strings by field name, such as `{"model": ("--model", "-m")}`. If a field has no entry, its
            option is named like the field, with hyphens.
        defaults: default values by field name, which replace the defaults of the dataclass.
    """

    heading: str
    settings: type
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> list[inspect.Parameter]:
        """Return a keyword-only parameter for each option.

        The value of a parameter is None if the user does not give its option.
        """
        docs = field_docs(self.settings)
        parameters = []
        for it in fields(self.settings):
            if it.name in self.without or (self.only and it.name not in self.only):
                continue
            if it.name not in docs:
                raise TypeError(f"{self.settings.__name__}.{it.name} needs a docstring: the help of its option")
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
        """Return the option strings that `spellings` has for a field, or an empty tuple."""
        return self.spellings.get(name, ())

    def _help(self, name: str, docs: Mapping[str, str], default: Any) -> tuple[str, str | bool]:
        """Return the help text of an option, and the default value to display in it.

        If no default is displayed, the second result is False.
        """
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
    """Return a decorator that adds the options of `groups` to a typer command.

    The first parameter of the command receives a dict with the values of the options by field name. If the user did not
    give an option, the dict has the value in `Flags.defaults`. If `Flags.defaults` has no value for a field, the dict
    lacks the field. Two groups must not have fields of the same name.
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
    """Return the entries of `values` whose names are fields of the dataclass `settings`."""
    names = {it.name for it in fields(settings)}
    return {name: value for name, value in values.items() if name in names}


def field_docs(settings: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass by field name, each as one line."""
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
    """Return the type of the option for a field. A field of the type `str | int` becomes a str.

    Raises `TypeError` if a field of this type cannot be an option.
    """
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    kinds.discard(NoneType)
    if str in kinds and kinds <= {str, int}:
        return str
    if len(kinds) != 1 or (not kinds <= {bool, int, float, str} and not all(_is_path(kind) for kind in kinds)):
        raise TypeError(f"{settings.__name__}.{name} of type {hint} cannot be an option: add it to `without`")
    return kinds.pop()


def _is_path(kind: Any) -> bool:
    return getattr(kind, "__name__", "") == "Path"
