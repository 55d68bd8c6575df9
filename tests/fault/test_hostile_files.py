"""Hostile files: what claims to be huge takes no memory, what holds code runs none, and nothing is written elsewhere.

A file of a kilobyte may claim 10^12 rows; each reader is tried on one in a process that may take little memory.
"""

import ast
import json
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shoal
from shoal.errors import ShoalError
from shoal.training.run_folder import CHECKPOINT
from support.tiny import PRIVATE, go_on, stopped_after

SOURCE = Path(shoal.__file__).parent
CODE = b"\x80\x04cos\nsystem\n(S'touch hit'\ntR."  # a pickle that would run a command
SPARE = 700 * 2**20  # bytes that a reader may take beyond what the process had

READER = textwrap.dedent("""
    import json, pickle, resource, sys
    from pathlib import Path

    import numpy, pyarrow.csv, pyarrow.parquet, safetensors.torch, torch
    pyarrow.set_cpu_count(1)  # each thread takes address space, as many as the machine has cores
    pyarrow.set_io_thread_count(1)
    from shoal.data import load
    from shoal.data.readers import parse_idx
    from shoal.training.run_folder import RunFolder
    from shoal.errors import ShoalError

    def refuse_pickle(*_, **__):
        raise SystemExit("a pickle was read")

    pickle.load = pickle.loads = pickle.Unpickler = refuse_pickle
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + {spare}
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    told = {{}}
    for name in sys.argv[1:]:
        path = Path(name)
        try:
            if path.suffix == ".idx":
                parse_idx(path.read_bytes(), name, 3)
            elif path.suffix == ".safetensors":
                folder = RunFolder.__new__(RunFolder)
                folder.path = path.parent
                folder.read_tensors(path.name)
            else:
                load(name)
            told[path.name] = "read"
        except ShoalError as error:
            told[path.name] = str(error)
        except MemoryError:
            told[path.name] = "MEMORY"
    print(json.dumps(told))
""")


def safetensors(header: dict, size: int | None = None, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def npz(header: str, body: bytes = b"") -> bytes:
    import io
    import zipfile

    text = header.encode().ljust(118) + b"\n"
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body)
    return held.getvalue()


def parquet(folder: Path) -> bytes:
    """A whole one, of one row."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "rows.parquet"
    parquet.write_table(pa.table({"a": [1.0], "label": [0]}), path)
    return path.read_bytes()


def hostile(folder: Path) -> dict[str, bytes]:
    trillion = 10**12
    shape = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({trillion}, 4), }}"
    good = parquet(folder)
    huge = {"model": {"dtype": "F32", "shape": [trillion], "data_offsets": [0, 4 * trillion]}}
    return {
        "rows.idx": bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**32 - 1, 1000, 1000) + bytes(1000),
        "shape.npz": npz(shape, bytes(800)),
        "object.npz": npz("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", CODE),
        "huge.safetensors": safetensors(huge),
        "header.safetensors": safetensors({"model": {}}, size=trillion),
        "lying.safetensors": safetensors(
            {"model": {"dtype": "F32", "shape": [trillion], "data_offsets": [0, 16]}}, body=bytes(16)
        ),
        "pickle.safetensors": CODE,
        "wide.csv": b"label," * 170 + b"label\n",
        "quoted.csv": b'a,label\n"' + b"x" * 900,
        "footer.parquet": good[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "torn.parquet": good[: len(good) // 2],
        "zeros.parquet": b"PAR1" + bytes(1000) + b"PAR1",
    }


@pytest.mark.slow
def test_small_files_that_claim_to_be_huge_or_hold_code_are_refused_in_little_memory(tmp_path):
    paths = []
    for name, content in hostile(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        paths.append(str(path))
        assert len(content) < 4000
    before = set(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", READER.format(spare=SPARE), *paths],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert len(told) == len(paths)
    assert {name: said for name, said in told.items() if said in ("read", "MEMORY")} == {}
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_no_module_can_load_a_pickle():
    """torch.load, numpy's allow_pickle, pickle, marshal, shelve, joblib: none is imported or called."""
    banned = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name.partition(".")[0] for alias in node.names}, path
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.partition(".")[0] not in banned, path
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                assert node.value.id not in {"torch", *banned}, path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, path


CHECKPOINTS = {
    "a huge shape": safetensors({"model": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}),
    "a header of 10^12 bytes": safetensors({"model": {}}, size=10**12),
    "a pickle": CODE,
    "nothing": b"",
    "offsets that overlap": safetensors(
        {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("model", "clip")}, body=bytes(8)
    ),
    "an integer for the model": safetensors(
        {
            "model": {"dtype": "I64", "shape": [10], "data_offsets": [0, 80]},
            "__metadata__": {"round": "1", "ledger": ""},
        },
        body=bytes(80),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("content", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_in_words_and_nothing_is_released(tmp_path, content):
    run = stopped_after(tmp_path, PRIVATE, rounds=2)
    (run / CHECKPOINT).write_bytes(content)
    charged = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(ShoalError):
        go_on(run)
    assert (run / "ledger.jsonl").read_bytes() == charged
    assert not (run / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["../../outside", "{folder}/outside", "..", "a/../../b", "x\n[evil]"])
def test_a_name_that_points_elsewhere_writes_nothing_outside_the_folder(tmp_path, name):
    """The name of a data set becomes part of a run folder's name."""
    from dataclasses import replace

    from support.tiny import dataset, network

    inside, name = tmp_path / "runs", name.format(folder=tmp_path)
    shoal.run(PRIVATE | {"rounds": 1}, data=replace(dataset(), name=name), model=network(), runs=inside)
    assert list(tmp_path.iterdir()) == [inside]
    (run,) = inside.iterdir()
    assert run.is_dir()
