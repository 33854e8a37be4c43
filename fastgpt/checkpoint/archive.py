"""Check of a file of torch.save before it is loaded: what is small on the disk must stay small.

It is a zip archive of a pickle, `data.pkl`, and the values of tensors. Refused are compressed
members, which torch.save never writes, and values that refer to each other so often, or so deeply,
that to hash, compare or print them would never end.
"""

import pickletools
import zipfile
from pathlib import Path

DIRECTORY = 2**21
"""Bytes of the archive's directory: about 30,000 tensors, three times what AdamW has in 256 layers.
"""
STEPS, TUPLES = 2**19, 2**16
"""Most steps of the pickle, of which a tensor takes 35, and tuples that it makes."""
LARGEST = 2**27
"""Most steps, doubled for each place that refers to a container which another place has as well."""
PLAIN = {"BINUNICODE", "SHORT_BINSTRING", "GLOBAL", "LONG1", "BINPERSID", "PAIR"}
"""Steps that make what contains nothing, or a pair of numbers, such as AdamW's betas."""


def check_archive(path: Path) -> None:
    """Raises ValueError or another error unless a file is as torch.save would write it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(-min(98, size), 2)
        end = file.read()
    directory = end[40:48] if end[56:60] == b"PK\6\7" else end[-10:-6]  # over 4 GiB, or less
    if end[-22:-18] != b"PK\5\6" or int.from_bytes(directory, "little") > DIRECTORY:
        raise ValueError("it is no archive as torch.save writes since 1.6, or has too many members")
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > size:
            raise ValueError("its members are compressed")
        [name] = [x for x in archive.namelist() if x.lower().endswith("/data.pkl")]  # in any case
        check_pickle(archive.read(name))


def check_pickle(content: bytes) -> None:
    """Raises ValueError if the values of a pickle, which is not loaded, may be huge."""
    containers, tuples, shared, earlier, before = set(), 0, 0, "", ""
    for steps, (step, given, _) in enumerate(pickletools.genops(content)):
        tuples += step.name.startswith("TUPLE")
        if step.name.endswith("PUT") and before not in PLAIN:
            containers.add(given)
        shared += step.name.endswith("GET") and given in containers
        if steps > STEPS or tuples > TUPLES or steps << shared > LARGEST:
            raise ValueError("its values are too many, or refer to each other too often")
        pair = step.name == "TUPLE2" and before == "BINFLOAT" == earlier
        if step.name == "GLOBAL" and str(given).endswith(" bytearray"):
            raise ValueError("it makes an array of bytes, which no model has")
        earlier, before = before, "PAIR" if pair else step.name
