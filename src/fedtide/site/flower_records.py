"""What travels with Flower: a header of plain JSON, and one sealed array of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedtide.core.errors import FedtideError
from fedtide.remote.messages import from_json

WHO, ASK = "query.who", "train.ask"
"""Flower's types of our messages: who a node is, and a question to its clients."""


def sealed(payload: bytes) -> ArrayRecord:
    """Return bytes as a record; one that is sent to several nodes is carried once."""
    return ArrayRecord({"tree": Array("uint8", (len(payload),), "fedtide.tree", payload)})


def packed(header: Mapping[str, Any], tree: ArrayRecord) -> RecordDict:
    """Return the content of a message."""
    return RecordDict({"header": ConfigRecord({"json": json.dumps(dict(header))}), "tree": tree})


def unpacked(content: RecordDict) -> tuple[dict[str, Any], bytes]:
    """Return header and payload of a message, which may be anybody's.

    Raises:
        FedtideError: it is something else.
    """
    try:
        return from_json(str(content["header"]["json"])), bytes(content["tree"]["tree"].data)
    except (KeyError, TypeError, AttributeError) as error:
        raise FedtideError(f"sent something else than an answer ({type(error).__name__})") from None
