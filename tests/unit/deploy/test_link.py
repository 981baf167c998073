"""Keys that come and go, with a Flower that is played here."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedtide.core.errors import FedtideError
from fedtide.deploy.flower.link import Link


def key() -> str:
    public = Ed25519PrivateKey.generate().public_key()
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


class Flower:
    """Flower as it was read: a key is taken once and for ever, and a node goes once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.gone: set[int] = set()
        self.killed = ""

    def link(self, folder: Any, keys: dict[str, str]) -> Any:
        flower, admitted = self, []

        class Played(Link):
            admitted: list[Any]

            def __init__(self) -> None:
                self._folder = self._home = folder
                self._keys, self._admitted, self.said = lambda: keys, None, []
                self._counted, self._lock = None, threading.Lock()
                self._say = self.said.append
                self._carrier = self
                self.admitted = admitted

            def admit(self, names: Any) -> None:
                admitted.append(set(names))

            def _flwr(self, *words: str) -> dict[str, Any]:
                if words[1] == "register":
                    text = (folder / "admitted.pub").read_text(encoding="utf-8")
                    if text in flower.numbers:
                        raise FedtideError("'flwr supernode register' failed: Public key already in use")
                    flower.numbers[text] = len(flower.numbers)
                elif int(words[2]) in flower.gone:
                    raise FedtideError("'flwr supernode unregister' failed: already deleted")
                else:
                    flower.gone.add(int(words[2]))
                if flower.killed == words[1]:
                    raise KeyboardInterrupt
                return {"node-id": str(len(flower.numbers) - 1)}

        return Played()


def test_a_key_that_was_removed_stays_out_and_stops_nobody(tmp_path):
    flower, keys = Flower(), {"berlin": key(), "oslo": key()}
    link = flower.link(tmp_path, keys)
    link._admit()
    berlin = keys.pop("berlin")
    link._admit()
    assert link.admitted == [{"berlin", "oslo"}, {"oslo"}]
    assert flower.gone == {0}
    keys |= {"berlin": berlin, "paris": key()}
    for each in (link, flower.link(tmp_path, keys)):  # and after a restart
        each.said.clear()
        each._admit()
        each._admit()
        assert each.said == ["berlin: its key was removed before and is not let in again; it needs a new one"]
    assert keys["paris"] in flower.numbers
    keys["berlin"] = key()
    link._admit()
    assert keys["berlin"] in flower.numbers


def test_all_keys_may_be_removed(tmp_path):
    flower, keys = Flower(), {"berlin": key()}
    link = flower.link(tmp_path, keys)
    link._admit()
    keys.clear()
    link._admit()
    assert json.loads((tmp_path / "flower.json").read_text(encoding="utf-8"))["registered"] == {}


@pytest.mark.parametrize("killed", ["register", "unregister"])
def test_a_kill_between_flower_and_its_file_is_got_over(tmp_path, killed):
    flower, keys = Flower(), {"berlin": key(), "oslo": key()}
    if killed == "unregister":
        flower.link(tmp_path, keys)._admit()
        del keys["berlin"]
    flower.killed = killed
    with pytest.raises(KeyboardInterrupt):
        flower.link(tmp_path, keys)._admit()
    flower.killed = ""
    again = flower.link(tmp_path, keys)
    again._admit()
    assert again._admitted == keys
    assert again.admitted == [set(keys)]
    assert set(keys.values()) <= set(flower.numbers)


def test_a_removed_key_counts_no_more_whatever_flower_is_at(tmp_path, monkeypatch):
    from fedtide.deploy.flower import link as module

    keys, renewed = {"berlin": key(), "oslo": key()}, []
    link = Flower().link(tmp_path, keys)
    link._closing, link._renew = threading.Event(), lambda: renewed.append(True)
    monkeypatch.setattr(module, "LOOK", 0.001)
    monkeypatch.setattr(module, "DAY", 0.05)
    looking = threading.Thread(target=link._look)
    looking.start()
    try:
        for names in ({"berlin", "oslo"}, {"oslo"}):
            end = time.monotonic() + 10
            while link.admitted[-1:] != [names] or not renewed:
                assert time.monotonic() < end
                time.sleep(0.001)
            keys.pop("berlin", None)
    finally:
        link._closing.set()
        looking.join()
    assert link._admitted is None  # Flower was told nothing yet


@pytest.mark.parametrize("change", [{"format": 2}, {"format": None}, {"more": 1}, {"registered": ...}])
def test_a_file_of_another_version_is_refused_in_one_line(tmp_path, change):
    flower, keys = Flower(), {"berlin": key()}
    flower.link(tmp_path, keys)._admit()
    file = tmp_path / "flower.json"
    told = {**json.loads(file.read_text(encoding="utf-8")), **change}
    file.write_text(json.dumps({name: value for name, value in told.items() if value not in (None, ...)}))
    with pytest.raises(FedtideError) as caught:
        flower.link(tmp_path, keys)._admit()
    line = str(caught.value)
    assert line.startswith(f"{file}: format: found ")
    assert line.endswith(f"install the version of fedtide that wrote it, or stop the server and remove {tmp_path}")
