"""The paper's tables and figures, each beside this machine's numbers: drawn from records, needs no torch.

    tables("table2")                                  # measured on the embedded demo model
    tables("table2", records=["ablation.json"])       # drawn from a record
    stored_tables(out="docs/tables")                  # every record of docs/results/tables

One module a table or figure; `registry` knows them all.
"""

from workbench.report.tables.drawn import Drawn, Entry
from workbench.report.tables.files import Tables, draw, stored_tables, write_table
from workbench.report.tables.registry import ENTRIES, entry
from workbench.report.tables.run import OUT, tables

__all__ = ["ENTRIES", "OUT", "Drawn", "Entry", "Tables", "draw", "entry", "stored_tables", "tables", "write_table"]
