"""Telephone, card and account numbers: how they are written, and the checks that tell them apart.

Not for replacing them in texts: that is `capture.mirroring.redaction`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

Span = tuple[int, int, str]
"""Start, stop and kind of something to hide."""

TRUNK_REGIONS = ("GB", "DE", "FR", "JP", "IN")
"""Where national numbers are dialled with a leading zero."""

PLAIN_SHAPES = {
    (3, 3, 4): ("US",),
    (1, 3, 3, 4): ("US",),
    (10,): ("US", "IN"),
    (5, 5): ("IN",),
    (3, 4, 4): ("CN",),
    (11,): ("CN", "US"),
}
"""Lengths of the digit groups in which numbers without a leading zero are written, and where."""

NUMBER_SEPARATORS = r" \-./()\u00a0\u2000-\u200d\u2010-\u2015\u202f\u205f\u2060\u2212\u3000\ufeff"
"""What stands between the digits of one number, as part of a character class: also the dashes and
spaces that word processors put there, and invisible characters."""
LINE_BREAK = rf"[\t{NUMBER_SEPARATORS}]{{0,2}}\r?\n[ \t>]{{0,4}}"
"""A line break within a number, with the indent or quote mark of the next line."""

DIGITS = re.compile(r"\d+")
_IBAN = re.compile(
    rf"[A-Z]{{2}}\d{{2}}(?:(?:[ \-\u00a0\u202f]|{LINE_BREAK})?[A-Z0-9]){{11,40}}+"
    r"|(?<![A-Za-z0-9])[a-z]{2}\d{2}[a-z0-9]{11,30}+(?![A-Za-z0-9])"
)
_WRAPPED_RUN = re.compile(rf"\d(?:(?:[{NUMBER_SEPARATORS}]{{0,2}}|{LINE_BREAK})\d){{6,}}+")
_LINE_WITH_DIGIT = re.compile(r"\n[ \t>]{0,4}\d")

WRAPPED_GROUPS = 8
"""A run of more digit groups over several lines is a table: only as a whole it may be a number."""

_CARD_SCHEMES = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|3[47]\d{13}"
    r"|(?:5[1-5]|6[045]|35|222[1-9]|22[3-9]|2[3-6]|27[01]|2720)\d+"
)
"""How the numbers of the large card schemes begin."""


def looks_like_phone(international: bool, parts: list[str]) -> bool:
    """Whether digit groups are written as people write phone numbers.

    International (after a +, or 00): 8 to 15 digits. With a trunk zero: 9 to 12 digits in at most
    five groups. Otherwise the groups of PLAIN_SHAPES. Seven-digit local numbers are left alone:
    nothing tells them from other numbers.
    """
    digits = sum(map(len, parts))
    if international or parts[0].startswith("00"):
        return 8 <= digits <= 17
    if parts[0][0] == "0":
        return 9 <= digits <= 12 and len(parts) <= 5
    return tuple(map(len, parts)) in PLAIN_SHAPES


@lru_cache(maxsize=4096)
def is_international(digits: str) -> bool:
    import phonenumbers

    try:
        return bool(phonenumbers.is_possible_number(phonenumbers.parse(f"+{digits}")))
    except phonenumbers.NumberParseException:
        return False


@lru_cache(maxsize=4096)
def is_national(digits: str, regions: tuple[str, ...], *, mobile: bool) -> bool:
    """Whether this is a number (when `mobile`, one that may be a mobile's) of one of `regions`."""
    import phonenumbers

    mobiles = (
        phonenumbers.PhoneNumberType.MOBILE,
        phonenumbers.PhoneNumberType.FIXED_LINE_OR_MOBILE,
    )
    for region in regions:
        try:
            number = phonenumbers.parse(digits, region)
        except phonenumbers.NumberParseException:
            continue
        if not phonenumbers.is_valid_number_for_region(number, region):
            continue
        if not mobile or phonenumbers.number_type(number) in mobiles:
            return True
    return False


def is_card_number(digits: str) -> bool:
    """13 to 19 decimal digits that begin like a payment card and pass the Luhn check (ISO 7812)."""
    if not 13 <= len(digits) <= 19 or int(digits[0]) not in (2, 3, 4, 5, 6):
        return False
    values = [int(digit) for digit in digits[::-1]]
    doubled = sum(value * 2 - 9 if value > 4 else value * 2 for value in values[1::2])
    return (sum(values[::2]) + doubled) % 10 == 0


def is_iban(text: str) -> bool:
    """Whether `text` (no spaces) is an account number of ISO 13616: remainder 1 modulo 97."""
    if not 15 <= len(text) <= 34:
        return False
    rotated = text[4:] + text[:4]
    return int("".join(str(int(character, 36)) for character in rotated)) % 97 == 1


def account_numbers(text: str) -> Iterator[Span]:
    """IBANs, also over a line break: of each run the longest beginning, as words in capitals may
    follow."""
    for run in _IBAN.finditer(text):
        start = run.start()
        if text[start - 1 : start].isalnum():
            continue
        is_small = text[start].islower()  # as most other identifiers: the whole of it or nothing
        for end in (run.end(),) if is_small else range(run.end(), start + 14, -1):
            if not text[end - 1].isspace() and is_iban(re.sub(r"[\s>\-]", "", text[start:end])):
                yield start, end, "iban"
                break


def wrapped_numbers(text: str) -> Iterator[Span]:
    """Card numbers, and telephone numbers after a +, that go on in the next line.

    Stricter than within a line: columns of numbers must not pass for them.
    """
    if not any(_ends_in_digit(text, found.start()) for found in _LINE_WITH_DIGIT.finditer(text)):
        return  # spares most texts the longer search
    for run in _WRAPPED_RUN.finditer(text):
        if "\n" in run.group():
            yield from _wrapped_in(text, [m.span() for m in DIGITS.finditer(text, *run.span())])


def _ends_in_digit(text: str, end: int) -> bool:
    return any(map(str.isdigit, text[max(0, end - 4) : end]))


def _wrapped_in(text: str, groups: list[tuple[int, int]]) -> Iterator[Span]:
    count = len(groups)
    first = 0
    while first < (count if count <= WRAPPED_GROUPS else 1):
        lasts = range(count - 1, first, -1) if count <= WRAPPED_GROUPS else [count - 1]
        for last in lasts:
            kind = _wrapped_kind(text, groups[first : last + 1])
            if kind is not None:
                yield groups[first][0] - (kind == "phone"), groups[last][1], kind
                first = last
                break
        first += 1


def _wrapped_kind(text: str, groups: list[tuple[int, int]]) -> str | None:
    start, stop = groups[0][0], groups[-1][1]
    if "\n" not in text[start:stop]:
        return None
    parts = [text[slice(*group)] for group in groups]
    digits = "".join(parts)
    if min(map(len, parts)) >= 2 and _CARD_SCHEMES.fullmatch(digits) and is_card_number(digits):
        return "card"
    if text[start - 1 : start] == "+" and 8 <= len(digits) <= 15 and is_assigned(digits):
        return "phone"
    return None


@lru_cache(maxsize=4096)
def is_assigned(digits: str) -> bool:
    """Whether an international number (without its +) is of a form that is given to somebody."""
    import phonenumbers

    try:
        return bool(phonenumbers.is_valid_number(phonenumbers.parse(f"+{digits}")))
    except phonenumbers.NumberParseException:
        return False
