"""The order of basic blocks, in which lanes on different ways meet again as early as they can."""

from simgpu.executor.ptx import Program


def successors(program: Program, number: int) -> list[int]:
    """Basic blocks that may follow one."""
    last = program.blocks[number][-1] if program.blocks[number] else None
    if last is not None and last.mods[0] in ("ret", "exit", "trap"):
        return []
    after = [number + 1] if number + 1 < len(program.blocks) else []
    if last is None or last.mods[0] != "bra":
        return after
    return [program.target(last), *(after if last.guard is not None else [])]


def ranks(program: Program) -> list[int]:
    """Place of each basic block in the order: lanes in the first one run first.

    A block comes after all that lead to it, but for the end of a loop that it begins, and what
    follows a loop after all of the loop. The text may have the parts of a loop in another order.
    """
    after = [successors(program, number) for number in range(len(program.blocks))]
    depth = [0] * len(after)
    _, back = _walked(after, depth)
    for begin in {begin for _, begin in back}:
        inside, todo = {begin}, [end for end, to in back if to == begin]
        while todo:
            number = todo.pop()
            if number not in inside:
                inside.add(number)
                todo += [n for n, ways in enumerate(after) if number in ways]
        for number in inside:
            depth[number] += 1
    left, _ = _walked(after, depth)
    place = {number: at for at, number in enumerate(reversed(left))}
    return [place.get(number, len(after)) for number in range(len(after))]


def _walked(after: list[list[int]], depth: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """A walk from block to block, out of loops first.

    Returns:
        tuple[list[int], list[tuple[int, int]]]: the blocks as the walk leaves them, and the ways
            back to the begin of a loop.
    """
    left: list[int] = []
    back: list[tuple[int, int]] = []
    path, seen = {0: iter(sorted(after[0], key=depth.__getitem__))}, {0}
    while path:
        number = next(reversed(path))
        for to in path[number]:
            if to in path:
                back.append((number, to))
            elif to not in seen:
                seen.add(to)
                path[to] = iter(sorted(after[to], key=depth.__getitem__))
                break
        else:
            del path[number]
            left.append(number)
    return left, back
