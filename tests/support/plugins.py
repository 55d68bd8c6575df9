"""Packages as if they were installed: a module and its entry points on the path, and nothing downloaded."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, package: str, points: str, **modules: str) -> None:
    """Write a distribution of that name with these entry points (the text of entry_points.txt) and modules."""
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
