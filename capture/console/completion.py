"""What the shell completes: the lake's tables, columns, views and macros, keywords, functions.

Read from the lake once, through the same process as the user's queries. After FROM and JOIN only
what can stand there is offered; after `name.` only that table's columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from capture.sql.query import QuerySession
from capture.views import VIEWS

_WORD = re.compile(r"[\w.]+$")
_AFTER_FROM = re.compile(r"\b(from|join|describe|summarize|table)\s+[\w.]*$", re.IGNORECASE)
_ALIAS = re.compile(r"\b(?:from|join|,)\s+(\w+)\s+(?:as\s+)?(\w+)", re.IGNORECASE)
_SQL = """
SELECT 'column' AS kind, table_name AS name, column_name AS detail
FROM duckdb_columns() WHERE database_name = 'lake'
UNION ALL SELECT 'relation', table_name, 'table' FROM duckdb_tables() WHERE database_name = 'lake'
UNION ALL SELECT 'relation', view_name, 'view' FROM duckdb_views() WHERE database_name = 'lake'
UNION ALL SELECT 'keyword', upper(keyword_name), keyword_category FROM duckdb_keywords()
    WHERE keyword_category <> 'column_name'
UNION ALL SELECT DISTINCT 'function', function_name, function_type FROM duckdb_functions()
    WHERE function_type IN ('scalar', 'aggregate', 'macro') AND database_name = 'system'
        AND regexp_full_match(function_name, '[a-z]\\w*')
"""


@dataclass(frozen=True)
class Vocabulary:
    """Names by what they are; `relations` and `macros` with a word or the parameters."""

    relations: dict[str, str] = field(default_factory=dict)
    macros: dict[str, str] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    keywords: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)


def read_vocabulary(session: QuerySession) -> Vocabulary:
    """The lake's names. Raises QueryError when they cannot be read."""
    words = Vocabulary(macros={view.name: view.parameters for view in VIEWS if view.parameters})
    with session.run(_SQL, rows=0) as reader:
        for batch in reader:
            for row in batch.to_pylist():
                kind, name, detail = row["kind"], row["name"], row["detail"]
                if kind == "column":
                    words.columns.setdefault(name, []).append(detail)
                elif kind == "relation":
                    words.relations[name] = detail
                else:
                    (words.keywords if kind == "keyword" else words.functions).append(name)
    words.keywords.sort()
    words.functions.sort()
    return words


class SqlCompleter(Completer):
    """Completes the word before the cursor."""

    def __init__(self, words: Vocabulary, commands: Iterable[str]) -> None:
        self._words = words
        self._commands = sorted(commands)

    def get_completions(self, document: Document, _: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor
        if before.startswith(".") and " " not in before:
            yield from self._matching(before, dict.fromkeys(self._commands, "command"))
            return
        found = _WORD.search(before)
        word = found[0] if found else ""
        if before.startswith(".schema "):
            yield from self._matching(word, {**self._words.relations, **self._words.macros})
        elif "." in word:
            owner, _dot, start = word.rpartition(".")
            yield from self._matching(start, self._columns_of(owner, document.text))
        elif _AFTER_FROM.search(before):
            yield from self._matching(word, self._words.relations)
            yield from self._matching(word, self._words.macros, after="(")
        elif word:
            yield from self._matching(word, self._known(document.text))

    def _known(self, text: str) -> dict[str, str]:
        """All that can stand in an expression, the columns of the query's tables first."""
        named = [name for name in self._words.columns if re.search(rf"\b{name}\b", text)]
        found: dict[str, str] = {}
        for table in named or self._words.columns:
            for column in self._words.columns[table]:
                found.setdefault(column, table)
        for names, what in (
            (self._words.relations, "table"),
            (self._words.macros, "macro"),
            (self._words.keywords, "keyword"),
            (self._words.functions, "function"),
        ):
            for name in names:
                found.setdefault(name, what)
        return found

    def _columns_of(self, owner: str, text: str) -> dict[str, str]:
        aliases = {alias.lower(): table for table, alias in _ALIAS.findall(text)}
        table = aliases.get(owner.lower(), owner.lower())
        return dict.fromkeys(self._words.columns.get(table, ()), table)

    @staticmethod
    def _matching(start: str, names: dict[str, str], after: str = "") -> Iterator[Completion]:
        lower = start.lower()
        for name, what in names.items():
            if name.lower().startswith(lower):
                written = name.lower() if name.isupper() and start.islower() else name
                yield Completion(written + after, -len(start), display=name, display_meta=what)
