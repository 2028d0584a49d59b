"""
The picture of README and of the documentation's front page, drawn from a finished run.

    python scripts/readme_picture.py runs/demo     # writes docs/images/demo.png

Left: frames of before.mp4 (the frozen VLA) and after.mp4 (RLT), from the same held-out initial state. Right: the
share of the selection states that are solved during training.
"""

import argparse
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import matplotlib
import numpy as np

from rlt_sb3.experiment.report import read_evaluations

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from PIL import Image

ROOT = Path(__file__).parent.parent
FRAMES = 5  # of each film
PIXELS = 190  # side of a frame


def film_strip(path: Path) -> tuple[np.ndarray, list[int]]:
    """
    :param path: a film with one picture before each chunk and one of the end
    :return: some of its pictures side by side, and their numbers
    """
    film = iio.imread(path)
    chosen = np.linspace(0, len(film) - 1, FRAMES).round().astype(int).tolist()
    gap = np.full((PIXELS, 4, 3), 255, dtype=np.uint8)
    small = [np.asarray(Image.fromarray(film[number]).resize((PIXELS, PIXELS), Image.LANCZOS)) for number in chosen]
    return np.hstack([part for picture in small for part in (picture, gap)][:-1]), chosen


def draw_strip(ax: Any, path: Path, title: str, seconds_per_frame: float) -> None:
    """
    :param ax: where
    :param path: the film
    :param title: above the frames
    :param seconds_per_frame: simulated time between two pictures of the film
    """
    strip, chosen = film_strip(path)
    ax.imshow(strip)
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xticks([(place + 0.5) * PIXELS + 4 * place for place in range(len(chosen))])
    ax.set_xticklabels([f"{number * seconds_per_frame:.1f} s" for number in chosen], fontsize=8)
    ax.set_yticks([])
    ax.tick_params(length=0, pad=2)
    ax.spines[:].set_visible(False)


def draw_curve(ax: Any, data: dict[str, Any]) -> None:
    """
    :param ax: where
    :param data: contents of the run's evaluations.json
    """
    vla, points, n = data["vla_selection"], data["selection"], data["vla_selection"]["n"]
    ax.axhspan(*vla["wilson_95"], color="0.92", label="frozen VLA, 95 % interval")
    ax.axhline(vla["successes"] / n, color="0.5", linestyle="--", linewidth=1)
    chunks = [0, *(point["chunks"] for point in points)]
    rates = [vla["successes"] / n, *(point["evaluation"]["successes"] / n for point in points)]
    ax.plot(chunks, rates, color="tab:blue", marker="o", markersize=4, label="deployed policy, predict()")
    practicing = [(point["chunks"], point["candidate"]["successes"] / n) for point in points if point.get("candidate")]
    if practicing:
        ax.plot(*zip(*practicing, strict=True), "x:", color="tab:red", label="practicing actor")
    for name, color, label in (("vla", "black", "frozen VLA"), ("rlt", "tab:green", "RLT")):
        held_out = data[name]
        place = 0 if name == "vla" else chunks[-1]
        ax.errorbar(
            place, held_out["successes"] / held_out["n"],
            yerr=np.abs(np.array(held_out["wilson_95"]) - held_out["successes"] / held_out["n"])[:, None],
            color=color, marker="*", markersize=12, capsize=3, linestyle="none", zorder=5, clip_on=False,
            label=f"{label}, held-out states: {held_out['successes']}/{held_out['n']}",
        )  # fmt: skip
    ax.set(xlabel="action chunks of practice", ylabel="success rate", ylim=(0, 1.03))
    ax.set_title(f"{n} selection states during training", fontsize=10, loc="left")
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right", fontsize=7.5)
    ax.spines[["top", "right"]].set_visible(False)


def draw(run: Path, path: Path) -> None:
    """
    :param run: folder of a finished run with films
    :param path: where the PNG goes
    """
    data = read_evaluations(run)
    seconds = data["config"]["env"]["chunk_length"] / 20.0  # LIBERO's control frequency
    films = data["videos"]
    fig = plt.figure(figsize=(12, 4.0), layout="constrained")
    grid = fig.add_gridspec(2, 2, width_ratios=(FRAMES / 2, 1.3))
    outcome = {True: "success", False: "failure"}
    draw_strip(
        fig.add_subplot(grid[0, 0]), run / "before.mp4",
        f"frozen VLA, held-out initial state {films['init_index']}: {outcome[films['before_success']]}", seconds,
    )  # fmt: skip
    draw_strip(
        fig.add_subplot(grid[1, 0]), run / "after.mp4",
        f"RLT, the same state after {data['training']['minutes']:.0f} minutes of practice: "
        f"{outcome[films['after_success']]}", seconds,
    )  # fmt: skip
    draw_curve(fig.add_subplot(grid[:, 1]), data)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run with videos")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "demo.png")
    args = parser.parse_args()
    draw(args.run, args.out)


if __name__ == "__main__":
    main()
