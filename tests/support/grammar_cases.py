"""Grammars and JSON schemas, good and broken, that several test files share."""

from __future__ import annotations

from typing import Any, NamedTuple


def _object(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **more}


WORD: dict[str, Any] = {"type": "string", "maxLength": 12}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = _object({"name": WORD, "age": COUNT})
TREE = {
    "$defs": {"node": _object({"name": WORD, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})},
    "$ref": "#/$defs/node",
}
LINKED = {
    "$defs": {
        "link": _object({"item": COUNT, "next": {"oneOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}, "next")
    },
    "$ref": "#/$defs/link",
}
SHAPES = {
    "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        "circle": _object({"kind": {"const": "circle", "type": "string"}, "radius": COUNT}),
        "square": _object({"kind": {"const": "square", "type": "string"}, "side": COUNT}),
    },
}

SCHEMAS: dict[str, Any] = {
    # single values
    "a boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "an integer in a range": {"type": "integer", "minimum": 10, "maximum": 20},
    "a negative integer": {"type": "integer", "minimum": -50, "exclusiveMaximum": 0},
    "a number in a range": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "a multiple": {"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 95},
    "draft 4's exclusive bound": {"type": "integer", "minimum": 0, "maximum": 9, "exclusiveMinimum": True},
    "a short string": {"type": "string", "maxLength": 10},
    "a string of one length": {"type": "string", "minLength": 5, "maxLength": 5},
    "an enum": {"enum": ["red", "green", "blue"]},
    "an enum of many kinds": {"enum": [1, "one", None, True, {"one": [1.5]}]},
    "a constant": {"const": {"version": 2, "tags": ["a", "b"]}},
    "a constant with quotes": {"const": 'say "hi" \\ / \n\t ü 😀'},
    # strings with a form
    "a pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "a pattern in the middle": {"type": "string", "pattern": "b", "maxLength": 8},
    "a telephone number": {"type": "string", "pattern": r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$"},
    "a date": {"type": "string", "format": "date"},
    "a time": {"type": "string", "format": "time", "maxLength": 12},
    "a moment": {"type": "string", "format": "date-time", "pattern": "^[^.]*$"},
    "a duration": {"type": "string", "format": "duration", "maxLength": 10},
    "an e-mail address": {"type": "string", "format": "email", "maxLength": 24},
    "an address of the internet": {"type": "string", "format": "ipv4"},
    "a UUID": {"type": "string", "format": "uuid"},
    # objects
    "a person": PERSON,
    "a person without an end of the name": _object({"name": {"type": "string"}, "age": {"type": "integer"}}),
    "nested objects": _object({"user": _object({"name": WORD, "home": _object({"city": WORD, "number": COUNT})})}),
    "optional properties": _object({"id": COUNT, "note": WORD, "done": {"type": "boolean"}}, "note"),
    "no more properties": _object({"a": COUNT, "b": COUNT}, additionalProperties=False),
    "a map": {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    "a map with patterns": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,6}$": COUNT},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "keys of all the world": _object({"名前": WORD, "größe": COUNT, "ключ": {"type": "boolean"}}),
    "keys with quotes": _object({'a "b"': COUNT, "c\\d": COUNT, "e/f": COUNT}),
    "a nullable property": _object({"name": {"type": ["string", "null"], "maxLength": 10}, "age": COUNT}),
    "a property that may be anything small": _object(
        {"value": {"type": ["integer", "boolean", "null"], "maximum": 9, "minimum": 0}}
    ),
    # lists
    "a list of words": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 4},
    "a list of people": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    "a list of exactly three": {"type": "array", "items": COUNT, "minItems": 3, "maxItems": 3},
    "a matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2},
    },
    "a tuple": {"type": "array", "prefixItems": [WORD, COUNT, {"type": "boolean"}], "items": False, "minItems": 3},
    "a tuple that may be short": {"type": "array", "prefixItems": [COUNT, COUNT]},
    "an empty list": {"type": "array", "maxItems": 0},
    # schemas of schemas
    "any of two": {"anyOf": [WORD, COUNT]},
    "one of two types": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    "one of several shapes": SHAPES,
    "all of two": {
        "allOf": [_object({"a": COUNT}), _object({"b": COUNT}, additionalProperties=COUNT, maxProperties=3)]
    },
    "a base with cases": {
        **_object({"kind": {"enum": ["cat", "dog"]}}),
        "oneOf": [
            {
                "properties": {"kind": {"const": "cat"}, "lives": COUNT},
                "required": ["lives"],
                "additionalProperties": False,
            },
            {
                "properties": {"kind": {"const": "dog"}, "tricks": COUNT},
                "required": ["tricks"],
                "additionalProperties": False,
            },
        ],
    },
    "a tree": TREE,
    "a linked list": LINKED,
    "definitions by another name": {
        "definitions": {"point": _object({"x": COUNT, "y": COUNT})},
        "type": "array",
        "items": {"$ref": "#/definitions/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    # from practice
    "a function call": _object(
        {
            "name": {"const": "get_weather"},
            "arguments": _object({"city": WORD, "unit": {"enum": ["celsius", "fahrenheit"]}}, "unit"),
        }
    ),
    "a review": _object(
        {
            "sentiment": {
                "type": "string",
                "enum": ["positive", "neutral", "negative"],
                "description": "how it sounds",
            },
            "stars": {"type": "integer", "minimum": 1, "maximum": 5, "title": "Stars", "default": 3},
            "topics": {
                "type": "array",
                "items": {"enum": ["price", "taste", "service"]},
                "uniqueItems": False,
                "maxItems": 3,
            },
        }
    ),
    "an invoice": _object(
        {
            "number": {"type": "string", "pattern": "^R-[0-9]{5}$"},
            "issued": {"type": "string", "format": "date"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": _object(
                    {
                        "text": WORD,
                        "amount": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.25},
                    }
                ),
            },
            "paid": {"type": "boolean"},
        },
        **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/invoice"},
    ),
}
"""Name -> schema. SmolLM2's answers end by themselves and meet them."""

GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    # These are written after llama.cpp's examples of the same names.
    "json": (
        r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
""",
        ["{}", '{"a":1}', '{ "a": [1, -2.5e-3, "x\\u00e9\\n"], "b": {"c": null}}', '{"ü":true}\n  ', '{"a":"b"} '],
        ["", "[]", "{", '{"a"}', '{"a":01}', '{"a":1,}', '{"a":"\n"}', '{"a":tru}', "{}  ", '{"a":"\\x"}', "{}{}"],
    ),
    "arithmetic": (
        r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
""",
        ["1=1\n", "a+b=c\n", "a +( b *12 ) = x9\n", "1=1\n2=2\n", "x=(1)\n", "a\n=\nb\n\n", "1-1=0 \n"],
        ["1=1", "=1\n", "1+=1\n", "(1=1\n", "A=1\n", "1==1\n", "1=1\n\n2", "1 2=3\n"],
    ),
    "list": (
        '# items\nroot ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"\n',
        ["- a\n", "- größer 😀\n- b\n", "-  \n"],
        ["", "- a", "- \n", "a\n", "- a\n- b", "- a\u2028\n"],
    ),
    "chess": (
        r"""root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
""",
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. exd5 O-O-O+\n10. a8=Q# Raxb1\n"],
        ["1. e4 e5\n", "2. e4 e5\n2. e4 e5\n", "1. e9 e5\n2. e4 e5\n", "1. e4 e5\n02. e4 e5\n"],
    ),
    "a small language": (
        r"""root ::= (declaration)*
declaration ::= type name "(" (type name)? ")" "{" statement* "}"
type ::= "int" ws | "char" ws
name ::= [a-z] [a-z0-9]*
statement ::= ( type name ws "=" ws value ";" ) |
    ( name ws "=" ws value ";" ) |
    ( "return" ws value ";" ) | ( "/*" ( [^*] | ("*" [^/]) )* "*/" )
value ::= term (("+" | "-") term)*
term ::= name | [0-9]+ | "-" term | name "(" value? ")" | "(" value ")"
ws ::= ([ \t\n]+)
""",
        [
            "",
            "int f(){}",
            "int f(char c){return c+1;}",
            "int int(){char x = f(1);}",
            "int f(){/* a*b */}",
            "int f(){int x = 1;int = 2;returns = --1;}",
            "int f(){x = (f(y)-3);}",
            "int intx(){}",
        ],
        ["int f()", "intf(){}", "int f(){return;}", "int f(){x = ;}", "int f(){/* }", "int 1f(){}", "int f(){x=1;}"],
    ),
    "what a greedy lexer gets wrong": (
        'root ::= list "."\nlist ::= "(" list ")" | pair\npair ::= "a" "bd" | "ab" "c" | "a"+ "ab" | "x"* "xy"\n',
        ["abd.", "abc.", "aab.", "aaab.", "xy.", "xxxy.", "((abd))."],
        ["ab.", "abdc.", "a.", "x.", "(abd.", "abd"],
    ),
    "one that can be empty": ('root ::= ("a" | "(" root ")")?\n', ["", "a", "()", "((a))"], ["(", "aa", "(a"]),
    "names with lines and capitals": (
        'root ::= First-part\n  | second_part # or\n\nFirst-part ::= "1" (\n "2" # two\n "3"\n)\n'
        'second_part ::= "\\x34" "\\u0035" "\\U00000036"\n',
        ["123", "456"],
        ["12", "1", "4"],
    ),
    "counted": (
        'root ::= "a"{2} "b"{1,2} "c"{2,} ("d" root "e"){0,1} "f"{0}\n',
        ["aabcc", "aabbccc", "aabccdaabccee"[:-1]],
        ["abcc", "aabbbcc", "aabc", "aabccf", "aabccd"],
    ),
}
"""Name -> GBNF, texts that follow it, texts that do not."""


class Broken(NamedTuple):
    """A text, and what its error has to say."""

    text: str
    place: str
    why: str


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


BROKEN_GRAMMARS: dict[str, Broken] = {
    "empty": Broken("", "line 1, column 1", "empty"),
    "only blanks": Broken(" \n\t\n", "line 1, column 1", "empty"),
    "only a comment": Broken("# nothing\n", "line 1, column 10", "no rule is named 'root'"),
    "prose": Broken("Please answer in JSON.", "line 1, column 8", "there should be '::='"),
    "no root": Broken('start ::= "a"\n', "line 1, column 1", "no rule is named 'root'"),
    "unknown rule": Broken(
        'root ::= "a" item\nitems ::= "b"\n', "line 1, column 14", "'item' is used but never defined"
    ),
    "unknown rule deep inside": Broken('root ::= (\n  ("a" | (b)*)\n)\n', "line 2, column 11", "'b' is used"),
    "left recursion": Broken('root ::= root "a" | "b"', "line 1, column 10", "'root' begins with itself"),
    "indirect left recursion": Broken(
        'root ::= a\na ::= b "x"\nb ::= c | "y"\nc ::= a "z"\n', "line 4, column 7", "a > b > c > a"
    ),
    "left recursion behind something empty": Broken(
        'root ::= ws root "a" | "b"\nws ::= " "*\n', "line 1, column 13", "'root' begins with itself"
    ),
    "left recursion behind an empty rule": Broken(
        'root ::= e? f root | "b"\ne ::= "x"\nf ::= | "y"\n', "line 1, column 15", "'root' begins with itself"
    ),
    "left recursion in a repetition": Broken('root ::= ("a"* root)+ | "b"', "line 1, column 16", "begins with itself"),
    "never ends": Broken('root ::= "a" root', "line 1, column 1", "'root' can never end"),
    "never ends, in two rules": Broken(
        'root ::= "a" | b\nb ::= "x" c\nc ::= "y" b\n', "line 2, column 1", "can never end"
    ),
    "60,000 parentheses": Broken("root ::= " + "(" * 60_000, "line 1, column 110", "nested more than 100 deep"),
    "60,000 closed parentheses": Broken(
        "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "line 1, column 110", "nested more than 100 deep"
    ),
    "60,000 stars": Broken('root ::= "a"' + "*" * 60_000, "line 1, column 21", "too many repetitions"),
    "12,000 rules, one after the other": Broken(
        "".join(f"r{n} ::= r{n + 1}\n" for n in range(12_000)), "line 12000, column 12", "'r12000' is used"
    ),
    "too large": Broken('root ::= "' + "a" * 300_000 + '"', "too large", "more than 262,144"),
    "huge repetition": Broken('root ::= "a"{1000000000}', "line 1, column 13", "more than 10,000 times"),
    "huge upper bound": Broken('root ::= "a"{1,99999999}', "line 1, column 13", "more than 10,000 times"),
    "backward repetition": Broken('root ::= "a"{5,2}', "line 1, column 13", "from 5 to 2"),
    "repetition without number": Broken('root ::= "a"{}', "line 1, column 13", "is written {2}"),
    "unclosed repetition": Broken('root ::= "a"{2,', "line 1, column 13", "is written {2}"),
    "nothing to repeat": Broken('root ::= | *"a"', "line 1, column 12", "nothing that '*' could repeat"),
    "unclosed quote": Broken('root ::= "a\nb ::= "c"\n', "line 1, column 10", 'this " is never closed'),
    "unclosed quote at the end": Broken('root ::= "a', "line 1, column 10", 'this " is never closed'),
    "unclosed bracket": Broken("root ::= [a-z\n", "line 1, column 10", "this [ is never closed"),
    "unclosed parenthesis": Broken('root ::= ("a"\n  "b"\nb ::= "c"\n', "line 1, column 10", "this ( is never closed"),
    "parenthesis too many": Broken('root ::= "a")\n', "line 1, column 13", "this ) was never opened"),
    "empty bracket": Broken("root ::= []", "line 1, column 10", "allows no character"),
    "backward range": Broken("root ::= [a-cz-x]", "line 1, column 14", "z-x goes backwards"),
    "unknown escape": Broken('root ::= "a\\q"', "line 1, column 12", "no escape \\q"),
    "short escape": Broken('root ::= "\\x4"', "line 1, column 11", "needs 2 hexadecimal digits"),
    "half a character": Broken('root ::= "\\uD800"', "line 1, column 11", "not a character of Unicode"),
    "character out of range": Broken('root ::= "\\U00110000"', "line 1, column 11", "not a character of Unicode"),
    "wrong sign": Broken('root = "a"', "line 1, column 6", "there should be '::=', not '='"),
    "no name": Broken('root ::= "a"\n::= "b"\n', "line 2, column 1", "begins with its name"),
    "two rules on a line": Broken('root ::= "a" b ::= "c"', "line 1, column 14", "on a line of its own"),
    "rule twice": Broken('root ::= "a"\nb ::= "c"\nroot ::= b\n', "line 3, column 1", "defined twice, first at line 1"),
    "a token": Broken("root ::= <think> .*", "line 1, column 10", "token in angle brackets"),
    "semicolon": Broken('root ::= "a";', "line 1, column 13", "';' is not expected"),
    "Lark: unclosed quote": Broken('start: "a', "line 1, column 8", "never closed"),
    "Lark: unclosed parenthesis": Broken('start: ("a"\n', "line 1, column 8", "never closed"),
    "Lark: wrong bracket": Broken('start: ("a"]\n', "line 1, column 12", "can't close"),
    "Lark: bracket too many": Broken('start: "a")\n', "line 1, column 11", "never opened"),
    "Lark: 60,000 parentheses": Broken("start: " + "(" * 60_000, "line 1, column 108", "nested more than 100 deep"),
    "Lark: a token": Broken('start: "a" <[1]>\n', "line 1, column 12", "token in angle brackets"),
}

BROKEN_SCHEMAS: dict[str, Broken] = {
    "empty": Broken("", "line 1, column 1", "empty"),
    "no JSON": Broken("type: object", "line 1, column 1", "'type' is not a JSON value"),
    "unclosed object": Broken('{"type": "object"', "line 1, column 1", "this { is never closed"),
    "unclosed list": Broken('{"enum": [1, 2}', "line 1, column 15", "should be here"),
    "unclosed string": Broken('{"type": "object}', "line 1, column 10", 'this " is never closed'),
    "comma before the end": Broken('{\n  "type": "object",\n}', "line 3, column 1", "comma before '}'"),
    "no comma": Broken('{"a": 1 "b": 2}', "line 1, column 9", "should be here"),
    "no colon": Broken('{"type" "object"}', "line 1, column 9", "there should be ':'"),
    "single quotes": Broken("{'type': 'object'}", "line 1, column 2", "double quotes"),
    "Python's True": Broken('{"default": True}', "line 1, column 13", "'True' is not a JSON value"),
    "NaN": Broken('{"const": NaN}', "line 1, column 11", "'NaN' is not a JSON value"),
    "endless number": Broken('{"const": 1e999}', "line 1, column 11", "too large"),
    "bad escape": Broken('{"const": "\\x"}', "line 1, column 12", "no escape \\x"),
    "key twice": Broken('{"type": "string",\n "type": "null"}', "line 2, column 2", "appears twice"),
    "two values": Broken('{"type": "string"} {}', "line 1, column 20", "after the end"),
    "60,000 brackets": Broken('{"const":' + "[" * 60_000, "line 1, column 109", "nested more than 100 deep"),
    "nested too deep": Broken(_nested(200), "column 901", "nested more than 100 deep"),
    "no schema": Broken('"string"', "line 1, column 1", "not a string"),
    "false": Broken("false", "line 1, column 1", "allows nothing"),
    "unknown type": Broken('{"type": "sting"}', "line 1, column 10", "no type 'sting'"),
    "unknown type in a list": Broken('{"type": ["string", "nil"]}', "line 1, column 21", "no type 'nil'"),
    "no types": Broken('{"type": []}', "line 1, column 10", "allows nothing"),
    "schema that is none": Broken('{"items": 3}', "line 1, column 11", "not a number"),
    "properties that are none": Broken('{"properties": ["a"]}', "line 1, column 16", "an object of schemas"),
    "property that is none": Broken('{"properties": {"a": "string"}}', "line 1, column 22", "not a string"),
    "required that is none": Broken('{"required": "a"}', "line 1, column 14", "list of names"),
    "required and forbidden": Broken(
        '{"properties": {"a": false}, "required": ["a"]}', "line 1, column 43", "its schema is false"
    ),
    "required and not allowed": Broken(
        '{"properties": {"name": {}}, "required": ["nme"], "additionalProperties": false}',
        "line 1, column 43",
        "not among the properties",
    ),
    "empty enum": Broken('{"enum": []}', "line 1, column 10", "allows nothing"),
    "enum of another type": Broken('{"type": "string", "enum": [1, 2]}', "line 1, column 28", "no value of enum"),
    "const of another type": Broken('{"type": "integer", "const": "x"}', "line 1, column 30", "const is a string"),
    "empty anyOf": Broken('{"anyOf": []}', "line 1, column 11", "allows nothing"),
    "anyOf that is none": Broken('{"anyOf": {}}', "line 1, column 11", "list of schemas"),
    "maximum below minimum": Broken(
        '{"type": "integer", "minimum": 5, "maximum": 3}', "line 1, column 32", "no number"
    ),
    "exclusive bounds that meet": Broken(
        '{"type": "number", "exclusiveMinimum": 1, "maximum": 1}', "line 1, column 40", "no number"
    ),
    "more at least than at most": Broken('{"minItems": 3, "maxItems": 2}', "line 1, column 14", "nothing fits"),
    "a thousand million items": Broken('{"minItems": 1000000000}', "line 1, column 14", "more than a model will write"),
    "a thousand million characters": Broken('{"maxLength": 1000000000}', "line 1, column 15", "for no limit"),
    "half an item": Broken('{"minItems": 1.5}', "line 1, column 14", "whole number"),
    "fewer than no characters": Broken('{"minLength": -1}', "line 1, column 15", "whole number"),
    "bound that is no number": Broken('{"minimum": "5"}', "line 1, column 13", "not a string"),
    "bound beyond all": Broken('{"type": "number", "maximum": 1e300}', "line 1, column 31", "beyond"),
    "multiple of nothing": Broken('{"multipleOf": 0}', "line 1, column 16", "over 0"),
    "multiple of too much": Broken('{"multipleOf": 1000003}', "line 1, column 16", "over 0"),
    "integer that loses digits": Broken('{"const": 12345678901234567890123}', "line 1, column 11", "too large"),
    "pattern that is none": Broken('{"pattern": 3}', "line 1, column 13", "not a number"),
    "reference to nothing": Broken(
        '{"$ref": "#/$defs/itm", "$defs": {"item": {}}}', "line 1, column 10", "points to nothing"
    ),
    "reference to a string": Broken('{"$ref": "#/title", "title": "x"}', "line 1, column 10", "points to a string"),
    "reference to the world": Broken(
        '{"$ref": "https://example.com/a.json"}', "line 1, column 10", "nothing is fetched"
    ),
    "reference to itself": Broken('{"$ref": "#"}', "line 1, column 10", "only defined by itself"),
    "references in a circle": Broken(
        '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]},\n'
        ' "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}',
        "line 2, column 27",
        "only defined by itself",
    ),
    "value without end": Broken(
        '{"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}',
        "line 1, column 1",
        "never ends",
    ),
    "list without end": Broken(
        '{"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}',
        "line 1, column 17",
        "never ends",
    ),
    "look-behind in a pattern": Broken(
        '{"type": "string", "pattern": "(?<=a)b"}', "line 1, column 31", "can't be enforced"
    ),
    "broken pattern": Broken('{"type": "string",\n "pattern": "["}', "line 2, column 13", "never closed"),
    "10,000 parentheses in a pattern": Broken(
        f'{{"type": "string", "pattern": "{"(" * 10_000}"}}', "line 1, column 31 (pattern)", "nested more than 100 deep"
    ),
    "not": Broken('{\n  "not": {"type": "integer"}\n}', "line 2, column 3 (not)", "can't be enforced"),
    "if": Broken('{"if": {"multipleOf": 3}, "then": {}}', "line 1, column 2 (if)", "can't be enforced"),
    "contains": Broken(
        '{"contains": {"const": 1}, "maxItems": 3}', "line 1, column 14 (contains)", "can't be enforced"
    ),
    "at most so many of them": Broken(
        '{"contains": {"const": 1}, "maxContains": 3}', "line 1, column 28 (maxContains)", "can't be enforced"
    ),
    "all of what excludes itself": Broken(
        '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "line 1, column 1", "no value can meet"
    ),
    "two properties at least": Broken('{"minProperties": 2}', "line 1, column 19", "can't be counted"),
}

BROKEN_FOR_LLGUIDANCE: dict[str, tuple[str, Broken]] = {
    "unknown rule": ("lark", Broken('start: "a"\n  | foo\n', "line 2, column 5", "unknown name")),
    "no start": ("lark", Broken('foo: "a"\n', "", "no start rule")),
    "look-ahead": ("lark", Broken("start: /(?=a)/\n", "line 1, column 9", "look-around")),
    "bad regular expression": ("lark", Broken('start: A\nA: "a"\n | /[/\n', "line 3, column 5", "unclosed")),
    "double names": ("lark", Broken('start: "a"\nstart: "b"\n', "line 2", "")),
    "terminals that grow": (
        "lark",
        Broken(
            "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(60)) + 'T60: "a"\n', "line", "too big"
        ),
    ),
}
"""Name -> kind of grammar, and what only the engine can find."""
