"""Conversion of models from and to other programs' files: `python -m fastgpt.convert`."""
