"""Personal data and secrets are found, ordinary text is left alone."""

from __future__ import annotations

import random
import string
import time
from collections.abc import Iterator

import phonenumbers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.mirroring.personal_numbers import is_card_number, is_iban
from capture.mirroring.redaction import PIECE_CHARS, Redactor, redact_record
from capture.mirroring.truncation import truncate_record

FOUND = [
    ("write to jane.doe+x@mail.example.com.", "write to <email>."),
    ("请联系jane@example.com谢谢", "请联系<email>谢谢"),
    ("用户@例子.广告", "<email>"),
    ("mailto:jane.doe%40example.com", "mailto:<email>"),
    ("call +1 (415) 555-2671 now", "call <phone> now"),
    ("(415) 555-2671", "<phone>"),
    ("Tel. 030 1234567 or 0171/1234567", "Tel. <phone> or <phone>"),
    ("打13812345678，谢谢", "打<phone>，谢谢"),
    ("１３８１２３４５６７８", "<phone>"),
    ("0033 1 42 68 53 00", "<phone>"),
    ("pay 4111 1111 1111 1111 today", "pay <card> today"),
    ("12 4111-1111-1111-1111 33", "12 <card> 33"),
    ("378282246310005", "<card>"),
    ("4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1", "<card>"),
    ("DE89 3704 0044 0532 0130 00 AND MORE", "<iban> AND MORE"),
    ("GB82WEST12345698765432", "<iban>"),
    ("key=sk-proj-abcdefghijklmnop1234", "key=<secret>"),
    ("ghp_0123456789abcdefghijABCDEFGHIJklmnop", "<secret>"),
    ("AKIAIOSFODNN7EXAMPLE", "<secret>"),
    ("Authorization: Bearer abcdef.ghijkl-mnopqrstu==", "Authorization: <secret>"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "<secret>"),
    (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nrest",
        "<secret>\nrest",
    ),
    ("4111\u20131111\u20131111\u20131111, 4111\u202f1111\u202f1111\u202f1111", "<card>, <card>"),
    ("4111\u200b1111\u200b1111\u200b1111", "<card>"),
    ("\u0664\u0661\u0661\u0661\u0661\u0661\u0661\u0661" + "\u0661" * 8, "<card>"),
    ("+1 (415) 555\u20112671, 415\u2013555\u20132671", "<phone>, <phone>"),
    ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQ\n-----END PGP PRIVATE KEY BLOCK-----", "<secret>"),
    (
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "aws_secret_access_key = <secret>",
    ),
    ('{"password": "hunter2xyz"}', '{"password": "<secret>"}'),
    ("AccountKey=abcdefgh1jkl+/mnop==;Endpoint", "AccountKey=<secret>;Endpoint"),
    ("Authorization: Basic dXNlcjpwYXNzd29yZDEyMw==", "Authorization: Basic <secret>"),
    ("BEARER abcdefghijklmnop1234", "<secret>"),
    ("SG.ngeVfQFYQlKU0ufo8x5d1A.TwL2iGABf9DHoTf-09kqeF8tAmbi", "<secret>"),
    ("123456789:AA" + "HdqTcvCH1vGWJxfSeofSAs0K5PALDsaw", "<secret>"),
    ("https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXX", "https://<secret>"),
    ("pay 4111 1111\n1111 1111 today", "pay <card> today"),
    ("pay 4111-1111-\r\n  1111-1111", "pay <card>"),
    ("> 5555 5555\n> 5555 4444 or 3782 822463\n10005", "> <card> or <card>"),
    ("call +49 30\n1234567 now", "call <phone> now"),
    ("DE89 3704 0044\n0532 0130 00", "<iban>"),
    ("jane.doe (at) example.com", "<email>"),
    ("jane.doe [at] mail [dot] example [dot] com!", "<email>!"),
    ("jane{AT}example.org, jane <at> example.org", "<email>, <email>"),
    ("reach jane at example dot com.", "reach <email>."),
    ("jane (@) example.com", "<email>"),
    ("jane.\u200bdoe@exam\u00adple.com, jane＠example．com", "<email>, <email>"),
    ("postgres://me:s3cret!@db:5432/x", "postgres://me:<secret>@db:5432/x"),
    ("https://u:p@a.example.com/", "https://u:<secret>@a.example.com/"),
    ("pwd=Passw0rd!1", "pwd=<secret>"),
    ("iban de89370400440532013000.", "iban <iban>."),
    (
        "DE89-3704-0044-0532-0130-00, GB82\u00a0WEST\u00a01234\u00a05698\u00a07654\u00a032",
        "<iban>, <iban>",
    ),
    *(
        (f"{prefix}{'0123456789abcdef' * 2}", "<secret>")
        for prefix in (
            *("whsec_", "gsk_", "xai-", "r8_", "hvs.", "dop_v1_", "shpat_", "dapi", "key-", "SK"),
            *("lin_api_", "ntn_", "pplx-", "nvapi-", "dckr_pat_", "sbp_", "glptt-", "xapp-"),
        )
    ),
]

