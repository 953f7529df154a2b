"""A filter: what does not conform to a JSON Schema goes to the dead letters, with the
path of what is wrong.

Settings:
- `schema`: the JSON Schema. Understood of it: type, enum, const, required, properties,
  additionalProperties, items, minItems, maxItems, minLength, maxLength, minimum, maximum,
  exclusiveMinimum, exclusiveMaximum, pattern, anyOf, allOf, not. Anything else in it is an
  error, so that no rule is silently ignored.
"""

import json
import re

import wit_world
from componentize_py_types import Err
from wit_world.exports.message_filter import Context, Message, Verdict, Verdict_DeadLetter, Verdict_Deliver

KNOWN = {
    "type", "enum", "const", "required", "properties", "additionalProperties", "items", "minItems", "maxItems",
    "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "anyOf",
    "allOf", "not", "$schema", "$id", "title", "description", "default", "examples",
}
TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "integer": lambda v: not isinstance(v, bool) and (isinstance(v, int) or isinstance(v, float) and v.is_integer()),
}

schema = True


def check_schema(node, path="$"):
    """Refuses what is not understood, by its path."""
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        raise Err(f"schema: {path} must be an object, true or false")
    for key, value in node.items():
        if key not in KNOWN:
            raise Err(f"schema: {path}.{key} is not understood")
        here = f"{path}.{key}"
        if key == "properties":
            for name, child in value.items():
                check_schema(child, f"{here}.{name}")
        elif key in ("items", "additionalProperties", "not"):
            check_schema(value, here)
        elif key in ("anyOf", "allOf"):
            for index, child in enumerate(value):
                check_schema(child, f"{here}[{index}]")
        elif key == "type":
            for name in value if isinstance(value, list) else [value]:
                if name not in TYPES:
                    raise Err(f"schema: {here} {name!r} is no type")
        elif key == "pattern":
            try:
                re.compile(value)
            except re.error as error:
                raise Err(f"schema: {here}: {error}")


def fault(value, node, path):
    """The first thing that is wrong, as a text that starts with its path; None if nothing is."""
    if node is True:
        return None
    if node is False:
        return f"{path}: nothing is allowed here"
    kinds = node.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(TYPES[kind](value) for kind in kinds):
            return f"{path}: is not {' or '.join(kinds)}"
    if "const" in node and value != node["const"]:
        return f"{path}: is not {json.dumps(node['const'])}"
    if "enum" in node and value not in node["enum"]:
        return f"{path}: is not one of {json.dumps(node['enum'])}"
    if isinstance(value, dict):
        for name in node.get("required", ()):
            if name not in value:
                return f"{path}.{name}: is required"
        properties = node.get("properties", {})
        for name, child in value.items():
            found = fault(child, properties.get(name, node.get("additionalProperties", True)), f"{path}.{name}")
            if found:
                return found
    if isinstance(value, list):
        if len(value) < node.get("minItems", 0):
            return f"{path}: has fewer than {node['minItems']} items"
        if len(value) > node.get("maxItems", len(value)):
            return f"{path}: has more than {node['maxItems']} items"
        for index, child in enumerate(value):
            found = fault(child, node.get("items", True), f"{path}[{index}]")
            if found:
                return found
    if isinstance(value, str):
        if len(value) < node.get("minLength", 0):
            return f"{path}: is shorter than {node['minLength']}"
        if len(value) > node.get("maxLength", len(value)):
            return f"{path}: is longer than {node['maxLength']}"
        if "pattern" in node and not re.search(node["pattern"], value):
            return f"{path}: does not match {node['pattern']}"
    if TYPES["number"](value):
        if value < node.get("minimum", value):
            return f"{path}: is below {node['minimum']}"
        if value > node.get("maximum", value):
            return f"{path}: is above {node['maximum']}"
        if "exclusiveMinimum" in node and value <= node["exclusiveMinimum"]:
            return f"{path}: is not above {node['exclusiveMinimum']}"
        if "exclusiveMaximum" in node and value >= node["exclusiveMaximum"]:
            return f"{path}: is not below {node['exclusiveMaximum']}"
    for child in node.get("allOf", ()):
        found = fault(value, child, path)
        if found:
            return found
    if "anyOf" in node and all(fault(value, child, path) for child in node["anyOf"]):
        return f"{path}: fits none of anyOf"
    if "not" in node and not fault(value, node["not"], path):
        return f"{path}: fits what it must not"
    return None


def judge(message):
    try:
        value = json.loads(message.payload)
    except ValueError as error:
        return Verdict_DeadLetter(f"$: is not JSON: {error}")
    found = fault(value, schema, "$")
    return Verdict_DeadLetter(found) if found else Verdict_Deliver()


class MessageFilter(wit_world.exports.MessageFilter):
    def init(self, settings: list[tuple[str, str]]) -> None:
        global schema
        given = dict(settings)
        text = given.pop("schema", None)
        if given:
            raise Err(f"schema-guard has the setting schema, got {next(iter(given))}")
        if text is None:
            raise Err("schema is required")
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise Err(f"schema is not JSON: {error}")
        check_schema(parsed)
        schema = parsed

    def filter(self, context: Context, messages: list[Message]) -> list[Verdict]:
        return [judge(message) for message in messages]
