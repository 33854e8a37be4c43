"""What `attention` and `attention_packed` are proved and measured by."""

from collections.abc import Iterator

from ..proof.compile import Case


def forms(arch: int) -> Iterator[Case]:
    from .launch import forms

    return forms(arch)