KEPT = [
    "3333+777=? 价格：￥1,234.50；“引号”（括号）",
    "2026-11-29 14:28:42, epoch 1764426522, 123,456,789.00",
    "pi is 3.14159265358979323846",
    "version 1.2.3.4, 192.168.1.1, build 20261129",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "order 8812345 of 4111 1111 1111 1112",
    "the risk-free task-based disk-usage approach, user @ home",
    "4111111111111111111111111111",
    "in 1984 and 2026 it cost 12.50 each, rooms 100-2000",
    "the token = next_token[17], max_tokens=128, token_ids: 1234567890ab, password: must be 8 long",
    "basic understanding; api_key=os.environ['OPENAI_API_KEY2']; key-value store; worship",
    "look at example.com (at least once), meet me at noon; a dot com company at large",
    "values[at].size, x @ w.T, f(at)(b), (at) the end. com",
    "2021 2022\n2023 2024\n2025 2026",
    "1200\n4500\n5100\n3900\n4111\n2300\n5500\n6400\n4000",
    "4111 1111 1111\n\n1112 4111",
    "@@ -1,7 +1,7 @@\n+12\n+3456789",
    "12.50\n4111.10\n1111.25\n1111.00",
    "commit de89370400440532013000aa, http://localhost:8000/a@b, 12:30@noon",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 हिन्दी ไทย 한국어",
]


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_personal_data_is_replaced(text: str, expected: str) -> None:
    assert Redactor().text(text) == expected


@pytest.mark.parametrize("text", KEPT)
def test_ordinary_text_is_untouched(text: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) == text
    assert not redactor.counts


@given(
    st.text(max_size=80),
    st.sampled_from(["a.b@example.org", "4111 1111 1111 1111", "sk-aaaaaaaaaaaaaaaaaaaa"]),
    st.text(max_size=80),
)
def test_nothing_around_a_secret_hides_it(before: str, secret: str, after: str) -> None:
    assert secret not in Redactor().text(f"{before} {secret} {after}")


@given(st.text(alphabet=string.printable + "价￥🙂é", max_size=200))
def test_redacting_again_changes_nothing(text: str) -> None:
    once = Redactor().text(text)
    assert Redactor().text(once) == once


@pytest.mark.parametrize(
    "text",
    ["a@a." * 100_000, "x@" + "a-" * 200_000, "1 2 3 4 5 " * 20_000, "+1" * 200_000,
     ": " * 100_000, "token=" * 50_000, "key=" + "a1" * 100_000, "%40a." * 100_000,
     "4111\n" * 100_000, "12 34\n5 " * 50_000, "a at b dot " * 50_000, "a (at) b." * 50_000,
     "AB12\nCD34 " * 50_000, "-----BEGIN PRIVATE KEY-----" * 20_000, "eyJ" * 200_000,
     "://a:" * 100_000 + "@", "de89" * 100_000, "DE89-" * 100_000],
)  # fmt: skip
def test_hostile_text_takes_linear_time(text: str) -> None:
    started = time.thread_time()
    Redactor().text(text)
    assert time.thread_time() - started < 5


@given(st.integers(-40, 40))
def test_a_number_is_found_wherever_a_long_text_is_cut_to_pieces(shift: int) -> None:
    filler = "words of a line\n" * ((PIECE_CHARS + shift) // 16) + "x" * (shift % 16)
    text = filler + "card 4111 1111\n1111 1111 end\n" + "more lines\n" * 10_000
    assert "1111" not in Redactor().text(text)


def test_half_a_number_over_a_line_break_goes_with_a_cut() -> None:
    text = "card 4111 1111\n1111 1111 and more"
    for limit in range(1, len(text)):
        clean = redact_record(truncate_record({"prompt": text}, limit))["prompt"]
        assert "4111" not in clean
        assert (
            "4111" not in redact_record({"output_text": text[:limit]})["output_text"] or limit < 14
        )


def test_token_ids_go_with_the_text_they_reveal() -> None:
    record = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "I am a@b.example"}]}],
        "prompt_token_ids": [1, 2, 3],
        "rendered_prompt": "<user>I am a@b.example",
        "output_text": "hello",
        "output_token_ids": [4],
    }
    clean = redact_record(record)
    assert clean["messages"][0]["content"][0]["text"] == "I am <email>"
    assert "prompt_token_ids" not in clean
    assert clean["output_token_ids"] == [4]
    assert clean["redactions"] == {"email": 2, "prompt_token_ids": 1}


