"""Commands between nodes, and the answers to them: plain values as JSON, and arrays, in one payload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from codistill.errors import MessageError
from codistill.runtimes.network.frame_header import FrameHeader
from codistill.runtimes.network.inbox import ReceivedFrame
from codistill.runtimes.network.stream import CONTROL_LIMIT
from codistill.wire.codec import Arrays, decode, encode, read_json

_TEXT_LIMIT = 1 << 22  # characters of the text of a command


class Control:
    """A command or an answer: plain values, and arrays if it has any."""

    def __init__(self, sender: str, content: dict[str, Any], arrays: Arrays, header: FrameHeader) -> None:
        self.sender, self.content, self.arrays, self.header = sender, content, arrays, header

    @property
    def do(self) -> str:
        """Which command or answer it is."""
        return str(self.content["do"])


def encode_control(content: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """The payload of a command or an answer."""
    return encode(arrays, {"json": json.dumps(content, separators=(",", ":"))})


def read_control(received: ReceivedFrame, header: FrameHeader) -> Control:
    """The command or answer in a frame; raises `ValueError` if it is malformed."""
    try:
        arrays, values = decode(
            received.payload, finite=False, limit=CONTROL_LIMIT, header_limit=2 * _TEXT_LIMIT, packed=False
        )
        content = read_json(values["json"], _TEXT_LIMIT)
        if not isinstance(content, dict) or not isinstance(content.get("do"), str):
            raise ValueError("it has no 'do'")
    except (MessageError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return Control(received.sender, content, arrays, header)
