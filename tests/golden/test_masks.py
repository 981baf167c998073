"""Masks: published vectors of the primitives, and two clients by hand.

Two clients with vectors 5 and -3. Client 1 adds stream(b_1) + stream(s_12), client 2 adds stream(b_2) - stream(s_12).
The sum is 2 + stream(b_1) + stream(b_2), so with b_1 and b_2 it is 2. Where a third one was asked and did not answer,
clients 1 and 2 also have stream(s_13) and stream(s_23) on them, which they show.
"""

import numpy as np
import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.wire import masks
from fedtide.wire.keys import library
from fedtide.wire.masks import PIECE, Bundle, Context, Masker, Question, add_stream, derived, link, seed_of
from fedtide.wire.unmask import unmasked, unsealed

CONTEXT = Context("run", (3, 0), 0, "a.0")


def stream(seed: bytes, count: int) -> np.ndarray:
    made = np.zeros(count, np.uint64)
    add_stream(made, seed)
    return made


def test_key_agreement_as_in_rfc_7748():
    """Section 6.1."""
    x25519 = library().hazmat.primitives.asymmetric.x25519
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    one, other = (x25519.X25519PrivateKey.from_private_bytes(key) for key in (alice, bob))
    public = one.public_key().public_bytes_raw()
    assert public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    secret = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert other.exchange(one.public_key()).hex() == secret == one.exchange(other.public_key()).hex()


