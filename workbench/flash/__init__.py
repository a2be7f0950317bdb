"""Flash: the store's format and the reader that brings parts of it into DRAM (paper, sections 3 and 4)."""
