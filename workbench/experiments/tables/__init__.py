"""The paper's tables and figures: what each is measured from, in which order, and how an interrupted run goes on.

Nothing is measured here that another experiment does not measure: each part is a record of one of them.
"""

from workbench.experiments.tables.parts import PARTS, lacks
from workbench.experiments.tables.subject import Subject, demo_subject
from workbench.experiments.tables.unfinished import Parts

__all__ = ["PARTS", "Parts", "Subject", "demo_subject", "lacks"]
