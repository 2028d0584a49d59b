"""
What a GPU makes of each part: learner, a VLA of real size, RL token, EGL's pictures, and the whole loop.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --device cpu --small        # tries every part without a GPU; the numbers mean little

Times are wall times with the device's work awaited. Each part is a process of its own, with its peak of device memory;
one that fails is shown with its error, and the others go on (exit status 1). The VLA has random weights in bfloat16 and
the shape of pi0's backbone (SigLIP so400m for two pictures, an 18-layer Gemma of width 2048, 560 tokens): 2.9 billion
weights (``pip install 'rlt[hf]'``). The learner's ratio is to Stable-Baselines3's TD3 on the same device, in turns; the
aim is 4. The loop is the shipped VLA's on LIBERO with 16 simulators.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from json_file import write_json
from markdown_table import markdown_table

HERE = Path(__file__).resolve().parent


def seconds(device: str, call: Callable[[], Any], calls: int, warm: int = 3) -> float:
    """Return seconds per call."""
    for _ in range(warm):
        call()
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return (time.perf_counter() - start) / calls


def wait(device: str) -> None:
    """Wait until the device has done its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def learner(device: str, small: bool) -> list[dict[str, Any]]:
    """Critic updates per second (with the actor's), RLT against TD3."""
    import learner as benchmark

    rows = []
    for dim, batch in [(192, 64)] if small else [(192, 256), (2048, 256), (2048, 1024)]:
        models = benchmark.make_models(dim, batch, 200 if small else 2000, device)
        times = benchmark.measure(models, batch, 4 if small else 100, 2 if small else 7, time.perf_counter)
        middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
        ratios = {f"{name} / TD3": middle["TD3"] / value for name, value in middle.items() if name != "TD3"}
        rlt: Any = models["RLT"]
        draw_four = partial(rlt.replay_buffer.sample_batches, 4, batch, rlt._add_features)
        drawn = seconds(device, draw_four, 20)
        shown = {"TD3 updates/s": 1.0 / middle["TD3"], "drawing, ms an update": 1000 * drawn / 4}
        rows.append({"z_rl": dim, "batch": batch, **shown, **ratios})
    return rows


