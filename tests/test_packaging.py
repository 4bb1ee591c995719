"""What is on disk is what installs: every package and data file, and nothing at the top level but `dspark_fast`."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"dspark_fast": "dspark_fast", "kernels": "dspark_fast/kernels", "reference": "dspark_fast/reference"}
METADATA = ["pyproject.toml", "LICENSE", "NOTICE", "README.md"]


def room_files(root):
    """The files of the three rooms, as paths from `root`: no caches, nothing hidden."""
    for room in ROOMS:
        for path in (root / room).rglob("*"):
            inside = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
                yield inside


def installed_paths(root):
    """The same files, by the path at which they should install."""
    return {"/".join([ROOMS[path.parts[0]], *path.parts[1:]]) for path in room_files(root)}


def copy_checkout(to):
    """The files that packaging sees; data files are emptied, their names are all that counts."""
    for path in room_files(ROOT):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, to / path) if path.suffix == ".py" else (to / path).touch()
    for name in METADATA:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, to / name)


def build(checkout, kind):
    """The file names in a freshly built wheel or sdist."""
    (checkout / "built").mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print('built:' + build_meta.build_{kind}('built'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    archive = checkout / "built" / run.stdout.rsplit("built:", 1)[1].strip()
    if kind == "wheel":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("checkout")
    copy_checkout(checkout)
    return build(checkout, "wheel")


def test_wheel_ships_every_file_of_the_three_rooms_and_no_other(wheel):
    shipped = {name for name in wheel if ".dist-info/" not in name}
    assert shipped == installed_paths(ROOT)


def test_wheel_has_one_top_level_package_and_the_licences(wheel):
    assert {name.partition("/")[0] for name in wheel if ".dist-info/" not in name} == {"dspark_fast"}
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in wheel}


def test_sdist_can_be_built_from(tmp_path):
    copy_checkout(tmp_path)
    assert not {path.as_posix() for path in room_files(ROOT)} - build(tmp_path, "sdist")


def test_a_forgotten_package_or_data_file_is_noticed(tmp_path):
    """The comparison above can fail: a package that pyproject.toml does not name, and data that no pattern ships."""
    copy_checkout(tmp_path)
    for forgotten in ("dspark_fast/forgotten/__init__.py", "kernels/forgotten.bin", "dspark_fast/drafts/a/b/c.json"):
        (tmp_path / forgotten).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / forgotten).touch()
    missing = installed_paths(tmp_path) - build(tmp_path, "wheel")
    assert missing >= {
        "dspark_fast/forgotten/__init__.py",
        "dspark_fast/kernels/forgotten.bin",
        "dspark_fast/drafts/a/b/c.json",
    }


def test_rooms_import_under_dspark_fast_only(tmp_path):
    """From a folder that is not the checkout, as a user does. A `kernels` from elsewhere is not our business."""
    code = """
import importlib.util, json
names = ["dspark_fast", "dspark_fast.kernels", "dspark_fast.reference", "dspark_fast.drafts", "kernels", "reference"]
specs = {name: importlib.util.find_spec(name) for name in names}
print("specs:" + json.dumps({name: spec and spec.origin for name, spec in specs.items()}))
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or str(ROOT) not in v.split(os.pathsep)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, f"is dspark-fast installed here?\n{run.stderr}"
    origins = json.loads(run.stdout.rsplit("specs:", 1)[1])
    for name in ("dspark_fast", "dspark_fast.kernels", "dspark_fast.reference", "dspark_fast.drafts"):
        assert origins[name], f"{name} does not import"
    home = Path(origins["dspark_fast"]).parents[1]
    for name in ("kernels", "reference"):
        origin = origins[name]
        assert not origin or Path(origin).parents[1] not in (home, ROOT), f"{name} is importable from {origin}"


def test_command_is_registered():
    (command,) = [entry for entry in metadata.entry_points(group="console_scripts") if entry.name == "dspark-fast"]
    assert command.value == "dspark_fast.cli:main"
    assert callable(command.load())


def foreign_imports(path, depth, allowed):
    """The imports of one file that leave its room: too many dots, or neither the standard library nor `allowed`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > depth:
                found.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [n for n in names if n.partition(".")[0] not in {*sys.stdlib_module_names, *allowed}]
    return found


@pytest.mark.parametrize(("room", "allowed"), [("kernels", {"torch", "triton"}), ("reference", {"torch"})])
def test_room_imports_itself_and_torch_only(room, allowed):
    offences = {}
    for path in (ROOT / room).rglob("*.py"):
        depth = len(path.relative_to(ROOT / room).parts)
        if found := foreign_imports(path, depth, allowed):
            offences[str(path.relative_to(ROOT))] = found
    assert not offences


def test_foreign_imports_are_noticed(tmp_path):
    path = tmp_path / "op.py"
    path.write_text(
        "import math, transformers\nimport torch.nn\nfrom . import noise\nfrom .noise import philox\n"
        "from ..reference import markov\nfrom dspark_fast import ops\n"
    )
    assert foreign_imports(path, 1, {"torch"}) == ["transformers", "..reference", "dspark_fast"]