def test_an_answer_with_personal_data_loses_its_tokens_and_alternatives() -> None:
    record = {
        "prompt": "who?",
        "prompt_token_ids": [1],
        "output_text": "call +49 30 1234567",
        "output_token_ids": [4, 5],
        "top": [{"position": 0, "token_ids": [4], "logprobs": [-0.1]}],
        "margins": [0.5, 0.1],
    }
    clean = redact_record(record)
    assert clean["output_text"] == "call <phone>"
    assert "output_token_ids" not in clean
    assert "top" not in clean
    assert clean["prompt_token_ids"] == [1]
    assert clean["redactions"] == {"phone": 1, "output_token_ids": 1, "top": 1}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("pay 4111 1111 11", "pay <begun>"),
        ("write to jane.doe@exam", "write to <begun>"),
        ("use sk-proj-abcd", "use <begun>"),
        ("use dop_v1_12ab", "use <begun>"),
        ("use ghp_0123456", "use <begun>"),
        ("in 2026", "in 2026"),
        ("a well-known end", "a well-known end"),
    ],
)
def test_half_a_secret_at_the_end_of_a_cut_answer_goes(text: str, kept: str) -> None:
    for reason in ("length", None, "abort"):
        record = {"output_text": text, "output_token_ids": [1], "finish_reason": reason}
        clean = redact_record(record)
        assert clean["output_text"] == kept
        assert ("output_token_ids" in clean) == (kept == text)
    complete = redact_record({"output_text": text, "finish_reason": "stop"})
    assert complete["output_text"] == text


def test_token_ids_without_their_text_are_not_kept() -> None:
    clean = redact_record({"prompt_token_ids": [1, 2], "output_token_ids": [3]})
    assert "prompt_token_ids" not in clean
    assert "output_token_ids" not in clean


def test_tool_arguments_keys_and_tenants_are_redacted_too() -> None:
    record = {
        "messages": [{"tool_calls": [{"function": {"arguments": '{"to": "a@b.example"}'}}],
                      "a@b.example": ["x", 3, "c@d.example"]}],
        "tenant": "jane@corp.example",
        "request_id": "4111111111111111" * 2,
    }  # fmt: skip
    clean = redact_record(record)
    assert "@" not in str(clean)
    assert clean["request_id"] == record["request_id"]


@given(st.integers(min_value=1, max_value=120))
def test_a_cut_never_leaves_part_of_a_number_or_address(limit: int) -> None:
    text = "x " * 20 + "card 4111 1111 1111 1111 and jane.doe@example.com end"
    cut = truncate_record({"prompt": text, "prompt_token_ids": [1]}, limit)
    clean = redact_record(cut)["prompt"]
    assert "4111" not in clean
    assert "jane" not in clean
    assert len(clean) <= len(text)
    assert ("prompt_token_ids" in cut) == (limit >= len(text))


def test_checksums() -> None:
    assert is_card_number("5555555555554444")
    assert not is_card_number("5555555555554445")
    assert is_iban("FR1420041010050500013M02606")
    assert not is_iban("FR1420041010050500013M02607")


def found_share(kind: int, style: int) -> float:
    """Share of the world's regions whose example number, written in that style, is found."""
    samples = [
        phonenumbers.example_number_for_type(r, kind) for r in phonenumbers.SUPPORTED_REGIONS
    ]
    texts = [phonenumbers.format_number(number, style) for number in samples if number is not None]
    return sum("<phone>" in Redactor().text(f"call {text} now") for text in texts) / len(texts)


def test_recall_is_what_the_documentation_says() -> None:
    """docs/traffic.md states it: telephone numbers of all regions, cards of all schemes."""
    style = phonenumbers.PhoneNumberFormat
    for kind in (phonenumbers.PhoneNumberType.MOBILE, phonenumbers.PhoneNumberType.FIXED_LINE):
        assert found_share(kind, style.E164) > 0.98
        assert found_share(kind, style.INTERNATIONAL) > 0.98
        assert found_share(kind, style.NATIONAL) > 0.35
    draw = random.Random(1)
    for prefix, length in (
        ("4", 16),
        ("53", 16),
        ("37", 15),
        ("6011", 16),
        ("35", 16),
        ("2221", 16),
    ):
        for separator in ("", " ", "-", "\n"):
            number = next(filter(is_card_number, card_numbers(draw, prefix, length)))
            groups = [number[:4], number[4:10], number[10:]] if length == 15 else (
                [number[i : i + 4] for i in range(0, length, 4)]
            )  # fmt: skip
            assert (
                Redactor().text(f"card {separator.join(groups)}, thanks") == "card <card>, thanks"
            )


def card_numbers(draw: random.Random, prefix: str, length: int) -> Iterator[str]:
    while True:
        yield prefix + "".join(draw.choices(string.digits, k=length - len(prefix)))
