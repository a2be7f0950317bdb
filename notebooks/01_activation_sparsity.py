# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Activation sparsity
#
# A feed-forward network with ReLU computes thousands of neurons and sets most of them to zero. What is zero
# need not be read: everything in "LLM in a flash" rests on that. The paper (section 3.1, figure 9) finds 97%
# zeros in OPT-6.7B and 95% in a Falcon-7B trained on with ReLU.
#
# The first cell picks the model and the text. The demo model comes with the package; for your own, put a
# checkpoint's directory or a hub id there, and C4 shards, parquet, a text file, `"c4"` or `"hub:OWNER/NAME"`
# for the text.

# %%
from IPython.display import Image

import workbench as wb
from workbench import assets, report
from workbench.experiments.sparsity import analyze_sparsity

wb.notebook_setup()
model, data = assets.path("data/demo-model"), assets.path("data/text")
tokens = 4096

# %% [markdown]
# What is read: the source, how much of it, and a digest of the first 100 documents, so that a figure can be
# traced to its text.

# %%
wb.data_card(data, model, stop=100)

# %% [markdown]
# ## By layer
#
# The dense model reads the text, and we count which neurons are above zero: true activations, no predictor.

# %%
sparsity = analyze_sparsity(model, data, tokens=tokens, progress=wb.progress_bar("activations"))

# %%
report.sparsity_table(report.read_sparsity(sparsity))

# %% [markdown]
# ## By layer and token
#
# The mean hides that tokens differ. Left: the bar holds half of a layer's tokens, the fine line nine in ten. A
# low mean decides how much has to be read, a long line how much memory has to be kept free for the worst token.
# Right: the same for tokens by how much text stands before them, since the first ones are unlike the others.

# %%
Image(report.sparsity_figure(report.read_sparsity(sparsity)), width=920)
