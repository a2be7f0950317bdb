# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Train predictors
#
# Which neurons will fire has to be known before they are read. The paper (section 3.1) trains a small
# low-rank predictor for each layer: the FFN's input in, a score for each neuron out. Two errors matter. A
# *false negative* is a neuron that fires and is not predicted: it costs quality. A *false positive* is
# predicted and stays zero: it costs a read.
#
# The first cell picks the model and the text. The demo model comes with the package; for your own, put a
# checkpoint's directory or a hub id there, and C4 shards, parquet, a text file, `"c4"` or `"hub:OWNER/NAME"`
# for the text.

# %%
from pathlib import Path

from IPython.display import Image

import workbench as wb
from workbench import assets, report

wb.notebook_setup()
model, data = assets.path("data/demo-model"), assets.path("data/text")
spec = wb.PredictorSpec(tokens=16_000, rank=128, last_rank=128, validation_tokens=2048, false_negative=0.05)
out = Path("runs", Path(model).name, "predictors")

# %% [markdown]
# ## Training, while you watch
#
# All layers are trained in one pass over the text. Left: the loss, and how far the layers spread. Right: both
# errors by layer, measured now and then on text that is never trained on, with each layer's threshold set so
# that it misses the share of active neurons that was asked for.
#
# *Stop* ends after the step that runs and saves everything; *Resume* goes on from there, also in another
# session, and ends with the identical result.

# %%
panel = wb.training_panel(model, data, spec, out=out)
panel.start()

# %% [markdown]
# The next cell waits for the end; the panel's buttons work meanwhile, and after *Stop* the cell is done. The
# notebook's interrupt button stops the training without loss, too. To begin again with another `spec`, choose
# another `out`, or give the panel `resume=False`.

# %%
predictors = await panel

# %%
Image(panel.figure(), width=920)

# %% [markdown]
# ## How good they are
#
# On held-out text, by layer. *Predicted / active* is what the reads grow by; the paper's predictors for
# OPT-6.7B read about three neurons for each one active.

# %%
report.predictor_table(report.read_predictors(out))

# %%
Image(report.predictor_figure(report.read_predictors(out)), width=920)

# %% [markdown]
# `panel.close()` frees what the training held.

# %%
panel.close()
