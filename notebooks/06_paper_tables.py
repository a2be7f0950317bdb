# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. The paper's tables, on this machine
#
# Each table of "LLM in a flash" that this package can measure, with the paper's figures in the same columns.
# They are another model's on another machine: compare ratios, not milliseconds.
#
# The first cell picks the model and the text. The demo model comes with the package; for your own, put a
# checkpoint's directory or a hub id there, and C4 shards, parquet, a text file, `"c4"` or `"hub:OWNER/NAME"`
# for the text.

# %%
from pathlib import Path

from IPython.display import Image, Markdown

import workbench as wb
from workbench import assets, report
from workbench.experiments.ablate import ablate
from workbench.experiments.evaluate import evaluate
from workbench.experiments.text import window_and_card

wb.notebook_setup()
model, data = assets.path("data/demo-model"), assets.path("data/text")
predictors = assets.path("predictors/demo-model")  # or the folder that notebook 2 wrote
run = wb.RunSpec(window=4, dram="80%", context=256)
work = Path("runs", Path(model).name)

# %%
store = wb.convert(model, work / "store", dtype="float32", progress=wb.progress_bar("flash store"))
trained = wb.Predictors.load(predictors)
text, card = window_and_card(data, store, 64 + 8 + 24)

# %% [markdown]
# ## Tables 2 and 3: what each technique brings
#
# Each row adds one technique to the row above it. *flash* is read for each token; io, mem and compute are the
# three parts of a token's latency. The floor is what flash and memory would need for the same bytes.

# %%
rows = ablate(
    store,
    trained,
    text,
    run=run,
    prompt=64,
    tokens=24,
    data=card,
    predictors_name=Path(predictors).name,
    progress=wb.progress_bar("ablation"),
)
ablation = report.read_ablation(rows)
report.ablation_table(ablation)

# %%
Image(report.latency_figure(ablation), width=920)

# %% [markdown]
# ## Tables 1 and 4: what it costs in quality
#
# Perplexity through the running pipeline: dense, with the true activations (oracle: must equal dense), and
# with predictors that miss a given share of the active neurons. A few hundred tokens only show the shape;
# take thousands for a figure.

# %%
quality = evaluate(
    store.path,
    predictors,
    data=data,
    tokens=256,
    documents=(0, 20),
    rates=(0.01, 0.05),
    decode=16,
    progress=wb.progress_bar("evaluation"),
)
report.evaluation_table(report.read_evaluation(quality))

# %%
Image(report.tradeoff_figure(report.read_evaluation(quality)), width=920)

# %% [markdown]
# ## The predictors' card
#
# What was trained on what text, and how good each layer is on text that it never saw.

# %%
Markdown(Path(predictors, "CARD.md").read_text())

# %% [markdown]
# ## For the paper you write
#
# The same table as LaTeX; `report.to_markdown` gives Markdown, and `report.write_report` a page with all
# figures.

# %%
print(report.to_latex(report.ablation_table(ablation)))
