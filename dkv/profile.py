"""What each kv head of a model needs stored: measured once per model, kept as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from dkv.types import BlockFormat

FORMAT = "dkv-profile"
VERSION = 2
CHECKSUM = "sha256"  # of everything else in the file
MAX_BYTES = 16 << 20  # of a file; a number takes about 10
NESTED = ("key_options", "value_options", "key_loss", "value_loss", "drop_loss", "channel_weight")
SHAPE = {"num_layers": 4096, "num_kv_heads": 4096, "head_dim": 65536}  # and the largest that is believed


@dataclasses.dataclass(frozen=True)
class HeadProfile:
    """What each kv head of a model looks back at, and what coarser storage of it costs.

    Made by ``dkv profile MODEL -o FILE`` or :func:`dkv.profiling.measure_profile`; the JSON files in ``dkv/profiles``
    ship with the package. Everything is checked when a profile is made, so also when one is loaded.

    Parameters
    ----------
    model : str
        The name of the model.
    num_layers, num_kv_heads, head_dim : int
        Its shape: all layers, kv heads of a layer, channels of a key.
    scores : sequence of sequences of float, [num_layers][num_kv_heads]
        The share, 0 to 1, of a head's attention that a repeated passage sends back to its earlier copy. 0 for all heads
        of a layer that keeps no full cache (a sliding window, for one). Held as tuples.
    key_options : sequence of 8 widths each
        The ``key_bits`` that were priced, from fine to coarse.
    value_options : sequence of int
        The ``value_bits`` that were priced, from fine to coarse.
    key_loss : [num_layers][num_kv_heads][len(key_options)]
        Estimated KL divergence in nats per token where a head's keys alone are stored so; see :mod:`dkv.sensitivity`.
    value_loss : [num_layers][num_kv_heads][len(value_options)]
        The same for its values.
    drop_loss : [num_layers][num_kv_heads]
        The same where the head sees sink and window alone.
    channel_weight : [num_layers][num_kv_heads][head_dim]
        Mean square of the queries that a head's keys meet, per channel.
    text : str
        Which text was measured on.
    settings : mapping of str to numbers, or to sequences of numbers, optional
        How it was measured.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    scores: tuple[tuple[float, ...], ...]
    key_options: tuple[tuple[int, ...], ...]
    value_options: tuple[int, ...]
    key_loss: tuple[tuple[tuple[float, ...], ...], ...]
    value_loss: tuple[tuple[tuple[float, ...], ...], ...]
    drop_loss: tuple[tuple[float, ...], ...]
    channel_weight: tuple[tuple[tuple[float, ...], ...], ...]
    text: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("model", "text"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} of a profile must be a string, got {getattr(self, name)!r:.60}")
        for name, limit in SHAPE.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} of a profile must be an int in 1..{limit}, got {value!r:.60}")
        object.__setattr__(self, "scores", self._checked_scores())
        self._check_options()
        heads = (self.num_layers, self.num_kv_heads)
        for name, last in (
            ("key_loss", (len(self.key_options),)),
            ("value_loss", (len(self.value_options),)),
            ("drop_loss", ()),
            ("channel_weight", (self.head_dim,)),
        ):
            object.__setattr__(self, name, _nested(name, getattr(self, name), (*heads, *last)))
        object.__setattr__(self, "settings", self._checked_settings())

    def _checked_scores(self) -> tuple[tuple[float, ...], ...]:
        layers = _sequence(self.scores)
        if layers is None or len(layers) != self.num_layers:
            got = "no list" if layers is None else f"{len(layers)} layers"
            raise ValueError(f"scores of a profile must have num_layers={self.num_layers} layers, got {got}")
        checked = []
        for index, layer in enumerate(layers):
            heads = _sequence(layer)
            if heads is None or len(heads) != self.num_kv_heads:
                got = "no list" if heads is None else f"{len(heads)}"
                wanted = f"num_kv_heads={self.num_kv_heads} numbers"
                raise ValueError(f"scores of a profile must have {wanted} in layer {index}, got {got}")
            for head, score in enumerate(heads):
                if not _is_number(score) or not 0 <= score <= 1:  # NaN is not
                    where = f"layer {index}, head {head}"
                    raise ValueError(f"scores of a profile must be numbers in 0..1, got {score!r:.60} ({where})")
            checked.append(tuple(float(score) for score in heads))
        return tuple(checked)

    def _check_options(self) -> None:
        """Widths as a BlockFormat takes them; at least one of each."""
        keys, values = _sequence(self.key_options), _sequence(self.value_options)
        if not keys or not values:
            raise ValueError("key_options and value_options of a profile must be lists of widths, at least one of each")
        name = "key_options"
        try:
            keys = [BlockFormat(key_bits=tuple(option)).key_bits for option in keys]
            name = "value_options"
            if any(value is None for value in values):
                raise TypeError("widths must be numbers, got None")
            values = [BlockFormat(value_bits=option).value_bits for option in values]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} of a profile: {error}") from error
        object.__setattr__(self, "key_options", tuple(keys))
        object.__setattr__(self, "value_options", tuple(values))

    def _checked_settings(self) -> dict[str, Any]:
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"settings of a profile must be a mapping, got {self.settings!r:.60}")
        checked = {}
        for name, value in self.settings.items():
            items = _sequence(value)
            whole = all(_is_number(item) and abs(item) < math.inf for item in ([value] if items is None else items))
            if not isinstance(name, str) or not whole:
                raise ValueError(f"settings of a profile must be named finite numbers, got {name!r:.60}: {value!r:.60}")
            checked[name] = value if items is None else tuple(items)
        return checked

    # a model

    def ranked_heads(self) -> list[tuple[int, int]]:
        """Layer and number of every head by descending score, ties to the lower layer, then head."""
        heads = [(layer, head) for layer in range(self.num_layers) for head in range(self.num_kv_heads)]
        return sorted(heads, key=lambda at: -self.scores[at[0]][at[1]])

    def check_model(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Refuse a model of another shape.

        Raises
        ------
        ValueError
            Says what differs.
        """
        for what, own, got in (
            ("{} layers", self.num_layers, num_layers),
            ("{} kv heads", self.num_kv_heads, num_kv_heads),
            ("head dim {}", self.head_dim, head_dim),
        ):
            if own != got:
                raise ValueError(f"profile is of a model with {what.format(own)}, this one has {got}")

    # files

    def to_dict(self) -> dict[str, Any]:
        """Strings, numbers, lists and mappings alone, as JSON has them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("scores", *NESTED):
            values[name] = _lists(values[name])
        values["settings"] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()
        }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadProfile:
        """The inverse of :meth:`to_dict`; an unknown or a missing field is a ``ValueError``."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a profile must be a mapping, got {values!r:.60}")
        fields = {field.name for field in dataclasses.fields(cls)}
        if set(values) != fields:
            missing, unknown = sorted(fields - set(values)), sorted(map(str, set(values) - fields))
            raise ValueError(f"fields of a profile: missing {missing}, unknown {unknown!s:.200}")
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file with a checksum, through a temporary file and an atomic rename."""
        from dkv._json import digest
        from dkv._paths import replaced

        values = {"format": FORMAT, "version": VERSION, **self.to_dict()}
        text = _readable({**values, CHECKSUM: digest(values)})
        with replaced(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadProfile:
        """Read what :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError
            When there is no such file.
        ValueError
            When the file is no whole profile as it was saved, is of another version, or a field of it is wrong; it is
            named.
        """
        from dkv._paths import readable

        name = readable(path)
        with open(name, "rb") as file:
            data = file.read(min(os.fstat(file.fileno()).st_size, MAX_BYTES) + 1)
        return cls._parsed(data, name)

    @classmethod
    def _parsed(cls, data: bytes, name: str) -> HeadProfile:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{name} is larger than a profile can be ({MAX_BYTES:,} bytes)")
        from dkv._json import digest, read_json

        try:
            values = read_json(data)
            claimed = values.pop(CHECKSUM, None)
            found = digest(values)
        except ValueError as error:  # also of bytes that are no text
            raise ValueError(f"{name} is not a whole profile: {error}") from error
        if values.get("format") != FORMAT:
            raise ValueError(f"format of {name} must be {FORMAT!r}: it is no profile")
        version = values.get("version")
        if type(version) is not int or version != VERSION:
            raise ValueError(f"version of {name} is {version!r:.60}, this dkv reads {VERSION}")
        if claimed != found:
            raise ValueError(f"{CHECKSUM} of {name} is not that of its fields: it was damaged or changed by hand")
        try:
            return cls.from_dict({key: value for key, value in values.items() if key not in ("format", "version")})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    # those that ship

    @classmethod
    def shipped(cls, name: str) -> HeadProfile:
        """A profile that comes with the package, by the name of its model, such as "smollm2-135m"."""
        known = shipped_names()
        if name not in known:
            raise ValueError(f"no profile ships for {name!r:.60}; there are: {', '.join(known)}")
        return cls._parsed(_shipped_file(f"{name}.json").read_bytes(), f"{name}.json")


def shipped_names() -> list[str]:
    """The models whose profiles come with the package."""
    names = (entry.name for entry in _shipped_file("").iterdir())
    return sorted(name[: -len(".json")] for name in names if name.endswith(".json"))


def shipped_text() -> str:
    """The text that profiles are measured on when none is given; ``dkv/profiles/README.md`` says what it is."""
    return str(_shipped_file("text.txt").read_text(encoding="utf-8"))


def _shipped_file(name: str) -> Any:
    from importlib import resources

    return resources.files("dkv").joinpath("profiles", name)


def _readable(values: Mapping[str, Any]) -> str:
    """JSON with one line per field and layer: a list of lists of numbers does not take a line for each."""
    fields = []
    for name, value in values.items():
        deep = isinstance(value, list) and value and isinstance(value[0], list)
        lines = ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) if deep else ""
        text = f"[\n  {lines}\n ]" if deep else json.dumps(value, allow_nan=False)
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _nested(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Nested tuples of ``shape`` of finite numbers that are not negative."""
    if not shape:
        if not _is_number(value) or not 0 <= value <= sys.float_info.max:  # NaN is not
            raise ValueError(f"{name} of a profile must hold finite numbers of 0 or more, got {value!r:.60}")
        return float(value)
    items = _sequence(value)
    if items is None or len(items) != shape[0]:
        got = "no list" if items is None else f"{len(items)}"
        raise ValueError(f"{name} of a profile must have {shape[0]} entries along an axis of its shape, got {got}")
    return tuple(_nested(name, item, shape[1:]) for item in items)


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sequence(value: Any) -> list[Any] | None:
    """A list of what a sequence or an array holds; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else None
