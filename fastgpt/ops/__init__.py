"""Ops of a model: what each computes, its implementations, and the choice between them."""

from fastgpt.ops.tables import select as select
