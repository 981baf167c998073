"""The other nodes whose keys a node shares masks with: whose word counts, and what is known of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.site import certificates
from fedtide.site.policy import Policy


@dataclass(frozen=True)
class Peers:
    """The registered keys of other nodes, by name: those that the owner names, or the first that came.

    A server that makes nodes up could give each of them a key of its own. Fingerprints that owners compare show it.

    Args:
        file: what was met before.
        policy: () -> the owner's rules as they are now.
        log: is told of each key that is new.
    """

    file: Path
    policy: Callable[[], Policy]
    log: Callable[[str], None]

    def trusts(self, node: str, key: str) -> str | None:
        """Return why the key of a node does not count; None where it does."""
        try:
            print_ = certificates.fingerprint(certificates.check_public_key(key, "key"))
            allowed = self.policy().peers
        except FedtideError:
            return "its registered key is none, or the owner's rules cannot be read now"
        if allowed is not None and print_ not in allowed:
            return f"its key {print_} is not among the peers that the owner named"
        known = self._known()
        if known.get(node, key) != key:
            return f"its key is {print_}, and it was another before; ask its owner"
        if any(name != node and other == key for name, other in known.items()):
            return f"its key {print_} is that of another node, too"
        if node not in known:
            self.log(f"masks are shared with {node} from now on, key {print_}: compare it with its owner")
            write_text(self.file, json.dumps({**known, node: key}))
        return None

    def _known(self) -> dict[str, str]:
        found: dict[str, str] = {}
        with suppress(OSError, ValueError):
            found = {str(name): str(key) for name, key in json.loads(self.file.read_text(encoding="utf-8")).items()}
        return found
