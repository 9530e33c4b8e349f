"""Replaces personal data and secrets in captured traffic by placeholders such as `<email>`.

Found: e-mail addresses (also `a (at) b.com`), phone numbers, card numbers (Luhn), IBANs (mod 97),
also over a line break, the shapes of API keys, bearer tokens, JWTs and private keys, values named
as a password, token or key, and passwords in addresses (`://user:password@`). Not found: names,
postal addresses, numbers spelled out in words or one digit a line, anything encoded (base64) or
split over two fields. Where a check is unsure the text is redacted, not kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from capture.mirroring.personal_numbers import (
    DIGITS,
    LINE_BREAK,
    NUMBER_SEPARATORS,
    PLAIN_SHAPES,
    TRUNK_REGIONS,
    Span,
    account_numbers,
    is_card_number,
    is_international,
    is_national,
    looks_like_phone,
    wrapped_numbers,
)

PIECE_CHARS = 32 * 1024
"""Long texts are scanned in pieces that end at a line break, so that no single regular expression
holds the interpreter (and with it the engine's thread) for long."""

PHONE_CHECKS = 2000
"""Numbers validated per record; beyond that every candidate counts as a phone number."""

UNSCANNED = frozenset(
    {"schema", "request_id", "arrival", "endpoint", "fingerprint", "client", "client_key_id"}
    | {"usage", "chunks", "top"}
)
"""Fields that hold no text from a client, in a valid record; a long hex digest must not pass for a
card number."""

PROMPT_TEXTS = ("messages", "prompt", "rendered_prompt")

_INVISIBLE = r"\u00ad\u200b-\u200d\u2060\ufeff"
"""Soft hyphens and the like, which come along with text that was copied from a page."""
_ASCII_NAME = rf"A-Za-z0-9\-{_INVISIBLE}"
_ANY_NAME = rf"\w\-{_INVISIBLE}"
_EMAIL = re.compile(
    rf"(?<![{_ASCII_NAME}._+])[{_ASCII_NAME}._+]++(?:[@＠]|%40)"
    rf"(?:[{_ASCII_NAME}]++[.．])+[{_ASCII_NAME}]{{2,}}+"
)
_EMAIL_ANY_SCRIPT = re.compile(
    rf"(?<![{_ANY_NAME}.+])[{_ANY_NAME}.+]++[@＠][{_ANY_NAME}]++(?:[.．][{_ANY_NAME}]++)+"
)
_EMAIL_SIGNS = ("@", "＠", "%40")
_AT = r"\s{0,2}[(\[{<]\s?(?i:at|@)\s?[)\]}>]\s{0,2}"
_DOT = r"\s{0,2}[(\[{<]\s?(?i:dot|punkt|\.)\s?[)\]}>]\s{0,2}|\s{1,2}(?i:dot)\s{1,2}"
_EMAIL_SPELLED = re.compile(
    r"(?<![A-Za-z0-9._+\-])[A-Za-z0-9._+\-]++(?:"
    rf"(?:{_AT})(?:[A-Za-z0-9\-]++(?:\.|{_DOT}))+"
    rf"|\s{{1,2}}(?i:at)\s{{1,2}}(?:[A-Za-z0-9\-]++(?:{_DOT}))+"
    r")[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
"""`jane (at) example.com`, `jane at example dot com`; a plain `at` needs a spelled dot."""

_SPELLED_SIGNS = (
    "at)", "at]", "at}", "at>", "at )", "at ]", "@)", "@]", "@}", "@>", "@ )", " dot", "dot)",
    "dot]",
)  # fmt: skip
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_SECRET = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}+"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}+|github_pat_[A-Za-z0-9_]{20,}+|gl(?:pat|ptt|dt|rt|cbt|soat)-[A-Za-z0-9_\-]{16,}+"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_\-]{30,}+|ya29\.[A-Za-z0-9_\-]{20,}+"
    r"|xox[abeoprs]-[A-Za-z0-9\-]{10,}+|xapp-[A-Za-z0-9\-]{16,}+"
    r"|hooks\.slack\.com/services/[A-Za-z0-9/]{20,}+"
    r"|(?:hf|npm|pypi|whsec|gsk|xai|r8|shp(?:at|ca|pa|ss)|lin_api|ntn|pplx|nvapi|dckr_pat|sbp|dop_v1)"
    r"[_-][A-Za-z0-9_\-]{20,}+"
    r"|(?:dapi|SK|key-)[0-9a-f]{32}|hvs\.[A-Za-z0-9_\-]{20,}+"
    r"|SG\.[A-Za-z0-9_\-]{16,}+\.[A-Za-z0-9_\-]{16,}+|\d{8,10}:AA[A-Za-z0-9_\-]{32,}+"
    r"|eyJ[A-Za-z0-9_\-]{8,}+\.[A-Za-z0-9_\-]{8,}+(?:\.[A-Za-z0-9_\-]*+)?"
    r"|(?i:bearer)\s++[A-Za-z0-9._~+/\-]{16,}+=*+"
    r")"
)
_SECRET_SIGNS = (
    "sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_",
    "glpat-", "glptt-", "gldt-", "glrt-", "glcbt-", "glsoat-", "AKIA", "ASIA", "AIza", "ya29.",
    "xox", "xapp-", "hooks.slack", "hf_", "hf-", "npm_", "npm-", "pypi", "whsec", "gsk", "xai-",
    "xai_", "r8_", "r8-", "shpat", "shpca", "shppa", "shpss", "lin_api", "ntn_", "ntn-", "pplx",
    "nvapi", "dckr", "sbp_", "sbp-", "dop_v1", "dapi", "SK", "key-", "hvs.", "SG.", ":AA", "eyJ",
    "earer", "EARER",
)  # fmt: skip
"""One of these is in every text that `_SECRET` matches; looking for them is 50 times faster."""
_ASSIGNED = re.compile(
    r"[:=]\s{0,3}[\"']?(?:(?i:basic|bearer)\s{1,3})?"
    r"(?P<value>(?=[\w+/.~!@#$%^&*-]{0,64}\d)(?=[\w+/.~!@#$%^&*-]{0,64}[A-Za-z])"
    r"[\w+/.~!@#$%^&*-]{8,}+=*+)"
)
"""`password = hunter2xyz`: a value with letters and digits, if what stands before it names one."""
_NAMES_SECRET = re.compile(
    r"(?i:secret|token|password|passwd|pwd|passwort|key|authorization)[\"']?\s{0,3}\Z"
)
NAME_CHARS = 20
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/?#:@]{0,64}+:(?P<value>[^\s/?#@]{1,128}+)(?=@)")
"""`postgres://user:password@host`."""
_NUMBER_RUN = re.compile(rf"\d(?:[{NUMBER_SEPARATORS}]{{0,2}}\d){{6,}}+")
_NOT_BEFORE_PHONE = re.compile(r"(?:[A-Za-z0-9_]|\d[.,])\Z")
_NOT_AFTER_PHONE = re.compile(r"[A-Za-z0-9_]")

