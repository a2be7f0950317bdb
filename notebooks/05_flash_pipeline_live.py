# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. The flash pipeline, live
#
# The model runs from flash while you switch its techniques on and off. A change takes effect at the next token, keeps
# the text so far, and is marked on the chart. Press **Start** (Tab and Space do, too), and untick *bundling* while text
# streams: the weights of a neuron then lie in two places, and *flash a token* and *reads a token* go up.
#
# The first cell picks the model. The demo model and its predictors come with the package; for your own, put a
# checkpoint's directory or a hub id and the predictors that notebook 02 trained. The store is written once; running
# the cell again opens it, and frees what the former panel held.

# %%
from pathlib import Path

import workbench as wb
from workbench import assets

wb.notebook_setup()
model, predictors = assets.path("data/demo-model"), assets.path("predictors/demo-model")
place = Path("runs/notebooks") / f"{Path(model).name}-store"
store = wb.convert(model, place, dtype="float32", progress=wb.progress_bar("convert"))
run = wb.RunSpec(dram="80%", window=4)
backend = "torch-cpu"  # or "mlx-metal", "mlx-cuda", "mlx-cpu"

# %%
panel = wb.panel(store.path, predictors, prompt="Once upon a time", run=run, backend=backend)
panel

# %% [markdown]
# ## The same from Python
#
# Every control has a name, that of its field in `Ablation` or `RunSpec`. Two stretches of text, the second without
# bundling, and the first pinned as A to compare with. The first 8 tokens of a setting fill its window and do not
# count.

# %%
panel.session.start("Once upon a time", tokens=16)
await panel
panel.session.pin()
panel.session.change(bundling=False)
panel.session.go_on(tokens=16)
await panel
panel.table()

# %% [markdown]
# ## Keep it
#
# An ablation record that `workbench` reads like one of its own, and the table for a paper. The buttons of the panel
# write the same.

# %%
from workbench.widgets.export import export

print(export(panel.session, "runs/notebooks/live.json"))
print(export(panel.session, "runs/notebooks/live.tex"))
panel.session.change(bundling=True)

# %% [markdown]
# `panel.close()` gives DRAM, threads and files back; so do running the first cells again and shutting the kernel
# down.
