# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. What consecutive tokens share
#
# Neurons that fired for one token often fire for the next. The paper (section 3.2) keeps the neurons of the
# last k tokens in DRAM, so that only the new ones are read. Two questions follow: how much does a window of k
# tokens hold, and how much does each token still add.
#
# The first cell picks the model and the text. The demo model comes with the package; for your own, put a
# checkpoint's directory or a hub id there, and C4 shards, parquet, a text file, `"c4"` or `"hub:OWNER/NAME"`
# for the text.

# %%
from pathlib import Path

from IPython.display import Image

import workbench as wb
from workbench import assets, report
from workbench.experiments.reuse import analyze_reuse
from workbench.experiments.window import window_sweep

wb.notebook_setup()
model, data = assets.path("data/demo-model"), assets.path("data/text")
predictors = wb.Predictors.load(assets.path("predictors/demo-model"))  # or the folder that notebook 2 wrote
work = Path("runs", Path(model).name)

# %% [markdown]
# ## Kept and new
#
# For each k: the share of the FFN that the window holds (DRAM), and the share that a token adds (flash). The
# paper has k = 4 for OPT-6.7B, where 2.4% of the FFN is new with a token.

# %%
reuse = analyze_reuse(model, data, tokens=4096, progress=wb.progress_bar("reuse"))

# %%
report.reuse_table(report.read_reuse(reuse))

# %%
Image(report.reuse_figure(report.read_reuse(reuse)), width=920)

# %% [markdown]
# ## Aggregated use (figure 4a)
#
# `s_agg(k)` is the share of the FFN that k tokens in a row use together. Where the curve grows slowly, tokens
# reuse each other's neurons. The reads for the next token are its slope.

# %%
Image(report.aggregated_figure(report.read_reuse(reuse)), width=920)

# %% [markdown]
# ## The window that a DRAM budget allows (figure 7)
#
# A larger window reads less and holds more. Here the running pipeline is measured for each k: what the slots
# take, whether it fits the budget, and how the latency splits into io, mem and compute.

# %%
store = wb.convert(model, work / "store", dtype="float32", progress=wb.progress_bar("flash store"))
sweep = window_sweep(
    store,
    predictors,
    data,
    run=wb.RunSpec(dram="90%", context=256),
    tokens=32,
    progress=wb.progress_bar("windows"),
)

# %%
report.window_table(report.read_window(sweep))

# %%
Image(report.window_figure(report.read_window(sweep)), width=920)
