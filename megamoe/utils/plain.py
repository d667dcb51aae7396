"""Config dataclasses to plain values and back, without a configuration library.

What is saved in a run folder, compared between ranks and put into checkpoints is the plain form; tools that open a run
read it back. Both directions live below `launch/`, which alone may import Hydra and OmegaConf.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing

from megamoe.utils.errors import UserError, nearest

T = typing.TypeVar("T")


def to_plain(value: object) -> object:
    """Dataclasses and dicts become dicts, sequences lists, enums their names: safe for `yaml.safe_dump` and `json.dumps`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def from_plain(cls: type[T], values: dict, where: str = "") -> T:
    """Build dataclass `cls` from what `to_plain` gave. Keys that are absent take their defaults.

    Args:
        cls: a config dataclass; nested dataclasses, enums, `Optional` and lists are followed.
        values: the plain form.
        where: dotted prefix of the keys, for messages.

    Raises:
        UserError: a key that `cls` does not have, or an enum name it does not know: the file was written by another version.
    """
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise UserError(f"{where}{key}: unknown key in a saved configuration{nearest(key, hints)}")
    return cls(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in values.items()})


def _convert(hint: object, value: object, key: str) -> object:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, key + ".")
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in hint.__members__:
            raise UserError(f"{key}={value}: unknown name in a saved configuration{nearest(str(value), hint.__members__)}")
        return hint[value]
    # JSON and YAML may give back 1 for 1.0.
    return float(value) if hint is float and isinstance(value, int) else value
