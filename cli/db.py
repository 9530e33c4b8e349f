"""`inferloop db`: create and migrate the relational database."""

from __future__ import annotations

import typer

from cli.main import app

db_app = typer.Typer(
    no_args_is_help=True,
    help="Create and migrate the relational database.\n\nExample: inferloop db upgrade",
)
app.add_typer(db_app, name="db")


@db_app.command()
def upgrade() -> None:
    """Bring the database to the newest schema, creating it when there is none.

    Example: INFERLOOP_DATABASE_URL=postgresql+psycopg://me@db/inferloop inferloop db upgrade
    """
    import migrations
    from capture.settings import Settings
    from replay.database import shown

    url = Settings().database
    before = migrations.current(url)
    migrations.upgrade(url)
    after = migrations.head()
    state = f"is at revision {after}" if before == after else f"upgraded to revision {after}"
    typer.echo(f"{shown(url)} {state}")


@db_app.command()
def current() -> None:
    """Print the database's revision and the newest one. Exits with 1 when they differ.

    Example: inferloop db current
    """
    import migrations
    from capture.settings import Settings
    from replay.database import shown

    url = Settings().database
    found, newest = migrations.current(url), migrations.head()
    typer.echo(f"{shown(url)} revision {found or 'none'}, newest {newest}")
    if found != newest:
        typer.echo("run `inferloop db upgrade`", err=True)
        raise typer.Exit(1)