_BETWEEN_LINES = re.compile(r"[^\d\s][ \t\r]{0,2}\n(?![ \t>]{0,4}\d)")

_BEGUN = re.compile(
    rf"(?:\d(?:{LINE_BREAK}|[{NUMBER_SEPARATORS}]{{0,2}})){{6,}}\Z|[^\s@]{{1,64}}@[^\s@]{{0,255}}\Z"
    r"|(?<![A-Za-z0-9])(?:[A-Za-z0-9]{2,10}[-_]|eyJ|AKIA|ASIA|AIza|SG\.|hvs\.)"
    r"(?=[A-Za-z0-9_\-.]*\d)[A-Za-z0-9_\-.]{4,}\Z"
    r"|(?<![A-Za-z0-9])(?:[sprg]s?k|gh[oprsu]|gl[a-z]{2,4}|xox[a-z]|hf)[-_][A-Za-z0-9_\-]{4,}\Z"
)
"""A number, address or key that may be incomplete, at the end of an answer that was cut off."""
BEGUN_CHARS = 512


class Redactor:
    """Redacts one record; `counts` says how many placeholders of each kind were set."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._phone_checks = 0

    def text(self, text: str) -> str:
        """`text` with placeholders; lone surrogates, which no file can hold, become U+FFFD."""
        if not text.isascii():
            text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if "PRIVATE KEY" in text:
            text = self._replace(_PRIVATE_KEY, "secret", text)
        return "".join(self._piece(piece) for piece in _pieces(text))

    def cut_off(self, text: str) -> str:
        """An answer that ends anywhere: what its end may be the beginning of goes too."""
        text = self.text(text)
        found = _BEGUN.search(text, max(0, len(text) - BEGUN_CHARS))
        return text if found is None else self._cut_out(text, [(*found.span(), "begun")])

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it redacted, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            if all(isinstance(item, int | float) for item in value):
                return list(value)
            return [self.value(item) for item in value]
        return value

    def _piece(self, text: str) -> str:
        if any(sign in text for sign in _SECRET_SIGNS):
            text = self._replace(_SECRET, "secret", text)
        text = self._cut_out(text, list(_named_secrets(text)))
        if any(sign in text for sign in _EMAIL_SIGNS):
            found = _IN_ADDRESS.finditer(text)
            text = self._cut_out(text, [(*one.span("value"), "secret") for one in found])
            text = self._replace(_EMAIL, "email", text)
            text = self._replace(_EMAIL_ANY_SCRIPT, "email", text)
        lowered = text.lower()
        if any(sign in lowered for sign in _SPELLED_SIGNS):
            text = self._replace(_EMAIL_SPELLED, "email", text)
        text = self._cut_out(text, list(account_numbers(text)))
        runs = _NUMBER_RUN.finditer(text)
        text = self._cut_out(text, [span for run in runs for span in self._numbers(run)])
        return self._cut_out(text, list(wrapped_numbers(text)))

    def _replace(self, pattern: re.Pattern[str], kind: str, text: str) -> str:
        text, count = pattern.subn(f"<{kind}>", text)
        if count:
            self.counts[kind] += count
        return text

    def _cut_out(self, text: str, spans: list[Span]) -> str:
        if not spans:
            return text
        parts, end = [], 0
        for start, stop, kind in spans:
            parts += [text[end:start], f"<{kind}>"]
            self.counts[kind] += 1
            end = stop
        return "".join(parts) + text[end:]

    def _numbers(self, run: re.Match[str]) -> Iterator[Span]:
        """Cards and phone numbers among the digit groups of `run`, longest first, left to right."""
        text = run.string
        groups = [found.span() for found in DIGITS.finditer(text, run.start(), run.end())]
        first = 0
        while first < len(groups):
            if first and not _may_begin_number(text, groups[first]):
                first += 1
                continue
            last = _card_end(text, groups, first)
            kind = "card"
            if last is None:
                last = self._phone_end(text, groups, first)
                kind = "phone"
            if last is None:
                first += 1
                continue
            start = groups[first][0]
            if kind == "phone":
                start -= len(_phone_prefix(text, start))
            yield start, groups[last][1], kind
            first = last + 1

    def _phone_end(self, text: str, groups: list[tuple[int, int]], first: int) -> int | None:
        """The last group of the longest phone number that starts at group `first`."""
        prefix = _phone_prefix(text, groups[first][0])
        start = groups[first][0] - len(prefix)
        if _NOT_BEFORE_PHONE.search(text, max(0, start - 2), start):
            return None
        parts = [text[slice(*group)] for group in groups[first : first + 6]]
        for count in range(len(parts), 0, -1):
            last = first + count - 1
            if not looks_like_phone("+" in prefix, parts[:count]):
                continue
            if _NOT_AFTER_PHONE.match(text, groups[last][1]):
                continue
            if self._is_phone("+" in prefix, parts[:count]):
                return last
        return None

    def _is_phone(self, international: bool, parts: list[str]) -> bool:
        self._phone_checks += 1
        if self._phone_checks > PHONE_CHECKS:
            return True
        digits = "".join(parts)
        if international:
            return is_international(digits)
        if digits.startswith("00"):
            return is_international(digits[2:])
        if digits[0] == "0":
            return is_national(digits, TRUNK_REGIONS, mobile=False)
        return is_national(digits, PLAIN_SHAPES[tuple(map(len, parts))], mobile=True)


def redact_record(record: dict[str, Any]) -> dict[str, Any]:
    """A copy of a raw traffic record without personal data or secrets.

    Token ids and alternatives of a text in which something was redacted are left out, and so are
    token ids whose text is not there to be checked; each is counted in `redactions`. About 15 MB
    of prose a second. Raises on malformed records; the caller drops the content then.
    """
    redactor = Redactor()
    clean: dict[str, Any] = {}
    touched: set[str] = set()
    ended = record.get("finish_reason")
    for key, value in record.items():
        before = redactor.counts.total()
        if key in UNSCANNED:
            clean[key] = value
        elif key == "output_text" and isinstance(value, str) and ended != "stop":
            clean[key] = redactor.cut_off(value)
        else:
            clean[key] = redactor.value(value)
        if redactor.counts.total() > before:
            touched.add(key)
    counts = redactor.counts
    prompt_seen = any(record.get(key) is not None for key in PROMPT_TEXTS)
    if touched & set(PROMPT_TEXTS) or not prompt_seen:
        _leave_out(clean, counts, "prompt_token_ids")
    if "output_text" in touched or record.get("output_text") is None:
        _leave_out(clean, counts, "output_token_ids")
        _leave_out(clean, counts, "top")
    clean["redactions"] = dict(counts)
    return clean


def _may_begin_number(text: str, group: tuple[int, int]) -> bool:
    """Whether a card or phone number may begin with this group, which is not a run's first.

    A cheap test that spares the search most groups of a table of numbers.
    """
    start, stop = group
    length = stop - start
    return (
        length in (3, 4, 5)
        or length >= 9
        or text[start] == "0"
        or text[start - 1] in "+("
        or (length == 1 and text[start] == "1")
    )


def _phone_prefix(text: str, start: int) -> str:
    """The `+`, `(` or `+(` before a number's first digit."""
    before = text[max(0, start - 2) : start]
    if before == "+(":
        return before
    return before[-1:] if before[-1:] in ("+", "(") else ""


