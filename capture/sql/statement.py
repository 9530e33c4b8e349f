"""Which SQL a user may run: one statement that reads, and nothing but the lake's own tables.

Judged on DuckDB's own parse tree, so that quoting, comments and nesting hide nothing, and by what
is allowed, so that a function nobody thought of is refused. The first of three walls: the second
are DuckDB's settings (`query_process`), the third the kernel's rules (`sandbox`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from capture.errors import QueryError, first_line
from capture.lake import escaped
from capture.views import VIEWS

if TYPE_CHECKING:
    import duckdb

_BLANK = r"(?:\s|/\*.*?\*/|--[^\n]*\n)"
_EXPLAIN = re.compile(
    r"\s*explain\b\s*(?:analyze\b|\([\w\s,]*\))?\s*(?=[a-z(])", re.IGNORECASE | re.ASCII
)
_EXPANDED = re.compile(rf"{_BLANK}*(pragma|import)\b", re.IGNORECASE | re.DOTALL)
_PIVOT = re.compile(r"\bpivot\b", re.IGNORECASE)
_CARET = re.compile(r"^LINE (\d+): (.*)\n( *)\^", re.MULTILINE)
_SUGGESTION = re.compile(r"^(?:Did you mean|Candidate (bindings|macros):[\s:]*)(.+)", re.MULTILINE)
_ABSENT = re.compile(r"Table with name (\w+) does not exist")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

TABLE_FUNCTIONS = frozenset(
    (
        "duckdb_columns",
        "duckdb_databases",
        "duckdb_functions",
        "duckdb_keywords",
        "duckdb_memory",
        "duckdb_schemas",
        "duckdb_settings",
        "duckdb_tables",
        "duckdb_types",
        "duckdb_views",
        "ducklake_list_files",
        "ducklake_snapshots",
        "ducklake_table_changes",
        "ducklake_table_deletions",
        "ducklake_table_info",
        "ducklake_table_insertions",
        "generate_series",
        "json_each",
        "json_tree",
        "pg_timezone_names",
        "pragma_version",
        "range",
        "repeat",
        "repeat_row",
        "unnest",
    )
)
"""Those that read no file and no table that is named by text, besides the lake's own macros."""
MACROS = frozenset(view.name for view in VIEWS if view.parameters is not None)
REFUSED_FUNCTIONS = frozenset(
    ("getenv", "json_execute_serialized_sql", "nextval", "query", "query_table", "write_log")
)


class Place(NamedTuple):
    """Where in a query: from 1."""

    line: int
    column: int


def check_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise QueryError unless `sql` is one statement that reads the lake."""
    import duckdb

    expanded = _EXPANDED.match(sql)  # parsing turns it into what it stands for
    if expanded is not None:
        raise QueryError(f"{expanded[1].upper()} is refused: use DESCRIBE, SHOW TABLES or SELECT")
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise query_error(error, sql) from None
    if not statements:
        raise QueryError('there is no query: write one, such as  inferloop sql "FROM engines"')
    if len(statements) > 1:
        if _PIVOT.search(sql):
            raise QueryError("name the values to pivot on: PIVOT ... ON column IN ('a', 'b')")
        raise QueryError(f"one statement at a time, not {len(statements)}")
    kind = statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        explain = _EXPLAIN.match(sql)
        if explain is None:  # comments nest and may end elsewhere than it seems
            raise QueryError("write EXPLAIN or EXPLAIN ANALYZE first and then the query")
        check_statement(connection, sql[explain.end() :])
    elif kind == duckdb.StatementType.SELECT:
        _check_tree(_tree(connection, sql))
    else:
        raise QueryError(f"the trace lake is read-only here: {kind.name} is refused, use SELECT")


def query_error(error: duckdb.Error, sql: str) -> QueryError:
    """A DuckDB error in one line, with its place in the query when DuckDB says where."""
    place = error_place(str(error), sql)
    where = f" (line {place.line}, column {place.column})" if place is not None else ""
    return QueryError(first_line(error) + where + _suggestion(str(error)), place)


def _suggestion(message: str) -> str:
    """What DuckDB has found near a wrong name; of a macro that lacks its arguments, these."""
    said = message.partition("\nLINE ")[0]
    absent = _ABSENT.search(said)
    for view in VIEWS:
        if absent is not None and view.parameters and view.name == absent[1].lower():
            return f"; it is a macro: {view.name}({view.parameters})"
    found = _SUGGESTION.search(said)
    if found is None:
        return ""
    names = _CONTROL.sub(" ", found[2]).replace('"', "").strip()[:200]
    if found[1] is None:
        return f"; did you mean {names}"
    return f"; {'there are' if found[1] == 'bindings' else 'it is'} {names}"


def error_place(message: str, sql: str) -> Place | None:
    """Where DuckDB's caret points; of a long line it shows a part between dots only."""
    found = _CARET.search(message)
    if found is None:
        return None
    number, shown = int(found[1]), found[2]
    lines = sql.split("\n")
    if number > len(lines):
        return None
    column = len(found[3]) - len(f"LINE {number}: ")
    if shown.startswith("..."):
        start = lines[number - 1].find(shown.removeprefix("...").removesuffix("..."))
        column += start - len("...") if start >= 0 else 0
    return Place(number, max(column, 0) + 1)


def _tree(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    # Not as a parameter: the first one of a process has DuckDB import pandas.
    answer = connection.execute(f"SELECT json_serialize_sql('{escaped(sql)}')").fetchone()
    (text,) = answer or ("{}",)
    try:
        tree = json.loads(text)
    except RecursionError:
        raise QueryError("the query is nested too deeply") from None
    if tree.get("error", True):
        raise QueryError(f"the query is refused: {tree.get('error_message', 'it does not parse')}")
    return tree


def _check_tree(tree: Any) -> None:
    for node in _nodes(tree):
        kind = node.get("type")
        if kind == "TABLE_FUNCTION":
            name = str(node.get("function", {}).get("function_name", "")).lower()
            if name not in TABLE_FUNCTIONS and name not in MACROS:
                raise QueryError(f"{name} is refused: only the lake can be read here")
        elif kind == "BASE_TABLE":
            for part in ("catalog_name", "schema_name"):
                if str(node.get(part, "")).lower().startswith("__ducklake"):
                    raise QueryError("the catalog's own tables are refused: use ducklake_snapshots")
        name = str(node.get("function_name", "")).lower()
        if name in REFUSED_FUNCTIONS:
            raise QueryError(f"{name}() is refused: only the lake can be read here")


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value, without recursion."""
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
