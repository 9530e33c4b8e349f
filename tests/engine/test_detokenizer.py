"""Text comes out of tokens whole: no split character, nothing lost, nothing twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer


class Pieces:
    """A vocabulary made of the pieces themselves."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


@st.composite
def split_bytes(draw: st.DrawFn) -> list[bytes]:
    """Valid UTF-8, damaged UTF-8 or noise, cut anywhere (empty pieces are control tokens)."""
    text = draw(st.text(max_size=30)).encode()
    data = draw(st.one_of(st.just(text), st.binary(max_size=40), st.just(text[:-1])))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(split_bytes())
def test_pieces_joined_equal_the_whole_decoding(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(Pieces(pieces))
    chunks = [detokenizer.feed(i) for i in range(len(pieces))] + [detokenizer.finish()]
    assert "".join(chunks) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(min_size=1, max_size=20))
def test_no_piece_shows_a_replacement_character_for_valid_text(text: str) -> None:
    pieces = [bytes([byte]) for byte in text.encode()]
    detokenizer = Detokenizer(Pieces(pieces))
    chunks = [detokenizer.feed(i) for i in range(len(pieces))]
    assert "".join(chunks) == text
    assert detokenizer.finish() == ""


def test_answer_cut_inside_a_character_keeps_its_text() -> None:
    pieces = [b"abc", b"def\xf0\x9f"]
    detokenizer = Detokenizer(Pieces(pieces))
    assert [detokenizer.feed(0), detokenizer.feed(1)] == ["abc", "def"]
    assert detokenizer.finish() == "�"