def test_streams_as_in_rfc_8439():
    """Appendix A.1, test vectors 1 and 2: key, nonce and counter are 0; then the counter is 1."""
    first = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    second = (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    assert stream(bytes(32), 16).astype("<u8").tobytes().hex() == first + second


def test_a_long_stream_goes_on_where_its_pieces_end():
    count = 2 * PIECE + 5
    ciphers = library().hazmat.primitives.ciphers
    whole = ciphers.Cipher(ciphers.algorithms.ChaCha20(b"k" * 32, bytes(16)), mode=None).encryptor()
    made = stream(b"k" * 32, count)
    assert made.astype("<u8").tobytes() == whole.update(bytes(8 * count))
    add_stream(made, b"k" * 32, add=False)
    assert not made.any()


def test_derived_secrets_as_in_rfc_5869():
    """Appendix A.3: no salt and no info."""
    assert derived(b"\x0b" * 22, b"").hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_what_a_secret_is_for_cannot_be_read_in_two_ways():
    one, other = Context("a", (1, 2), 3, "x"), Context("a", (1, 2), 3, 'x","y')
    assert one.info("mask", 1, 2) == b'["fedtide","mask","a",1,2,3,"x",1,2]'
    assert one.info("mask", "y") != other.info("mask")


def test_masks_between_two_cancel_by_hand():
    total = np.zeros(1, np.uint64)
    link(total, 1, 2, b"s" * 32)
    assert total[0] == stream(b"s" * 32, 1)[0]
    link(total, 2, 1, b"s" * 32)
    assert total[0] == 0


def three(file=None) -> tuple[dict[int, Masker], dict[int, bytes]]:
    """Three nodes of one client each, and their public keys; the first keeps its lists in a file."""
    nodes = {k: Masker("run", f"node-{k}", lists=file if k == 1 else None) for k in (1, 2, 3)}
    return nodes, {k: node.bundle.public for k, node in nodes.items()}


def test_two_of_three_who_were_asked_by_hand():
    nodes, peers = three()
    sent = {k: nodes[k].masked(CONTEXT, k, x, peers) for k, x in ((1, torch.tensor([5])), (2, torch.tensor([-3])))}
    shown = {k: nodes[k].show(CONTEXT, k, [1, 2], 2) for k in (1, 2)}
    assert set(shown[1].links) == set(shown[2].links) == {3}
    assert set(shown[1].opens) == {2}
    (total,) = unmasked(sent, shown)
    assert total.tolist() == [2]
    # The secret that 1 shares with the one who vanished is what that one would have used.
    vanished = nodes[3].masked(CONTEXT, 3, torch.zeros(1, dtype=torch.int64), peers)
    assert seed_of(nodes[3]._open[CONTEXT, 3].links[1], 0) == unsealed(shown)[1].links[3]
    assert int(vanished[0]) != 0


def test_a_try_is_masked_once_and_a_question_opened_for_one_list():
    nodes, peers = three()
    one, x = nodes[1], torch.tensor([7])
    first = one.masked(CONTEXT, 1, x, peers)
    assert one.masked(CONTEXT, 1, x, peers).equal(first), "a question that comes twice is answered as before"
    for vector, among in ((x + 1, peers), (x, {1: peers[1], 2: peers[2]})):
        with pytest.raises(FedtideError, match="masked once"):
            one.masked(CONTEXT, 1, vector, among)
    shown = one.show(CONTEXT, 1, [1, 2], 2)
    assert one.show(CONTEXT, 1, [2, 1], 2) == shown
    with pytest.raises(FedtideError, match="for one list"):
        one.show(CONTEXT, 1, [1, 2, 3], 2)
    with pytest.raises(FedtideError, match="found 1, allowed: 2 clients or more"):
        one.show(CONTEXT, 1, [1], 2)
    later = Context("run", (3, 0), 0, "a.2")
    one.masked(later, 1, x, peers)
    with pytest.raises(FedtideError, match="for one list"):
        one.show(later, 1, [1, 3], 2)
    for alive in ([2, 3], [1, 4], [1, 2, 2]):
        with pytest.raises(FedtideError, match="clients that were asked, 1 among them"):
            one.show(CONTEXT, 1, alive, 2)
    again = Context("run", (3, 0), 0, "a.1")
    assert not one.masked(again, 1, x, peers).equal(first)
    with pytest.raises(FedtideError, match="another than the server knows"):
        nodes[2].show(CONTEXT, 2, [1, 2], 2)


def test_a_sum_is_not_opened_of_which_another_node_knows_all_but_one_client():
    """Clients 1 and 2 of one node, 3 of another: that node takes its own off the sum, and 3 is left."""
    nodes = {k: Masker("run", f"node-{k}") for k in "ab"}
    for sides, opens in (("aab", False), ("abb", False), ("aabb", True), ("aaa", True)):
        at = {k: nodes[side] for k, side in enumerate(sides)}
        peers, context = {k: node.bundle.public for k, node in at.items()}, Context("run", (3, 0), 0, sides)
        for k, node in at.items():
            node.masked(context, k, torch.tensor([7]), peers, Question(0, sides))
            if opens:
                assert node.show(context, k, list(at), 3).opens
            else:
                with pytest.raises(FedtideError, match="clients of its sum are at other nodes than the largest"):
                    node.show(context, k, list(at), 3)


def test_a_sum_is_not_opened_of_which_two_other_nodes_know_all_but_one_client():
    """A study opens sums of five. Nodes b and c help the server, and it says that they have many clients.

    With three clients or more of nodes that do not help, or two where three help, the sum hides each as `fewest` says.
    """
    nodes = {k: Masker("run", f"node-{k}") for k in "abcdefg"}
    cases = {"abbbbcccc": False, "aadddbbbbcccc": True, "adbbbbcccc": False, "adebbbbcccc": True, "abcdefg": True,
             "aaaabbbb": True, "aaaabbbbc": False}  # fmt: skip
    for sides, opens in cases.items():
        at = {k: nodes[side] for k, side in enumerate(sides)}
        peers, context = {k: node.bundle.public for k, node in at.items()}, Context("run", (3, 0), 0, sides)
        nodes["a"].masked(context, 0, torch.tensor([7]), peers, Question(0, sides))
        if opens:
            assert nodes["a"].show(context, 0, list(at), 5).opens
        else:
            with pytest.raises(FedtideError, match="clients of its sum are at other nodes than the largest"):
                nodes["a"].show(context, 0, list(at), 5)


def test_what_was_forgotten_is_not_masked_again():
    node = Masker("run", "a")
    peers = {1: node.bundle.public, 2: node.bundle.public}
    for number in range(12):
        node.masked(Context("run", (number, 0), 0, "a"), 1, torch.tensor([1]), peers)
    with pytest.raises(FedtideError, match="masked once"):
        node.masked(Context("run", (0, 0), 0, "a"), 1, torch.tensor([1]), peers)


def test_another_key_makes_other_masks_and_the_lists_stay(monkeypatch):
    monkeypatch.setattr(masks, "USED", 2)
    nodes, peers = three()
    one, x = nodes[1], torch.tensor([7])
    one.masked(CONTEXT, 1, x, peers, Question(0, "train"))
    one.show(CONTEXT, 1, [1, 2], 2)
    one.masked(Context("run", (3, 0), 0, "a.1"), 1, x, peers, Question(0, "train"))
    with pytest.raises(FedtideError, match="another than the server knows"):
        one.masked(Context("run", (3, 0), 0, "a.2"), 1, x, peers, Question(0, "train"))
    with pytest.raises(FedtideError, match="another than the server knows"):
        one.check({f"node-{k}": Bundle(public) for k, public in peers.items()} | {one.node: Bundle(peers[1])})
    with pytest.raises(FedtideError, match="another than the server knows"):
        one.show(CONTEXT, 1, [1, 2], 2)
    peers |= {1: one.bundle.public}
    one.masked(CONTEXT, 1, x, peers, Question(0, "train"))
    with pytest.raises(FedtideError, match="for one list"):
        one.show(CONTEXT, 1, [1, 3], 2)


def test_a_node_that_is_started_again_knows_which_lists_it_opened_sums_for(tmp_path):
    """It has another key, and the same answer: for another list the server would have the difference of two sums."""
    file = tmp_path / "opened"
    for alive in ([1, 2], [1, 2], [1, 2, 3]):
        nodes, peers = three(file)
        nodes[1].masked(CONTEXT, 1, torch.tensor([7]), peers)
        if alive == [1, 2, 3]:
            with pytest.raises(FedtideError, match="for one list"):
                nodes[1].show(CONTEXT, 1, alive, 2)
        else:
            shown = nodes[1].show(CONTEXT, 1, alive, 2)
            assert not any(secret.hex() in file.read_text() for secret in (shown.sealed, *shown.opens.values()))


@pytest.mark.parametrize("damage", [b"\0" * 64 + b"\n", b"\xff\n", b"[0,1,2 " + b"a" * 64 + b"\n", b"half a line\n"])
def test_a_damaged_file_of_lists_is_named(damage, tmp_path):
    (tmp_path / "opened").write_bytes(damage)
    with pytest.raises(FedtideError, match="opened: damaged"):
        three(tmp_path / "opened")
