"""The tables and pictures of docs/results/attacks.md, from the cells that benchmarks/attacks.py wrote.

    python benchmarks/plot_attacks.py attacks.jsonl docs/results [--speed speed.jsonl]

Adds the cells, without their pictures, to attacks.jsonl in the folder, and puts the tables of all that it holds
between the marks in attacks.md, which is otherwise left as it is. Writes attacks-table1.png and attacks-figure3.png
where the file given has every cell of theirs, with its pictures.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from shoal.papers.table import published

Line = dict[str, Any]
ATTACKS = {"dlg": "DLG", "gradinv": "GradInv", "gradinv-lbfgs": "GradInv", "cpl": "CPL"}
FACES = ("three", "group", "batch")
SETS = {"mnist": "MNIST", "cifar10": "CIFAR10", "lfw": "LFW"}


def printed(name: str, row: str, dataset: str, *measures: str) -> list[str]:
    """What Wei et al. (2023) print in a row of a table."""
    figures = published(name)
    return [f"{figures[measure][row][SETS[dataset]]:g}" for measure in measures]


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def table1(lines: dict[str, Line]) -> str:
    rows = []
    for cell, line in lines.items():
        if not cell.startswith("table1/"):
            continue
        _, dataset, attack = cell.split("/")
        said = "–"
        if attack in ATTACKS:
            said = " / ".join(printed("alphacdp-table1", ATTACKS[attack], dataset, "success", "rmse", "iterations"))
        rows.append(
            [attack, dataset, str(line["victims"]), number(line["success"]), number(line["rmse"]),
             number(line["rmse_of_successes"]), number(line["psnr"], 1), number(line["ssim"]),
             number(line["label_hits"]),
             number(line["iterations_to_success"], 1), number(line["iterations"], 1), str(line["diverged"]),
             number(line["seconds"], 0), said]
        )  # fmt: skip
    head = ["attack", "data", "victims", "success", "RMSE", "RMSE of successes", "PSNR", "SSIM", "labels",
            "iterations to success", "iterations in all", "diverged", "seconds",
            "published: success / RMSE / iterations"]  # fmt: skip
    return table(head, rows)


def table3(lines: dict[str, Line]) -> str:
    rows = []
    for cell, line in lines.items():
        if not cell.startswith("table3/"):
            continue
        _, dataset, method, kind = cell.split("/")
        row = f"type {kind} {method.removesuffix(', records')}"
        resilient, *others = printed("alphacdp-table3", row, dataset, "resilient", "rmse", "iterations")
        reached = line["iterations_to_success"]
        rows.append(
            [f"type {kind}", method, dataset, str(line["victims"]), "N" if line["success"] >= 0.5 else "Y",
             number(line["success"]), number(line["rmse"]), number(line["ssim"]), number(reached, 1),
             "Y" if resilient == "1" else "N", *others]
        )  # fmt: skip
    rows.sort(key=lambda row: (row[2] == "lfw", row[0]))
    head = ["attacker", "method", "data", "victims", "resilient", "success", "RMSE", "SSIM", "iterations to success",
            "published: resilient", "RMSE", "iterations"]  # fmt: skip
    return table(head, rows)


def figure3(lines: dict[str, Line]) -> str:
    rows = []
    for cell, line in lines.items():
        if cell.startswith("figure3/"):
            _, _, method, kind = cell.split("/")
            rows.append([method, f"type {kind}", number(line["success"]), number(line["rmse"]), number(line["ssim"])])
    picture = "\n\n![A column a method, a row a type of attacker](attacks-figure3.png)"
    return table(["method", "attacker", "success", "RMSE", "SSIM"], rows) + picture


def faces(lines: dict[str, Line]) -> str:
    """Means over several faces: a row a search, seeds together."""
    found: dict[tuple[str, int], list[Line]] = {}
    for cell, line in lines.items():
        kind, _, *name = cell.split("/")
        if kind in FACES:
            found.setdefault((name[0] if kind != "three" else line["attack"], line["records"]), []).append(line)
    rows = []
    for (name, records), each in found.items():
        rmses = np.concatenate([line["rmses"] for line in each])
        success, ssim, labels = (np.mean([line[key] for line in each]) for key in ("success", "ssim", "label_hits"))
        spread = " / ".join(number(float(rmse)) for rmse in np.quantile(rmses, [0.1, 0.5, 0.9]))
        victims, iterations = sum(line["victims"] for line in each), each[0]["iterations_allowed"]
        rows.append([name, str(records), str(victims), str(iterations), number(success), spread, number(ssim),
                     number(labels), each[0]["device"]])  # fmt: skip
    head = ["search", "records", "victims", "iterations", "success", "RMSE: 10% / median / 90%", "SSIM", "labels",
            "device"]  # fmt: skip
    return table(head, rows)


def planted(lines: dict[str, Line]) -> str:
    """What a malicious server gets: a row a method, a column a batch."""
    cells = {tuple(cell.split("/")[2:]): line for cell, line in lines.items() if cell.startswith("imprint/")}
    rows = []
    for method in dict.fromkeys(method for method, _ in cells):
        batches = [cells.get((method, records)) for records in ("8", "32", "64")]
        each = [f"{number(line['success'])} ({number(line['rmse'])})" if line else "not run" for line in batches]
        alone = " / ".join(number(line["alone"]) if line else "–" for line in batches)
        rows.append([method, str(next(line["sites"] for line in batches if line)), *each, alone])
    return table(["method", "sites", "8 records", "32 records", "64 records", "alone in a bin"], rows)


def members(lines: dict[str, Line]) -> str:
    rows = []
    for cell, line in lines.items():
        if not cell.startswith("membership/"):
            continue
        for row in line["rows"]:
            accuracy = f"{line['train_accuracy']:.3f} / {line['test_accuracy']:.3f}"
            rows.append([line["algorithm"], row["attack"], number(row["advantage"]), number(row["auc"]),
                         number(row["tpr_at_1_percent_fpr"]), accuracy])  # fmt: skip
    head = ["method", "attack", "advantage", "area under ROC", "TPR at 1% FPR", "accuracy on members / held out"]
    return table(head, rows)


def speed(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        each = line["seconds_a_victim"]
        rows.append([line["device"], line["dataset"], str(line["victims"]), *(number(each[way], 4) for way in each),
                     number(line["times_faster_than_alone"], 1),
                     number(line["times_faster_than_published_way"], 1)])  # fmt: skip
    head = ["device", "data", "victims", "seconds a victim: together", "alone", "published way", "faster than alone",
            "faster than published way"]  # fmt: skip
    return table(head, rows)


def unpacked(held: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(zlib.decompress(base64.b64decode(held["bytes"])), dtype=np.uint8)
    return flat.reshape(held["shape"])


def show(axes: Any, picture: np.ndarray, title: str = "") -> None:
    axes.imshow(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def picture1(lines: dict[str, Line], path: Path) -> None:
    """Originals, then what each attack made of them, for each data set."""
    cells = {cell: line for cell, line in lines.items() if cell.startswith("table1/")}
    datasets = list(dict.fromkeys(cell.split("/")[1] for cell in cells))
    rows: list[tuple[str, np.ndarray]] = []
    for dataset in datasets:
        of_set = {cell.split("/")[2]: line for cell, line in cells.items() if cell.split("/")[1] == dataset}
        rows.append((dataset, unpacked(next(iter(of_set.values()))["pictures"]["truth"])))
        rows += [(attack, unpacked(line["pictures"]["found"])) for attack, line in of_set.items()]
    width = max(len(pictures) for _, pictures in rows)
    figure, axes = plt.subplots(len(rows), width, figsize=(0.9 * width, 0.9 * len(rows)), squeeze=False)
    for row, (name, pictures) in enumerate(rows):
        for column in range(width):
            show(axes[row, column], pictures[column])
        axes[row, 0].set_ylabel(name, fontsize=9)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=110)


def picture3(lines: dict[str, Line], path: Path) -> None:
    """A column a method, a row a type, one victim."""
    cells = {tuple(cell.split("/")[2:]): line for cell, line in lines.items() if cell.startswith("figure3/")}
    names = list(dict.fromkeys(method for method, _ in cells))
    figure, axes = plt.subplots(3, len(names) + 1, figsize=(1.1 * (len(names) + 1), 4.0), squeeze=False)
    for row, kind in enumerate("210"):
        show(axes[row, 0], unpacked(cells[names[0], kind]["pictures"]["truth"])[0], "" if row else "original")
        axes[row, 0].set_ylabel(f"type {kind}", fontsize=9)
        for column, name in enumerate(names, start=1):
            line = cells[name, kind]
            title = "" if row else name.replace(" ", "\n", 1).replace("[", "\n[")
            show(axes[row, column], unpacked(line["pictures"]["found"])[0], title)
            tone = "#a63314" if line["success"] >= 0.5 else "#0f6b5c"
            axes[row, column].set_xlabel(f"{100 * line['success']:.0f}%", fontsize=8, color=tone)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=110)


def fill(path: Path, parts: dict[str, str]) -> None:
    """Put each part between `<!-- name -->` and `<!-- end -->`."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--speed", type=Path, help="lines that benchmarks/attacks_speed.py printed")
    options = parser.parse_args()
    read = [json.loads(line) for line in options.cells.read_text(encoding="utf-8").splitlines()]
    for line in read:
        line["cell"] = line["cell"].replace("noise .0", "noise 0.0")  # as cells were called before
    pictured = {line["cell"]: line for line in read if "pictures" in line}
    path = options.folder / "attacks.jsonl"
    before = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    lines: dict[str, Line] = {line["cell"]: line for line in before}
    for line in read:
        lines[line["cell"]] = {key: value for key, value in line.items() if key != "pictures"}
    for kind, picture in {"table1": picture1, "figure3": picture3}.items():
        of_it = {cell for cell in lines if cell.startswith(f"{kind}/")}
        if of_it and of_it <= pictured.keys():
            picture(pictured, options.folder / f"attacks-{kind}.png")
    parts = {"table1": table1, "table3": table3, "figure3": figure3, "imprint": planted, "membership": members}
    tables = {name: part(lines) for name, part in parts.items() if any(c.startswith(f"{name}/") for c in lines)}
    if any(cell.split("/")[0] in FACES for cell in lines):
        tables["faces"] = faces(lines)
    if options.speed:
        timed = [json.loads(line) for line in options.speed.read_text(encoding="utf-8").splitlines()]
        tables["speed"] = speed(timed)
    fill(options.folder / "attacks.md", tables)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
