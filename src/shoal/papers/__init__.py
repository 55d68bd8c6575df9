"""Every table and figure of the papers as an experiment: published figures, and the runs to compare with them.

One file a paper (`thesis_tables`, `geyer_tables`, ...) maps figures to runs; the published figures are in
`published/*.toml`. `beyond_tables` has two tables of our own.
"""

from __future__ import annotations

from functools import cache

from shoal.errors import ConfigError, nearest
from shoal.papers.table import Cell, Table


@cache
def tables() -> dict[str, Table]:
    """All tables and figures by name, in the order of the papers."""
    from shoal.papers import beyond_tables, geyer_tables, pfl_tables, thesis_tables, wei_tables

    found = [
        table
        for paper in (thesis_tables, geyer_tables, pfl_tables, wei_tables, beyond_tables)
        for table in paper.tables()
    ]
    return {table.name: table for table in found}


def table(name: str) -> Table:
    """Find a table or figure.

    Args:
        name: For example `geyer-table1`.

    Raises:
        ConfigError: Where there is none of that name.
    """
    if name not in tables():
        raise ConfigError(f"no table or figure is called '{name}'{nearest(name, tables())}")
    return tables()[name]


__all__ = ["Cell", "Table", "table", "tables"]
