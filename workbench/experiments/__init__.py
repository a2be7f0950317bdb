"""One module for each table or figure of the papers: what to run, in which order."""
