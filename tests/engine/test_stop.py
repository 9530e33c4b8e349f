"""Stop strings: found across pieces, never shown, and the same however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.stop import StopMatcher

LETTERS = st.text("ab\n", min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.finish()], None


@given(st.lists(LETTERS, max_size=12), st.lists(LETTERS, max_size=4))
def test_result_does_not_depend_on_where_pieces_end(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    by_piece, found = run(pieces, stops)
    at_once, found_at_once = run([text], stops)
    by_character, found_by_character = run(list(text), stops)
    assert "".join(by_piece) == "".join(at_once) == "".join(by_character)
    assert found == found_at_once == found_by_character


@given(st.lists(LETTERS, max_size=12), st.lists(LETTERS, min_size=1, max_size=4))
def test_no_stop_string_is_ever_shown(pieces: list[str], stops: list[str]) -> None:
    shown, found = run(pieces, stops)
    text = "".join(shown)
    assert "".join(pieces).startswith(text)
    if found is None:
        assert text == "".join(pieces)
    assert all(stop not in text for stop in stops)


def test_stop_string_over_three_pieces() -> None:
    assert run(["one <e", "n", "d> two"], ["<end>"]) == (["one ", "", ""], "<end>")


def test_what_only_began_like_a_stop_string_is_shown() -> None:
    assert run(["one <e", "lse>"], ["<end>"]) == (["one ", "<else>", ""], None)


def test_of_overlapping_stops_the_first_complete_one_counts() -> None:
    assert run(["xab", "c"], ["abc", "b"]) == (["xa"], "b")
