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
# Each table and figure of "LLM in a flash", with the paper's numbers in the same row. They are another model's on
# another machine: compare ratios, not milliseconds. `workbench tables` writes the same as pages.
#
# The first cell picks the model and the text. The demo model comes with the package; for your own, put a
# checkpoint's directory or a hub id there, and C4 shards, parquet, a text file, `"c4"` or `"hub:OWNER/NAME"`
# for the text.

# %%
from pathlib import Path

from IPython.display import Markdown

import workbench as wb
from workbench import assets, report
from workbench.report.tables import ENTRIES

wb.notebook_setup()
model, data = assets.path("data/demo-model"), assets.path("data/text")
predictors = assets.path("predictors/demo-model")  # or the folder that notebook 2 wrote
run = wb.RunSpec(window=4, dram="80%", context=256)
work = Path("runs", Path(model).name)

# %%
store = wb.convert(model, work / "store", dtype="float32", progress=wb.progress_bar("flash store"))

# %% [markdown]
# All are measured here, what several of them show only once. An interrupted cell goes on where it was. A few hundred
# tokens only show the shape; take thousands for a figure.

# %%
names = ["table2", "table3", "table4", "table5", "figure2b", "figure4a", "figure9", "appendix_d"]
found = wb.tables(
    *names,
    store=store.path,
    predictors=predictors,
    model=model,
    data=data,
    run=run,
    prompt=64,
    tokens=16,
    text_tokens=1024,
    pair_tokens=1024,
    quality_tokens=256,
    out=work / "tables",
    stage=wb.progress_bar,
)

# %% [markdown]
# ## Tables 2 and 3: what each technique brings
#
# Each row adds one technique to the row above it. *flash* is read for each token; io, mem and compute are the
# three parts of a token's latency. The floor is what flash and memory would need for the same bytes.

# %%
found["table2"]

# %%
found["table3"]

# %% [markdown]
# ## Table 4: how good the predictors are, and what they cost
#
# Perplexity through the running pipeline: dense, with the true activations (oracle: must equal dense), and
# with predictors that miss a given share of the active neurons.

# %%
found["table4"]

# %% [markdown]
# ## Table 5 and figure 2b: what DRAM holds, and how fast flash reads

# %%
found["table5"]

# %%
found["figure2b"]

# %% [markdown]
# ## Figures 4a and 9, appendix D: what the activations are like

# %%
found["figure4a"]

# %%
found["figure9"]

# %%
found["appendix_d"]

# %% [markdown]
# ## Larger models, from stored records
#
# What takes hours or a GPU is drawn from the records of `docs/results/tables`, where the package's checkout has them;
# `workbench tables --stored` draws all.

# %%
wb.stored_tables("table3", "figure8")

# %% [markdown]
# ## All of them
#
# What the paper says of each. Table 1 and figure 10 need the data of zero-shot tasks, figure 8 a long text: run these
# with `workbench tables NAME`.

# %%
Markdown("\n".join(f"- `{name}`: {own.title.partition(': ')[2]}. *{own.says}*" for name, own in ENTRIES.items()))

# %% [markdown]
# ## For the paper you write
#
# The same table as LaTeX; `report.to_markdown` gives Markdown, and the folder has pages with all figures.

# %%
print(report.to_latex(found["table2"].tables[0]))
