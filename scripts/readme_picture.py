"""
The picture of README and of the documentation's front page, drawn from a finished run.

    python scripts/readme_picture.py runs/demo     # writes docs/images/demo.png

Left: frames of before.mp4 (the frozen VLA) and after.mp4 (RLT), from the same held-out initial state. Right: the
share of the selection states that are solved during training. Practice is given in robot minutes and wall minutes.
"""

import argparse
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import matplotlib
import numpy as np

from rlt_sb3.experiment.practice import training_minutes
from rlt_sb3.experiment.report import read_evaluations

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from PIL import Image

ROOT = Path(__file__).parent.parent
FRAMES = 4  # of each film
PIXELS = 200  # side of a frame
GAP = 4  # pixels between two frames
CONTROL_FREQUENCY = 20.0  # of LIBERO, control steps per second


def film_strip(path: Path) -> np.ndarray:
    """
    Take frames from a film for a strip.

    :param path: a film of an episode; its last picture stands still for a second
    :return: some of its pictures, evenly spaced from the first to the last one, side by side
    """
    film, fps = iio.imread(path), iio.immeta(path)["fps"]
    last = max(len(film) - 1 - round(fps), 0)
    chosen = np.linspace(0, last, FRAMES).round().astype(int).tolist()
    small = [np.asarray(Image.fromarray(film[number]).resize((PIXELS, PIXELS), Image.LANCZOS)) for number in chosen]
    gap = np.full((PIXELS, GAP, 3), 255, dtype=np.uint8)
    return np.hstack([part for picture in small for part in (picture, gap)][:-1])


def draw_strip(ax: Any, path: Path, title: str, seconds: float) -> None:
    """
    Draw a strip of frames.

    :param ax: where
    :param path: the film
    :param title: above the frames
    :param seconds: simulated length of the episode
    """
    ax.imshow(film_strip(path))
    ax.set_title(title, fontsize=12, loc="left")
    ax.set_xticks([(place + 0.5) * PIXELS + GAP * place for place in range(FRAMES)])
    ax.set_xticklabels([f"{time:.1f} s" for time in np.linspace(0.0, seconds, FRAMES)], fontsize=10)
    ax.set_yticks([])
    ax.tick_params(length=0, pad=2)
    ax.spines[:].set_visible(False)


def draw_curve(ax: Any, data: dict[str, Any]) -> None:
    """
    Draw the curve of selection evaluations.

    :param ax: where
    :param data: contents of the run's evaluations.json
    """
    vla, points, n = data["vla_selection"], data["selection"], data["vla_selection"]["n"]
    ax.axhspan(*vla["wilson_95"], color="0.92", label="frozen VLA, 95 % interval")
    ax.axhline(vla["successes"] / n, color="0.5", linestyle="--", linewidth=1)
    chunks = [0, *(point["chunks"] for point in points)]
    rates = [vla["successes"] / n, *(point["evaluation"]["successes"] / n for point in points)]
    ax.plot(chunks, rates, color="tab:blue", marker="o", markersize=4, label="RLT, predict()")
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
            label=f"{label}, held-out: {held_out['successes']}/{held_out['n']}",
        )  # fmt: skip
    robot = training_minutes(data)
    ax.set(
        xlabel="action chunks" + (f", {robot} robot minutes in all" if robot else ""),
        ylabel="success rate",
        ylim=(0, 1.03),
    )
    ax.set_title(f"{n} selection states during practice", fontsize=12, loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right", fontsize=9.5)
    ax.spines[["top", "right"]].set_visible(False)


def draw(run: Path, path: Path) -> None:
    """
    Draw the whole picture.

    :param run: folder of a finished run with films
    :param path: where the PNG goes
    """
    data = read_evaluations(run)
    films = data["videos"]
    state = (films["task_id"], films["init_index"])
    robot, wall = training_minutes(data), f"{data['training']['minutes']:.0f} minutes"
    minutes = f"same initial state, {f'{robot} robot minutes ({wall})' if robot else f'{wall} of practice'}"
    fig = plt.figure(figsize=(11, 4.4), layout="constrained")
    grid = fig.add_gridspec(2, 2, width_ratios=(FRAMES / 2, 1.35))
    for line, (film, key, name) in enumerate((("before", "vla", "frozen VLA"), ("after", "rlt", f"RLT, {minutes}"))):
        played = next(row for row in data[key]["rows"] if (row["task_id"], row["init_index"]) == state)
        title = f"{name}: {'success' if played['success'] else 'failure'}"
        seconds = played["steps"] / CONTROL_FREQUENCY
        draw_strip(fig.add_subplot(grid[line, 0]), run / f"{film}.mp4", title, seconds)
    draw_curve(fig.add_subplot(grid[:, 1]), data)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main() -> None:
    """Draw the picture of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run with videos")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "demo.png")
    args = parser.parse_args()
    draw(args.run, args.out)


if __name__ == "__main__":
    main()
