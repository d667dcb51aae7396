"""From override strings to a checked `Config`: the one place that speaks to Hydra and OmegaConf.

`compose(overrides)` serves the entry point, every tool and every test alike. `hydra_conf/` holds the values, the
dataclasses beside the code hold the types and the meaning; Hydra's structured configs bring the two together.

Whatever a person can mistype comes back as one line, `UserError("key=value: way out")`. Hydra's own messages speak of
structs, packages and search paths, span several lines and never name the closest valid key, so the overrides are looked
at before Hydra sees them, and what Hydra or OmegaConf still refuse is retold in terms of the field it concerns.

Nothing here imports torch: a mistake is answered in well under a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import types
import typing
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from megamoe.train.config import Config
from megamoe.utils.errors import UserError, nearest
from megamoe.utils.plain import to_plain
from megamoe.utils.redact import shown_value

CONF_DIR = Path(__file__).resolve().parents[1] / "hydra_conf"

ConfigStore.instance().store(name="base_config", node=Config)


def compose(overrides: list[str]) -> Config:
    """Compose `hydra_conf/config.yaml` with overrides and check the result.

    Args:
        overrides: Hydra overrides, `train.seq_len=2048`, `optim=adamw`, `experiment=balancing_sign`, …

    Returns:
        a `Config` whose sections have checked themselves and each other (all but the world size, unknown here).

    Raises:
        UserError: one line with the key, the value and the way out.
    """
    return build(compose_tree(overrides), overrides)


def compose_tree(overrides: list[str]) -> DictConfig:
    """The composed but unchecked tree, interpolations unresolved. Most callers want `compose`.

    Raises:
        UserError: as `compose`, for everything that shows before the values are looked at together.
    """
    if not (CONF_DIR / "config.yaml").is_file():
        raise UserError(f"hydra_conf={CONF_DIR}: no config.yaml there; install megamoe from its checkout with pip install -e .")
    checked = [_checked_override(override) for override in overrides]
    # A caller may sit inside a Hydra application of its own: leave that one's global state as it was.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            tree = hydra_compose("config", overrides=checked)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(_explain(error, overrides)) from error
    finally:
        GlobalHydra.instance().hydra = outer
    _check_no_extra_keys(tree, Config, "")
    return tree


def build(tree: DictConfig, overrides: list[str]) -> Config:
    """Turn a composed tree into the dataclasses, which runs every section's own checks, then check across sections.

    `overrides` are only quoted in messages.
    """
    try:
        config = OmegaConf.to_object(tree)
    except UserError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(_explain(error, overrides)) from error
    config.validate()
    return config


def to_dict(config: Config) -> dict:
    """The resolved configuration as plain dicts, lists, strings and numbers: what is saved, compared and uploaded.

    Enums become their names; `megamoe.utils.plain.from_plain(Config, …)` is the way back.
    """
    return to_plain(config)


def default_choices() -> dict[str, str | None]:
    """The file that config.yaml takes from each group (None: an overlay that is off), in composition order."""
    entries = yaml.safe_load((CONF_DIR / "config.yaml").read_text())["defaults"]
    return {name: file for entry in entries if isinstance(entry, dict) for name, file in entry.items()}


def groups() -> dict[str, list[str]]:
    """Every config group with the names of its files, in composition order."""
    return {name: sorted(p.stem for p in (CONF_DIR / name).glob("*.yaml")) for name in default_choices()}


def fields(cls: type = Config, prefix: str = "") -> dict[str, object]:
    """Every dotted key, sections included, with its type: `{"train": TrainConfig, "train.seq_len": int, …}`."""
    found: dict[str, object] = {}
    for name, hint in typing.get_type_hints(cls).items():
        found[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            found |= fields(hint, f"{prefix}{name}.")
    return found


def _checked_override(text: str) -> str:
    """Refuse an override that cannot be right before Hydra composes anything; else return it as Hydra wants it."""
    # What is repeated to the user: without the value where that may be a secret.
    name, equals, raw = text.partition("=")
    shown = text if name.lstrip("+~") in {*fields(), *groups()} else name + equals + shown_value(name, raw)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        hint = "write key=value" if "=" not in text else "quote spaces, commas and brackets of a value: key='…'; a list is key=[a,b]"
        raise UserError(f"{shown}: not an override; {hint}") from None
    key = override.key_or_group
    if key.startswith(("hydra.", "hydra/")):
        return text
    raw = shown.partition("=")[2]
    if not key:
        raise UserError(f"{shown}: not an override; write key=value")
    if override.is_sweep_override():
        raise UserError(f"{key}={raw}: one run takes one value; for a list write {key}=[{raw}], to sweep start one run per value")
    known, options = fields(), groups()
    if override.package is not None:
        raise UserError(f"{shown}: config groups stay in their own section; write {key}={raw}")
    if key not in known and key not in options and not _is_free_entry(key, known):
        raise UserError(f"{key}={raw}: unknown key{_nearest_key(key)}")
    if _is_free_entry(key, known) or typing.get_origin(known.get(key)) is dict:
        return text if override.is_delete() else "++" + text.lstrip("+")
    if override.is_add() and not override.is_force_add():
        raise UserError(f"{shown}: {key} exists; drop the +")
    if override.is_delete() and key not in options:
        raise UserError(f"{shown}: a key cannot be removed; set the value you want, {key}=…")
    if key in options and not override.is_delete():
        value = override.value()
        if value is None and key in known:
            raise UserError(f"{key}=null: every run needs this group{_known_options(key)}")
        if value is None:
            return f"~{key}"
        if not isinstance(value, (str, list, dict)):
            raise UserError(f"{key}={raw}: no such file in hydra_conf/{key}{_known_options(key)}")
    return text


def _is_free_entry(key: str, known: dict[str, object]) -> bool:
    """Whether the key lies inside a dict field, whose entries are the user's own."""
    return typing.get_origin(known.get(key.rpartition(".")[0])) is dict


