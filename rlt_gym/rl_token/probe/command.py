"""``rlt probe``: measures an RL token, writes a page and its numbers, and refuses a token without use."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlt_gym.core.files import write_json
from rlt_gym.data.demo_set import DemoRows
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.rl_token.encode_tokens import EncodeTokensConfig, encode_tokens
from rlt_gym.rl_token.held_out import evaluate_token
from rlt_gym.rl_token.io import read_autoencoder, shipped_path
from rlt_gym.rl_token.probe.gates import failures
from rlt_gym.rl_token.probe.reports import probe_page
from rlt_gym.rl_token.token_shards import TokenShards
from rlt_gym.rl_token.trainer import Autoencoder
from rlt_gym.vla.base import FrozenVLA
from rlt_gym.vla.registry import load_vla

#: Seeds of the random orders of labels.
ORDERS = 3


@dataclass
class ProbeConfig(LeRobotSettings):
    """
    Settings of :func:`probe`.

    :param rl_token: The file of an RL token, or "auto", the shipped one of ``vla``.
    :param tokens: Folder that ``rlt encode-tokens`` wrote. What the token was not trained on says more.
    :param demos: In place of ``tokens``, demonstration files, glob patterns or folders, also of LeRobot datasets.
    :param vla: The VLA of the RL token, a name or file as for ``rlt encode-tokens``; not needed with ``tokens`` and a
        file.
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param output: The page to write; its numbers go beside it with suffix ``.json``. ``None`` = ``TOKEN_probe.html``
        beside the RL token, where ``rlt train`` looks for its report, and ``probe.html`` for a shipped one.
    :param max_rows: Most observations; whole episodes are left out beyond that.
    :param frame_stride: Use one observation of ``demos`` in this many.
    :param device: Where VLA and encoder run.
    :param progress: Show a progress bar and the result.
    """

    rl_token: str
    tokens: str | None = None
    demos: list[str] = field(default_factory=list)
    vla: str | None = None
    vla_kwargs: dict[str, Any] | None = None
    output: str | None = None
    max_rows: int = 3000
    frame_stride: int = 4
    device: str = "cpu"
    progress: bool = True

    def __post_init__(self) -> None:
        if self.rl_token != "auto" and not Path(self.rl_token).is_file():
            raise ValueError(
                f"There is no RL token {self.rl_token}: give a file of `rlt pretrain-token`, or auto with --vla."
            )
        if (self.tokens is None) == (not self.demos):
            got = "both" if self.demos else "neither"
            raise ValueError(
                f"Give --demos FILES or --tokens FOLDER (which `rlt encode-tokens` wrote), one of them; got {got}."
            )
        if self.demos and self.vla is None:
            raise ValueError("--demos needs the VLA whose tokens the RL token reads: give --vla NAME.")
        if self.rl_token == "auto" and self.vla is None:
            raise ValueError("The RL token 'auto' is the shipped one of a VLA: give --vla NAME.")
        if self.output is None:
            self.output = "probe.html" if self.rl_token == "auto" else str(probe_page(self.rl_token))
        if Path(self.output).suffix != ".html":
            raise ValueError(f"output is {self.output!r}; it must end in .html.")
        if self.max_rows < 100:
            raise ValueError(f"max_rows is {self.max_rows}; it must be at least 100.")


def probe(config: ProbeConfig, vla: FrozenVLA | None = None) -> int:
    """
    Measure an RL token and write the page.

    :param config: What to do.
    :param vla: The VLA, if it is not one that ``config.vla`` can name.
    :return: Exit status: 1 if the token does not keep a limit of :mod:`rlt_gym.rl_token.probe.gates`, else 0.
    :raises ValueError: If files are missing or damaged, or token and VLA do not belong together.
    :raises ImportError: If scikit-learn is missing.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ImportError("`rlt probe` needs scikit-learn: pip install 'rlt[probe]'.") from error
    if vla is None and config.vla is not None:
        vla = load_vla(config.vla, config.device, config.vla_kwargs)
    encoder, decoder = read_autoencoder(shipped_path(vla) if config.rl_token == "auto" else config.rl_token)
    output = Path(str(config.output))
    model = Autoencoder(encoder.to(config.device).eval(), decoder.to(config.device).eval())
    if config.tokens is not None:
        result = _write(config, output, model, TokenShards(config.tokens))
    else:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.absolute().parent) as folder:
            encode = EncodeTokensConfig(
                config.demos, str(Path(folder) / "tokens"), str(config.vla), kinds=encoder.config.kinds,
                frame_stride=config.frame_stride, successes_only=False, device=config.device, progress=config.progress,
                **config.lerobot,
            )  # fmt: skip
            encode_tokens(encode, vla)
            result = _write(config, output, model, TokenShards(encode.output))
    if config.progress:
        print("\n".join(f"{key:>28}: {value:.4f}" for key, value in result["numbers"].items()))
        print("\n".join(f"FAILS: {failure}" for failure in result["failures"]) or f"all limits kept -> {output}")
    return 1 if result["failures"] else 0


