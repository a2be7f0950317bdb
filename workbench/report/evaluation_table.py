"""Accuracy and cost as a table, and in sentences, beside the paper's table 1."""

from __future__ import annotations

from workbench.report.evaluation import EvaluationRecord, EvaluationRow, Metric, paper_accuracy
from workbench.report.numbers import NONE, count, ms, percent, size, times
from workbench.report.paper import paper
from workbench.report.table import Column, Line, Table

_COST = (
    Column("bytes", "loaded", "a token", group=1),
    Column("of_dense", "loaded", "of dense", group=1),
    Column("over", "predicted /", "active", group=1, rank=1),
    Column("missed", "false", "negatives", group=1),
    Column("total", "total", "ms", group=1),
    Column("dram", "DRAM", "planned", group=1, rank=2),
)
METHOD = (
    "Perplexity and the tasks' answers come from the engine: each token, a prompt's too, is computed with its own "
    "neurons only, and nothing is masked in a dense model. Bytes and times are those of a decode, token by token, of "
    "the same text. False negatives are active neurons that the row left out, found from the store's weights for the "
    "inputs that the row's own feed-forward layers got."
)


def evaluation_table(record: EvaluationRecord) -> Table:
    """Rows dense, oracle and each false-negative rate; perplexity, accuracy by task, cost; the paper's accuracy below
    dense and the rate nearest to its own."""
    columns = []
    if record.data is not None:
        columns.append(Column("perplexity", "perplexity", ""))
    for task in record.tasks:
        columns += [
            Column(f"{task.name}/{metric}", task.name, f"{metric} %", rank=0 if metric == "acc" else 1)
            for metric in record.dense.tasks[task.name].metrics
        ]
    if record.data is not None:
        columns += _COST
    blocks = []
    for row in record.rows:
        lines = [_measured(record, row)]
        theirs = _published(record, row)
        if theirs:
            lines.append(Line("paper", "paper", theirs))
        blocks.append(tuple(lines))
    title = f"Accuracy and cost: {record.run.model} ({record.run.dtype}), dense and with predictors"
    return Table(title, "row", tuple(columns), tuple(blocks), notes(record))


def accuracy(metric: Metric | None) -> str:
    """In percent with the standard error: '66.1 ± 0.9'."""
    if metric is None:
        return NONE
    return f"{100 * metric.value:.1f}" + ("" if metric.stderr is None else f" ± {100 * metric.stderr:.1f}")


def perplexity(value: float | None) -> str:
    """'10.60', '16,200'."""
    return NONE if value is None else f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def _measured(record: EvaluationRecord, row: EvaluationRow) -> Line:
    cells = {
        "perplexity": perplexity(row.perplexity),
        "bytes": size(row.flash_bytes),
        "of_dense": percent(record.of_dense(row)),
        "over": times(row.predicted_over_active),
        "missed": percent(row.false_negative),
        "total": ms(row.total),
        "dram": size(row.dram_bytes),
    }
    for name, result in row.tasks.items():
        cells |= {f"{name}/{metric}": accuracy(value) for metric, value in result.metrics.items()}
    return Line("measured", row.name, cells)


def _published(record: EvaluationRecord, row: EvaluationRow) -> dict[str, str]:
    theirs = paper_accuracy()
    own = "dense" if row is record.dense else "predicted" if row is record.near_paper() else None
    cells = {f"{t.name}/acc": f"{theirs[t.name][own]:.1f}" for t in record.tasks if own and t.name in theirs}
    if cells and own == "predicted" and record.data is not None:
        quality = paper().predictors
        cells |= {"over": times(quality["predicted_over_active"]), "missed": percent(quality["false_negative"])}
    return cells


def notes(record: EvaluationRecord) -> tuple[str, ...]:
    """What a reader has to know to trust the numbers; each a sentence."""
    found = []
    if record.data is not None:
        data, decoded = record.data, record.dense.decoded
        found.append(
            f"Perplexity over {record.run.tokens:,} tokens of {data['source']}: {data['documents']:,} documents, "
            f"SHA-256 chain {str(data['sha256'])[:12]}, windows of {record.settings['sequence']} tokens."
        )
        found.append(
            f"Loaded: flash bytes a token over {decoded} tokens of the same text after a prompt of "
            f"{record.settings['prompt']}; total: median ms. Dense reads every FFN neuron for each token."
        )
        found.append(
            f"DRAM budget {record.run.dram} of the model; false negatives and predicted / active over "
            f"{record.dense.quality_tokens} tokens."
        )
    for task in record.tasks:
        parts = f" in {task.subjects} subjects" if task.subjects > 1 else ""
        found.append(
            f"{task.name}: {count(task.documents)} documents{parts} of the {task.split} split ({task.source}), "
            f"zero-shot, lm-evaluation-harness {record.harness}."
        )
    if record.tasks and any(task.name in paper_accuracy() for task in record.tasks):
        source = paper().source
        found.append(f"Paper: {source['model']}, its table 1; accuracy belongs to a model, only its change compares.")
    for row in record.rows:
        cut = sum(result.truncated for result in row.tasks.values())
        if cut:
            found.append(f"{row.name}: {cut:,} requests were cut from the left to fit the context.")
        if row.window_trims:
            found.append(f"{row.name}: the window was cut short {row.window_trims:,} times to keep the DRAM budget.")
    return tuple(found)


def headline(record: EvaluationRecord) -> str:
    """One sentence: what the predictors cost in accuracy and save in bytes, at the rate nearest to the paper's."""
    row, dense = record.near_paper() or record.rows[-1], record.dense
    parts = []
    if row.perplexity is not None and dense.perplexity is not None:
        parts.append(f"perplexity is {perplexity(row.perplexity)} (dense {perplexity(dense.perplexity)})")
    changes = [
        (100 * (row.tasks[t.name].metrics["acc"].value - dense.tasks[t.name].metrics["acc"].value), t.name)
        for t in record.tasks
        if "acc" in dense.tasks[t.name].metrics
    ]
    if changes:
        worst = min(changes)
        mean = sum(change for change, _ in changes) / len(changes)
        parts.append(f"accuracy changes by {mean:+.1f} points on average, at worst {worst[0]:+.1f} on {worst[1]}")
    share = record.of_dense(row)
    if share is not None:
        parts.append(f"a token loads {percent(share)} of the bytes of dense")
    text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else "nothing was measured"
    return f"{row.name[0].upper()}{row.name[1:]}: {text}."
