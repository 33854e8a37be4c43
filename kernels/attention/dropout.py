"""Dropout mask of attention weights: a pure function of (seed, batch, head, query, key).

The kernels' backward draws the mask again in place of reading it, from other tiles and in another
order. One call of Philox gives four words, and four weights use them: with bit 3 of i and of j
clear, (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8). In the accumulators of tensor cores those
four belong to one thread, whether a tile has its queries along the rows or along the columns, so
that no word has to travel. A weight is dropped where its word, as a signed number, is below
`drop_below(p)`.

Source
    Philox4x32: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", doi
    10.1145/2063384.2063405; seven rounds are the fewest that pass BigCrush.
"""

import torch
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF


def drop_below(p: float) -> int:
    """Returns the threshold for dropout: a signed random 32-bit word below it drops a weight.

    The probability `p` in [0, 1) is rounded to a multiple of 2**-32.
    """
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def philox(c: list[Tensor], key: list[int | Tensor]) -> list[Tensor]:
    """Computes four words of Philox4x32 from a counter and a key: four and two 32-bit numbers in
    int64.
    """
    for _ in range(ROUNDS):
        # int64 products wrap, which keeps all 64 bits of the unsigned product
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (b >> 32 & _WORD) ^ c[1] ^ key[0],
            b & _WORD,
            (a >> 32 & _WORD) ^ c[3] ^ key[1],
            a & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return c


def attention_dropout_mask(
    shape: tuple[int, int, int, int],
    p: float,
    seed: int | Tensor,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns the mask that `attention` uses for `dropout_p=p, dropout_seed=seed`, in plain
    PyTorch.

    Args:
        shape: (B, H, Tq, Tk).
        p: probability with which a weight is dropped, in [0, 1).
        seed: int, or int64 tensor (1,) on `device`.

    Returns:
        Tensor: bool (B, H, Tq, Tk), True where a weight is kept. It takes about 50 bytes for each
        element while it is computed: for tests and small shapes.
    """
    B, H, Tq, Tk = shape
    head = torch.arange(B * H, device=device).view(B, H, 1, 1)
    i = torch.arange(Tq, device=device)[:, None]
    j = torch.arange(Tk, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox([i & ~8, j & ~8, head, zero], [seed & _WORD, (seed >> 32) & _WORD])
    near = torch.where(j & 8 == 0, words[0], words[1])
    far = torch.where(j & 8 == 0, words[2], words[3])
    word = torch.where(i & 8 == 0, near, far)
    return (word ^ 2**31) - 2**31 >= drop_below(p)
