"""Constraints that are invalid, unsupported, or built to take much time or memory."""

from typing import Any

Fields = dict[str, Any]

REFUSED: list[tuple[Fields, str]] = [
    ({"json_schema": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
    ({"json_schema": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}}, "oneOf constraints are not supported"),
    ({"json_schema": {"type": "string", "format": "unheard-of"}}, "Unknown format: unheard-of"),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "example.com/schema"),
    ({"json_schema": {"type": "whole"}}, "Invalid type: whole"),
    ({"json_schema": "false"}, "allows no text"),
    ({"json_schema": '{"items":' * 150 + "{}" + "}" * 150}, "recursion limit exceeded"),
    ({"json_schema": {"$ref": "#"}}, "allows no text"),
    (
        {
            "json_schema": {
                "$defs": {
                    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + k) % 300}"} for k in (1, 7)]} for i in range(300)
                },
                "$ref": "#/$defs/d0",
            }
        },
        "too complex",
    ),
    ({"json_schema": {"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(60)]}}, "cannot be used"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "maximum number of nested"),
    ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ({"grammar": "start: " + "(" * 2_000 + '"a"' + ")" * 2_000}, "too deeply nested"),
    (
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3_000)) + '\na3000: "x"'},
        "too complex",
    ),
]
"""Fields of constraints that are refused, each with a part of the reason."""


def _schemas() -> list[Any]:
    texts, numbers = {"type": "string"}, {"type": "number"}
    nested: Any = {"type": "integer"}
    for _ in range(150):
        nested = {"type": "array", "items": nested, "minItems": 1}
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
    return [
        {},
        texts,
        numbers,
        {"type": "array"},
        {"type": "object"},
        texts | {"minLength": 10**9},
        texts | {"minLength": 5, "maxLength": 2},
        texts | {"maxLength": 10**12},
        texts | {"pattern": "^(a|b)*$", "minLength": 50_000},
        texts | {"pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 3_000},
        texts | {"pattern": "^a{1,60000}b$"},
        texts | {"pattern": "["},
        texts | {"pattern": r"(a)\1"},
        texts | {"pattern": "^(?!a).*$"},
        texts | {"format": "uri", "minLength": 1_000},
        texts | {"format": "regex"},
        numbers | {"multipleOf": 0},
        numbers | {"multipleOf": 1e-300},
        numbers | {"minimum": 1, "maximum": 0},
        numbers | {"minimum": 1e308, "exclusiveMaximum": 1e308},
        {"type": "integer", "minimum": 0.1, "maximum": 0.9},
        {"type": "integer", "multipleOf": 123456789012345678901234567890},
        {"type": "integer", "minimum": "0"},
        {"type": "array", "minItems": 10**6},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(2_000))}},
        {"type": "array", "contains": {"const": 1}},
        {"type": "array", "prefixItems": [texts] * 2_000, "minItems": 2_000},
        {"type": "object", "required": [f"p{i}" for i in range(3_000)]},
        {"type": "object", "properties": {f"p{i}": texts for i in range(3_000)}},
        {"type": "object", "properties": {f"p{i}": {} for i in range(400)}, "minProperties": 399},
        {"type": "object", "minProperties": 10**9},
        {"type": "object", "propertyNames": {"pattern": "^a+$"}},
        {"type": "object", "patternProperties": {f"^{'a' * i}.*b$": numbers for i in range(200)}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "required": "a"},
        {"if": {"const": 1}, "then": {"const": 2}, "else": {"const": 3}},
        {"type": []},
        {"type": 7},
        {"enum": []},
        {"enum": [f"{i}-{'x' * 20}" for i in range(4_000)]},
        {"const": "x" * 120_000},
        {"anyOf": []},
        {"anyOf": [False, False]},
        {"anyOf": [{"const": str(i)} for i in range(3_000)]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"allOf": [{"const": 1}, {"const": 2}]},
        {"allOf": [texts | {"pattern": f"a.{{{i}}}b"} for i in range(20)]},
        {"allOf": [{"$ref": "#/$defs/a"}] * 200, "$defs": {"a": {"anyOf": [{"const": i} for i in range(200)]}}},
        {"not": {"type": "string"}},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/$defs/d0", "$defs": chain | {"d1000": {"$ref": "#/$defs/d0"}}},
        {"$ref": "#/$defs/d0", "$defs": chain | {"d1000": {"const": 1}}},
        {"$ref": "file:///etc/passwd"},
        {"$dynamicRef": "#node"},
        {"unheard-of": 1},
        nested,
    ]


def _regexes() -> list[str]:
    return [
        *(f"(.*a){{{count}}}" for count in (50, 1_000, 30_000)),
        *(f"(a|b)*a(a|b){{{count}}}" for count in (20, 400, 10_000)),
        "((a{0,100}){0,100}){0,100}",
        "(x+x+)+y",
        "((((a+)+)+)+)+b",
        r"\p{L}{1,20000}",
        r"[^\s\S]",
        "(?i)" + "k" * 30_000,
        "|".join(f"{i}x*" for i in range(10_000)),
        "a{4294967296}",
        "a{2,1}",
        "*",
        r"(a)\1",
        r"\bword\b",
        "^$",
        "(?P<n>a)(?P<n>b)",
        "[z-a]",
        "\\",
    ]


def _grammars() -> list[str]:
    doubling = "\n".join(f"a{i}: a{i + 1} | a{i + 1} a{i + 1} |" for i in range(30))
    return [
        'start: "' + "x" * 100_000 + '"',
        f'start: a0\n{doubling}\na30: "x"',
        'start: start start | "a" |',
        'start: "a" start "b" | start "a" | "ab"',
        "start: a\na: b\nb: a",
        "start: start",
        'start: A\nA: B\nB: A "x"',
        "start: /(.*[ab]){50}(x|y){3,60}z/",
        "start: /(?=a)b/",
        "start: X~100000\nX: /a|b/",
        "start: " + " | ".join(f"/[a-z]{{{i}}}[0-9]/" for i in range(1, 2_000)),
        "nothing",
        "",
        "start:",
        "%import common.NUMBER\nstart: NUMBER",
        '%ignore /.*/\nstart: "a"',
        "start: %json {",
        'start: %json {"not": {}}',
        "start: <|unknown_token|>",
        'start[capture="x"]: /(a*)*/',
    ]


DEGENERATE: list[Fields] = [
    *(fields for fields, _ in REFUSED),
    *({"json_schema": schema} for schema in _schemas()),
    *({"regex": regex} for regex in _regexes()),
    *({"grammar": grammar} for grammar in _grammars()),
    {"choice": [f"{'x' * 100}{i}" for i in range(1024)]},
]
"""Fields of constraints. Most are refused. The others are slow or endless."""
