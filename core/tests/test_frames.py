from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire import frames
from weightwire.errors import PayloadTooLarge
from weightwire.frames import MAX_FRAME, Decoder, FrameError, decode, encode

_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.text())


@given(
    sent=st.lists(st.dictionaries(st.text(), _VALUES, max_size=3), max_size=4),
    cuts=st.lists(st.integers(1, 40), max_size=30),
)
def test_frames_come_back_however_the_stream_is_cut(sent: list[dict[str, Any]], cuts: list[int]) -> None:
    stream = b"".join(encode(frame) for frame in sent)
    decoder, found = Decoder(MAX_FRAME), []
    for size in [*cuts, len(stream)]:
        found += list(decoder.feed(stream[:size]))
        stream = stream[size:]
    assert found == sent
    assert [decode(encode(frame)) for frame in sent] == sent


@given(st.binary(max_size=200))
def test_junk_is_a_frame_error_or_waits_for_more(junk: bytes) -> None:
    try:
        for frame in Decoder(64).feed(junk):
            assert isinstance(frame, dict)
    except FrameError:
        pass


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe\x00", b"[1]", b"1" * 60, b"[" * 60_000, b'{"a":' * 20_000])
def test_what_is_no_json_object_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError, match="a frame that is not"):
        list(Decoder(MAX_FRAME).feed(struct.pack(">I", len(body)) + body))


def test_a_frame_over_the_limit_is_refused_before_its_body_is_there() -> None:
    decoder = Decoder(100)
    with pytest.raises(FrameError, match="a frame of 101 bytes where 100 are allowed"):
        list(decoder.feed(struct.pack(">I", 101)))
    body = json.dumps({"a": "x" * 92}).encode()
    assert len(body) == 101
    accepted = Decoder(100)
    (frame,) = accepted.feed(struct.pack(">I", 100) + body[:-3] + b'"}')
    assert frame == {"a": "x" * 91}
    accepted.limit = 101
    assert list(accepted.feed(struct.pack(">I", 101) + body)) == [{"a": "x" * 92}]


def test_a_frame_too_long_to_send_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 1 << 20)
    with pytest.raises(PayloadTooLarge, match="over the 1 MiB"):
        encode({"a": "x" * (1 << 20)})
