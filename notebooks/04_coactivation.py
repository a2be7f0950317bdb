# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. Which neurons fire together
#
# If two neurons always fire together, storing them side by side would halve the reads. The paper tried it
# (appendix D): it bundled each neuron with its closest friend, and read *more*. This notebook shows why, and
# what does work: an order of all neurons on flash that makes the reads of a token adjacent.
#
# The first cell picks the model and the text. The demo model comes with the package; for your own, put a
# checkpoint's directory or a hub id there, and C4 shards, parquet, a text file, `"c4"` or `"hub:OWNER/NAME"`
# for the text.

# %%
from pathlib import Path

from IPython.display import Image

import workbench as wb
from workbench import assets, report
from workbench.experiments.coactivation import analyze_coactivation
from workbench.experiments.place import place

wb.notebook_setup()
model, data = assets.path("data/demo-model"), assets.path("data/text")
work = Path("runs", Path(model).name)

# %% [markdown]
# ## Co-activation
#
# Exact counts, for every pair of neurons of a layer, of the tokens on which both fire. Read from the figure:
# how often neurons fire (a power law: few fire for almost every token), and who is whose closest friend.

# %%
together = analyze_coactivation(model, data, tokens=4096, progress=wb.progress_bar("co-activation"))

# %%
Image(report.coactivation_figure(report.read_coactivation(together)), width=920)

# %% [markdown]
# ## Why bundling friends fails
#
# The closest friend of most neurons is one of the few that fire all the time. Such a neuron would be stored,
# and read, again and again beside others, although it is in the window already.

# %%
report.coactivation_table(report.read_coactivation(together))

# %% [markdown]
# ## Placement
#
# An order of the neurons, found from training text, that puts neurons which fire together next to each other;
# each is stored once. Measured on held-out text: reads and bytes a token and throughput, in the model's own order
# and placed. Gaps between the neurons that are wanted are read through where that is cheaper than another read.

# %%
store = wb.convert(model, work / "store", dtype="float32", progress=wb.progress_bar("flash store"))
placed = place(
    model,
    store,
    data,
    tokens=4096,
    held_out=2048,
    rounds=2,
    run=wb.RunSpec(window=4, dram="80%", context=256),
    progress=wb.progress_bar("placement"),
)

# %%
report.placement_table(report.read_placement(placed))

# %%
Image(report.placement_figure(report.read_placement(placed)), width=920)