def _known_options(group: str) -> str:
    return f" (known: {', '.join(groups()[group])})"


def _nearest_key(key: str) -> str:
    """A hint for an unknown key: the same leaf in another section, else the closest name, preferring the same section."""
    known = fields()
    parent, _, leaf = key.rpartition(".")
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    siblings = [k for k in known if parent and k.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75) or same_leaf
    close = close or ([] if siblings else difflib.get_close_matches(key, [*known, *groups()], n=1, cutoff=0.6))
    if close:
        return " (did you mean " + " or ".join(f"'{k}'" for k in close[:3]) + "?)"
    if siblings:
        return f" (keys of {parent}: {', '.join(k.rpartition('.')[2] for k in siblings)})"
    return f" (sections: {', '.join(f.name for f in dataclasses.fields(Config))}; groups: {', '.join(groups())})"


def _check_no_extra_keys(tree: DictConfig, cls: type, prefix: str) -> None:
    """`++key={…}` opens a typed section and OmegaConf then sets attributes nobody reads: refuse those."""
    hints = typing.get_type_hints(cls)
    for name in tree:
        key = f"{prefix}{name}"
        if name not in hints:
            raise UserError(f"{key}: unknown key{_nearest_key(key)}")
        if dataclasses.is_dataclass(hints[name]):
            _check_no_extra_keys(tree[name], hints[name], key + ".")


def _chain(error: BaseException | None) -> typing.Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain(error: Exception, overrides: list[str]) -> str:
    """One line for what Hydra, OmegaConf, YAML or a section's own check refused."""
    where = _file_named_in(error)
    for cause in _chain(error):
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, name = str(cause.missing_cfg_file).rpartition("/")
            group = group.lstrip("/")
            return f"{group}={name}: no such file in hydra_conf/{group}{nearest(name, cause.options or [])}{where}"
        if isinstance(cause, yaml.MarkedYAMLError) and cause.problem_mark is not None:
            mark = cause.problem_mark
            return f"{_short_path(mark.name)} line {mark.line + 1}: not valid YAML: {cause.problem}"
        if isinstance(cause, MissingMandatoryValue):
            return f"{cause.full_key}: has no value; set {cause.full_key}=…{where}"
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _explain_value(cause, overrides) + where
    return " ".join(str(error).split()) + where


def _explain_value(error: OmegaConfBaseException, overrides: list[str]) -> str:
    """OmegaConf refused a key or a value: retell it from the field's type."""
    key = str(error.full_key)
    message = str(error.msg or error).splitlines()[0]
    if key not in fields():
        return f"{key}: unknown key{_nearest_key(key)}"
    given = [o.partition("=")[2] for o in overrides if o.lstrip("+").partition("=")[0] == key]
    quoted = re.search(r"[Vv]alue '(.*?)'", message)  # the only place where OmegaConf keeps a value that a file gave
    value = given[-1] if given else quoted.group(1) if quoted else None
    shown = key if value is None else f"{key}={value}"
    if isinstance(error, InterpolationResolutionError) or "interpolation" in message:
        return f"{shown}: {message[0].lower()}{message[1:]}"
    return f"{shown}: must be {_wanted(fields()[key], key, value)}"


def _wanted(hint: object, key: str, value: str | None) -> str:
    """What a field takes, in words."""
    if dataclasses.is_dataclass(hint):
        return f"a section: set its keys one by one, such as {key}.{dataclasses.fields(hint)[0].name}=…"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return _wanted(inner, key, value) + ", or null"
    if typing.get_origin(hint) is list:
        return f"a list of {_PLURAL[typing.get_args(hint)[0]]}, such as [{_SAMPLE[typing.get_args(hint)[0]]}]"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        names = [member.name for member in hint]
        if value == "False" and "off" in names:
            return f'one of {", ".join(names)} (YAML reads a bare off as false: write "off" in quotes)'
        close = difflib.get_close_matches(value or "", names, n=1, cutoff=0.5)
        return f"one of {', '.join(names)}" + (f" (did you mean '{close[0]}'?)" if close else "")
    return _SINGULAR.get(hint, str(hint))


_SINGULAR = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURAL = {bool: "true and false", int: "whole numbers", float: "numbers", str: "names"}
_SAMPLE = {bool: "true,false", int: "4,8", float: "0.5,0.5", str: "a,b"}


def _file_named_in(error: Exception) -> str:
    """` (in hydra_conf/experiment/x.yaml)` when Hydra was reading that file and not the overrides."""
    found = re.match(r"In '([^']+)'", str(error))
    return f" (in hydra_conf/{found.group(1)}.yaml)" if found and found.group(1) != "config" else ""


def _short_path(path: str) -> str:
    return str(Path(path).relative_to(CONF_DIR.parent)) if Path(path).is_relative_to(CONF_DIR.parent) else path
