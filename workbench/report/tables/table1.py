"""Table 1: zero-shot accuracy of the dense model and with predictors."""

from __future__ import annotations

from workbench.report.evaluation import (
    EvaluationRecord,
    EvaluationRow,
    Metric,
    TaskCard,
    paper_accuracy,
    read_evaluation,
)
from workbench.report.evaluation_table import METHOD, accuracy
from workbench.report.numbers import NONE, count
from workbench.report.paper import paper
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Records, measured

TITLE = "Table 1: zero-shot accuracy, dense and with predictors"
COLUMNS = (
    Column("dense", "dense", "% here"),
    Column("predicted", "predictors", "% here"),
    Column("change", "change", "points here"),
    Column("paper_dense", "dense", "% paper", rank=2),
    Column("paper_predicted", "predictors", "% paper", rank=1),
    Column("paper_change", "change", "points paper"),
    Column("documents", "documents", "", rank=3),
)


def draw(records: Records) -> Drawn:
    """From a record of kind evaluation with tasks, as 'tasks'."""
    record = read_evaluation(records["tasks"])
    row, table = record.near_paper(), accuracy_table(record, TITLE)
    return Drawn(
        "table1", TITLE, change_sentence(record, row), SAYS, METHOD, (measured("accuracy", record),), (table,),
        notes=accuracy_notes(record, row),
    )  # fmt: skip


def accuracy_table(record: EvaluationRecord, title: str) -> Table:
    """A line a task: dense and the row nearest to 5% missed, beside the paper's."""
    row = record.near_paper()
    blocks = tuple((Line("measured", task.name, _cells(record, row, task)),) for task in record.tasks)
    return Table(f"{title}: {record.run.model} beside {paper().source['model']}", "task", COLUMNS, blocks)


def _cells(record: EvaluationRecord, row: EvaluationRow | None, task: TaskCard) -> dict[str, str]:
    theirs = paper_accuracy().get(task.name)
    dense, predicted = acc(record.dense, task.name), acc(row, task.name)
    cells = {"dense": accuracy(dense), "predicted": accuracy(predicted), "documents": count(task.documents)}
    cells["change"] = NONE if dense is None or predicted is None else f"{100 * (predicted.value - dense.value):+.1f}"
    cells |= dict.fromkeys(("paper_dense", "paper_predicted", "paper_change"), NONE)
    if theirs:
        change = theirs["predicted"] - theirs["dense"]
        cells |= {"paper_dense": f"{theirs['dense']:.1f}", "paper_predicted": f"{theirs['predicted']:.1f}"}
        cells["paper_change"] = f"{change:+.1f}"
    return cells


def acc(row: EvaluationRow | None, task: str) -> Metric | None:
    """A row's accuracy on a task, a share of one; None where it was not measured."""
    return row.tasks[task].metrics.get("acc") if row and task in row.tasks else None


def change_sentence(record: EvaluationRecord, row: EvaluationRow | None) -> str:
    """What predictors change, over the tasks, here and in the paper."""
    if row is None:
        return "No predictors were given: the dense model's accuracy only."
    pairs = [(acc(record.dense, task.name), acc(row, task.name)) for task in record.tasks]
    changes = [100 * (after.value - before.value) for before, after in pairs if before and after]
    theirs = [t["predicted"] - t["dense"] for t in paper_accuracy().values()]
    if not changes:
        return "No task with an accuracy was measured."
    return (
        f"Predictors change accuracy by {sum(changes) / len(changes):+.1f} points on average here ({row.name}); by "
        f"{sum(theirs) / len(theirs):+.1f} in the paper's table 1."
    )


def accuracy_notes(record: EvaluationRecord, row: EvaluationRow | None) -> tuple[str, ...]:
    """What a reader has to know of the tasks."""
    found = [
        f"{task.name}: {count(task.documents)} documents of the {task.split} split ({task.source}), zero-shot, "
        f"lm-evaluation-harness {record.harness}; ± is the standard error."
        for task in record.tasks
    ]
    found.append("Accuracy belongs to a model: only its change compares. Accuracy has no physical floor.")
    return tuple(found)


SAYS = "OPT-6.7B with predictors: arc_easy 66.1 to 66.2%, arc_challenge 30.6 to 30.6%, hellaswag 50.3 to 49.8%."
ENTRY = Entry("table1", TITLE, ("tasks",), draw, words=SAYS)