def vla(device: str, small: bool) -> list[dict[str, Any]]:
    """Observations per second of a VLA's forward pass."""
    from transformers import GemmaConfig, GemmaModel, SiglipVisionConfig, SiglipVisionModel

    towers: Any = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16)
    language: Any = dict(hidden_size=2048, intermediate_size=16384, num_hidden_layers=18, num_attention_heads=8)
    if small:
        towers |= dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        language |= dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        sees = SiglipVisionModel(SiglipVisionConfig(image_size=224, patch_size=14, **towers)).eval()
        width = language["hidden_size"]
        joins = torch.nn.Linear(towers["hidden_size"], width)
        thinks = GemmaModel(
            GemmaConfig(**language, head_dim=width // language["num_attention_heads"], num_key_value_heads=1)
        )
    thinks.eval()
    weights = sum(parameter.numel() for module in (sees, joins, thinks) for parameter in module.parameters())
    rows = []
    for batch in (1, 2) if small else (1, 2, 4, 8, 16, 32, 64):
        pictures = torch.rand(2 * batch, 3, 224, 224, device=device)
        words = torch.randint(0, 1000, (batch, 48), device=device)

        @torch.inference_mode()
        def forward(pictures: torch.Tensor = pictures, words: torch.Tensor = words) -> torch.Tensor:
            seen = joins(sees(pixel_values=pictures).last_hidden_state).reshape(len(words), -1, width)
            given = torch.cat([seen, thinks.get_input_embeddings()(words)], dim=1)
            return thinks(inputs_embeds=given).last_hidden_state

        took = seconds(device, forward, 2 if small else 20)
        found = {"weights, millions": weights / 1e6, "batch": batch, "tokens": forward().shape[1]}
        rows.append({**found, "ms": 1000 * took, "observations/s": batch / took, "device memory, GB": peak(device)})
    return rows


def token(device: str, small: bool) -> list[dict[str, Any]]:
    """Encode and train an RL token on tokens of that VLA's size."""
    from rlt_gym.rl_token.decoder import RLTokenDecoder
    from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
    from rlt_gym.rl_token.trainer import Autoencoder

    dim, count = (64, 20) if small else (2048, 560)
    config = RLTokenConfig(dim, count)
    with torch.device(device):
        model = Autoencoder(RLTokenEncoder(config), RLTokenDecoder(config))
    optimizer = torch.optim.AdamW(model.modules().parameters(), fused=True)
    rows = []
    for batch in (2,) if small else (1, 16, 64):
        tokens = torch.randn(batch, count, dim, device=device)
        mask = torch.ones(batch, count, dtype=torch.bool, device=device)

        @torch.inference_mode()
        def encode(tokens: torch.Tensor = tokens, mask: torch.Tensor = mask) -> torch.Tensor:
            return model.encoder.encode(model.encoder.standardize(tokens), mask)

        def train(tokens: torch.Tensor = tokens, mask: torch.Tensor = mask) -> None:
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                loss = model.losses(tokens, mask, config.context_dropout)["mean"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        encoded, trained = (seconds(device, call, 2 if small else 20) for call in (encode, train))
        found = {"tokens": count, "width": dim, "batch": batch, "encoded/s": batch / encoded}
        rows.append({**found, "trained/s": batch / trained, "device memory, GB": peak(device)})
    return rows


def pictures(device: str, small: bool) -> list[dict[str, Any]]:
    """Pictures per second of one simulator: EGL against OSMesa, in processes of their own."""
    rows = []
    for backend in ("osmesa",) if torch.device(device).type == "cpu" else ("egl", "osmesa"):
        for quality in ("fast", "exact"):
            environment = os.environ | {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
            call = [sys.executable, __file__, "--draw", quality, *(["--small"] if small else [])]
            done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{backend}: {done.stderr.strip().splitlines()[-1]}")
            rows.append({"OpenGL": backend, "quality": quality, "pictures/s": float(done.stdout.split()[-1])})
    return rows


def draw(quality: str, small: bool) -> None:
    """Print the pictures per second of one simulator in this process."""
    from simulators import Ours

    simulator = Ours("libero_goal", 1, "embedded", quality).simulator
    cameras = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
    print(len(cameras) / seconds("cpu", lambda: simulator.pictures(cameras), 5 if small else 200))


def loop(device: str, small: bool) -> list[dict[str, Any]]:
    """Chunks per second of training on LIBERO with the shipped VLA."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "throughput.json"
        settings = ["--envs", "1", "--seconds", "1", "--rounds", "1"] if small else ["--envs", "16"]
        call = [sys.executable, str(HERE / "throughput.py"), "--device", device, *settings, "--json", str(out)]
        done = subprocess.run(call, capture_output=True, text=True)
        if not out.exists():
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        results = json.loads(out.read_text())["results"]
    parts = ("learner", "VLA", "encoder", "transport", "waiting")
    return [
        {"simulators": int(count), "mode": mode, "chunks/s": row["chunks_per_second"]}
        | {f"{part}, ms a chunk": 1000 * row[part] / row["chunks"] for part in parts}
        for count, found in results.items()
        for mode, row in found.items()
    ]


PARTS = {part.__name__: part for part in (learner, vla, token, pictures, loop)}


def peak(device: str) -> float:
    """Return the peak of this process' memory on the device, in GB."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.device(device).type == "cuda" else 0.0


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table."""
    cells = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return markdown_table([list(rows[0]), *cells])


def main() -> int:
    """Measure the parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny networks and few repetitions")
    parser.add_argument("--json", type=Path, help="JSON file for the numbers")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--draw", choices=("fast", "exact"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw, arguments.small)
        return 0
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; --device cpu --small tries the benchmark without one")
    if arguments.only:
        print(json.dumps(PARTS[arguments.only](arguments.device, arguments.small)))
        return 0
    cuda = torch.device(arguments.device).type == "cuda"
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
    failed = []
    for name in arguments.parts:
        call = [sys.executable, __file__, "--only", name, "--device", arguments.device]
        done = subprocess.run(call + ["--small"] * arguments.small, capture_output=True, text=True)
        if done.returncode:
            failed.append(name)
            found[name] = {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        else:
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
        shown = found[name]["error"] if done.returncode else table(found[name])
        print(f"\n{PARTS[name].__doc__}\n\n{shown}", flush=True)
        write_json(arguments, **found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