def _write(config: ProbeConfig, output: Path, model: Autoencoder, tokens: TokenShards) -> dict[str, Any]:
    """Measure, write numbers and page, return the numbers."""
    from rlt_gym.rl_token.probe.page import write_page

    result, about = _measure(config, model, tokens)
    result["failures"] = failures(result["numbers"])
    write_json(output.with_suffix(".json"), result)
    write_page(output, result, **about)
    return result


def choose_rows(rows: DemoRows, most: int) -> np.ndarray:
    """
    Choose whole episodes, evenly spread.

    :param rows: What is known about the observations.
    :param most: Most observations.
    :return: Numbers of the rows of the chosen episodes; at least those of two.
    """
    demos = np.unique(rows.demo)
    for count in range(len(demos), 1, -1):
        chosen = demos[np.linspace(0, len(demos) - 1, count).round().astype(int)]
        found = np.flatnonzero(np.isin(rows.demo, chosen))
        if len(found) <= most or count == 2:
            return found
    raise ValueError("The data have one episode only, and a probe needs several: collect more.")


def _measure(config: ProbeConfig, model: Autoencoder, tokens: TokenShards) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers of the report, and what the page shows besides."""
    from rlt_gym.rl_token.probe.attention import Looks, look
    from rlt_gym.rl_token.probe.geometry import maps, silhouettes, smoothness, spectrum
    from rlt_gym.rl_token.probe.readouts import read, spread, targets

    encoder = model.encoder
    if encoder.vla_fingerprint and encoder.vla_fingerprint != tokens.origin.fingerprint:
        raise ValueError(
            f"The RL token belongs to the VLA {encoder.vla_name!r} with fingerprint {encoder.vla_fingerprint[:12]}..., "
            f"and the tokens are of {tokens.origin.vla!r} with {tokens.origin.fingerprint[:12]}...: encode them with "
            "the token's VLA."
        )
    if encoder.config.kinds != tokens.origin.kinds:
        raise ValueError(
            f"The RL token reads the kinds {list(encoder.config.kinds)}, the tokens are {list(tokens.origin.kinds)}: "
            "encode them again with these kinds."
        )
    chosen = choose_rows(tokens.rows, config.max_rows)
    rows = tokens.rows.take(chosen)
    z_rl, mean = _features(model, tokens, chosen)
    half = np.isin(rows.demo, np.unique(rows.demo)[::2])
    numbers = evaluate_token(encoder, model.decoder, tokens, chosen[half], chosen[~half])
    shape = spectrum(z_rl)
    numbers |= {key: value for key, value in shape.items() if isinstance(value, float)}
    numbers |= smoothness(z_rl, rows) | {f"silhouette_{key}": value for key, value in silhouettes(z_rl, rows).items()}
    proprio = rows.proprio.astype(float)
    features = {
        "z_rl": z_rl, "proprio": proprio, "z_rl and proprio": np.concatenate([z_rl, proprio], axis=1),
        "mean of the tokens": mean,
    }  # fmt: skip
    found, left = targets(rows, tokens.robot)
    readouts: dict[str, dict[str, Any]] = {}
    for target in found:
        groups = rows.demo[target.rows]
        scores = {name: read(target, values[target.rows], groups) for name, values in features.items()}
        orders = [read(target, z_rl[target.rows], groups, seed) for seed in range(ORDERS)]
        scores["z_rl, labels in random order"] = {
            key: float(np.mean([order[key] for order in orders])) for key in orders[0]
        }
        readouts[target.name] = {
            "observations": len(target.rows),
            "episodes": len(np.unique(groups)),
            "measure": "balanced accuracy" if target.classes else "R2",
            "spread": spread(target),
            "scores": scores,
        }
    phase = readouts["phase of the episode"]["scores"]
    numbers["phase_over_shuffled"] = phase["z_rl"]["score"] - phase["z_rl, labels in random order"]["score"]
    looks = look(encoder, tokens, chosen)
    if not isinstance(looks, Looks):
        left["attention"] = looks
    result = {
        "rl_token": config.rl_token,
        "fingerprint": encoder.fingerprint(),
        "vla": tokens.origin.vla,
        "data": tokens.rows.files,
        "observations": len(rows),
        "episodes": rows.num_demos if len(rows) == len(tokens) else len(np.unique(rows.demo)),
        "numbers": numbers,
        "shares": shape["shares"],
        "readouts": readouts,
        "attention": looks.numbers if isinstance(looks, Looks) else None,
        "left_out": left,
    }
    about = {"rows": rows, "maps": maps(z_rl), "looks": looks if isinstance(looks, Looks) else None}
    return result, {**about, "pictures": lambda places: tokens.pictures(chosen[places])}


@torch.no_grad()
def _features(model: Autoencoder, tokens: TokenShards, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``z_rl`` and the mean of the standardized valid tokens, float (R, D) and (R, H)."""
    encoder, z_rl, means = model.encoder, [], []
    for part in tokens.batches(rows):
        found, mask = tokens.batch(part, encoder.e_rl.device)
        z = encoder.standardize(found)
        z_rl.append(encoder.encode(z, mask).cpu().numpy())
        means.append(((z * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).cpu().numpy())
    return np.concatenate(z_rl).astype(float), np.concatenate(means).astype(float)
