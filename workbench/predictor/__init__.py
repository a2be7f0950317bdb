"""Low-rank predictors of which neurons fire: training, quality, files."""
