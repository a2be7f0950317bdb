"""Tables and figures from stored records. Needs no torch, no GPU and no model.

write_report("report/", ablation="ablation.json")     # report.html and PNG figures
console.print(to_rich(ablation_table(read_ablation("ablation.json"))))
"""

from workbench.report.analysis_figures import aggregated_figure, sparsity_figure, window_figure
from workbench.report.analysis_records import read_coactivation, read_sparsity, read_window
from workbench.report.analysis_tables import coactivation_table, sparsity_table, window_table
from workbench.report.coactivation_figure import coactivation_figure
from workbench.report.evaluation import read_evaluation
from workbench.report.evaluation_figure import tradeoff_figure
from workbench.report.evaluation_page import write_evaluation
from workbench.report.evaluation_table import evaluation_table
from workbench.report.figures import latency_figure, predictor_figure, reuse_figure, throughput_figure
from workbench.report.html import render_html, write_report
from workbench.report.placement import placement_figure, placement_table, read_placement
from workbench.report.reading import read_ablation, read_flash, read_predictors, read_reuse
from workbench.report.rows import ablation_table, flash_table, neuron_table, predictor_table, reuse_table
from workbench.report.side_by_side import (
    read_side_by_side,
    side_by_side_html,
    side_by_side_markdown,
    side_by_side_rich,
    write_side_by_side,
)
from workbench.report.table import Column, Line, Table, to_html, to_latex, to_markdown, to_rich

__all__ = [
    "Column",
    "Line",
    "Table",
    "ablation_table",
    "aggregated_figure",
    "coactivation_figure",
    "coactivation_table",
    "evaluation_table",
    "flash_table",
    "latency_figure",
    "neuron_table",
    "placement_figure",
    "placement_table",
    "predictor_figure",
    "predictor_table",
    "read_ablation",
    "read_coactivation",
    "read_evaluation",
    "read_flash",
    "read_placement",
    "read_predictors",
    "read_reuse",
    "read_side_by_side",
    "read_sparsity",
    "read_window",
    "render_html",
    "reuse_figure",
    "reuse_table",
    "side_by_side_html",
    "side_by_side_markdown",
    "side_by_side_rich",
    "sparsity_figure",
    "sparsity_table",
    "throughput_figure",
    "to_html",
    "to_latex",
    "to_markdown",
    "to_rich",
    "tradeoff_figure",
    "window_figure",
    "window_table",
    "write_evaluation",
    "write_report",
    "write_side_by_side",
]