def _named_secrets(text: str) -> Iterator[Span]:
    for found in _ASSIGNED.finditer(text):
        start = found.start()
        if _NAMES_SECRET.search(text, max(0, start - NAME_CHARS), start):
            yield *found.span("value"), "secret"


def _leave_out(record: dict[str, Any], counts: Counter[str], key: str) -> None:
    if record.pop(key, None):
        counts[key] += 1


def _pieces(text: str) -> Iterator[str]:
    """Between lines, where possible not in the middle of a number that goes on in the next one."""
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        begin = start + PIECE_CHARS
        found = _BETWEEN_LINES.search(text, begin, begin + PIECE_CHARS)
        end = text.find("\n", begin) + 1 if found is None else found.end()
        if end == 0:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _card_end(text: str, groups: list[tuple[int, int]], first: int) -> int | None:
    """The last group of the card number that starts at group `first`.

    Cards are written in one group or in groups of 2 to 7 digits after a first one of four; other
    groupings count when the whole run is the number, so that tables of numbers stay readable.
    """
    digits, found = "", None
    grouped = groups[first][1] - groups[first][0] == 4
    for last in range(first, len(groups)):
        start, stop = groups[last]
        digits += text[start:stop]
        if len(digits) > 19:
            break
        grouped = grouped and 2 <= stop - start <= 7
        whole = first == 0 and last == len(groups) - 1
        if (first == last or grouped or whole) and is_card_number(digits):
            found = last
    return found
