"""What a server is started with: `--additional-config '{"weightwire": {"staging": "none"}}'`."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from weightwire.errors import MessageError

Staging = Literal["host", "device", "none"]
"""Where an update waits: in host memory, on the model's device, or nowhere: it goes into the live model."""

_KINDS: Final = {"staging": get_args(Staging), "strict": (True, False), "cast": (True, False)}


def parse_options(vllm_config: Any) -> dict[str, Any]:
    """The options that the server was started with.

    Args:
        vllm_config: The server's configuration.

    Raises:
        MessageError: They are no object, or a key or a value is unknown.
    """
    given = getattr(vllm_config, "additional_config", None)
    options = given.get("weightwire", {}) if isinstance(given, dict) else {}
    if not isinstance(options, dict) or not _KINDS.keys() >= options.keys():
        raise MessageError(f'additional_config["weightwire"] takes an object with {", ".join(_KINDS)}, got {options!r}')
    for key, value in options.items():
        if value not in _KINDS[key]:
            allowed = ", ".join(map(repr, _KINDS[key]))
            raise MessageError(f'additional_config["weightwire"]: {key} must be one of {allowed}, not {value!r}')
    return options
