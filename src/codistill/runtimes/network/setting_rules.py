"""Bounds that a policy sets for the settings of a protocol.

aggregate = "median"                    exactly this
aggregate = ["mean", "median"]          one of these
lr = { at_most = 0.1 }                  within bounds: at_least, at_most
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from codistill.errors import RecipeError, nearest
from codistill.protocol import Protocol

_BOUNDS = ("at_least", "at_most")


def check_rules(kind: type[Protocol], rules: Any) -> None:
    """Rules must be about settings that the protocol has."""
    where = f"[settings.{kind.name or kind.__name__}]"
    if not isinstance(rules, dict):
        raise RecipeError(f"{where} of a policy must be a table.", f"{rules!r}"[:80], "Write SETTING = ALLOWED.")
    fields = [field.name for field in dataclasses.fields(kind)]
    for name, rule in rules.items():
        if name not in fields:
            raise RecipeError(f"{where} may only name settings of the protocol.", f"'{name}'", nearest(name, fields))
        if isinstance(rule, dict):
            for key, bound in rule.items():
                if key not in _BOUNDS:
                    raise RecipeError(f"{where} {name} may only have bounds.", f"'{key}'", nearest(key, _BOUNDS))
                if isinstance(bound, bool) or not isinstance(bound, int | float):
                    raise RecipeError(f"{where} {name}.{key} must be a number.", f"{bound!r}"[:80], "Change it.")


def objections_to_settings(protocol: Protocol, rules: Mapping[str, Any]) -> list[str]:
    """The rules that a protocol's settings break, in words; settings that were not told have their defaults."""
    broken = []
    for name, rule in rules.items():
        value = getattr(protocol, name)
        why = _objection(value, rule)
        if why:
            broken.append(f"settings.{protocol.name}.{name} {why}: {value!r}"[:200])
    return broken


def _objection(value: Any, rule: Any) -> str | None:
    if isinstance(rule, dict):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if "at_least" in rule and not (is_number and value >= rule["at_least"]):
            return f"must be at least {rule['at_least']}"
        if "at_most" in rule and not (is_number and value <= rule["at_most"]):
            return f"must be at most {rule['at_most']}"
        return None
    allowed = rule if isinstance(rule, list) else [rule]
    if any(_equal(value, each) for each in allowed):
        return None
    return f"must be {'one of ' if len(allowed) > 1 else ''}{', '.join(map(repr, allowed))}"


def _equal(value: Any, allowed: Any) -> bool:
    if isinstance(value, tuple):
        value = list(value)
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
