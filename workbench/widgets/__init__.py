"""Panels for notebooks. `ipywidgets` is imported when a panel is made; it comes with the extra `notebooks`."""
