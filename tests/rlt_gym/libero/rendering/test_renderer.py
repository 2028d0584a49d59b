"""Shortcuts of the renderer draw the same pictures as MuJoCo without them, on scenes made up here."""

import subprocess
import sys

import pytest

#: What the scenes below begin with. They are drawn in separate processes: the GL back end is chosen on import.
DRAWING = """
import os
os.environ.setdefault("MUJOCO_GL", "osmesa")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
os.environ.setdefault("LP_NUM_THREADS", "0")
import mujoco
import numpy as np
from rlt_gym.libero.rendering import renderer as render
from rlt_gym.libero.rendering import shortcuts


def throw(data, reach, rng):
    "Put free bodies anywhere, turned anyhow."
    places = data.qpos.reshape(-1, 7)
    places[:, :3] = rng.uniform(-reach, reach, (len(places), 3))
    places[:, 3:] = rng.normal(size=(len(places), 4))


def sample(model, data):
    mujoco.mj_kinematics(model, data)
    mujoco.mj_camlight(model, data)
    return {name: np.array(getattr(data, name)) for name in render.KINEMATICS}
"""


def draws_the_same_pictures(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", DRAWING + code], capture_output=True, text=True)
    assert "same pictures" in done.stdout, done.stderr[-2000:]


@pytest.mark.sim
@pytest.mark.parametrize("mirror", [True, False])
def test_culled_pictures_equal_plain_ones(mirror):
    """A scene of MuJoCo's alone: things move a lot, a little and not at all, in and out of the view."""
    code = (
        f"material = 'material=\"m\"' if {mirror} else ''"
        + """
model = mujoco.MjModel.from_xml_string(f'''
<mujoco>
  <asset>
    <mesh name="ball" builtin="sphere" params="4" scale="0.1 0.1 0.1"/>
    <material name="m" reflectance="0.5"/>
  </asset>
  <worldbody>
    <light pos="1 1 3" castshadow="false"/>
    <camera name="c" pos="0 -1.2 0.7" xyaxes="1 0 0 0 0.5 0.87"/>
    <geom type="box" size="0.4 0.4 0.02" rgba="0.4 0.4 0.5 1" group="1" {material}/>
    <body pos="0 0 0.2"><freejoint/><geom type="mesh" mesh="ball" rgba="1 0 0 1" group="1"/></body>
    <body pos="0.3 0 0.2"><freejoint/><geom type="mesh" mesh="ball" rgba="0 1 0 1" group="1"/></body>
  </worldbody>
</mujoco>''')
data = mujoco.MjData(model)
culled = render.Renderer(model, 64)
assert culled._culling is not None
rng = np.random.default_rng(0)
samples, pictures = [], []
for number in range(90):
    if number % 10 == 0:
        data.qpos[:3] = rng.uniform(-0.6, 0.6, 3) + [0, 0, 0.5]
    data.qpos[7:10] += rng.uniform(-1, 1, 3) * (1e-5 if number % 3 else 3e-2)
    samples.append(sample(model, data))
    pictures.append(culled.render(samples[-1], "c"))
pictures.append(culled.render(samples[-1], "c", 96))
culled.close()
shortcuts.can_cull, shortcuts.geom_records = lambda *_: False, lambda *_: None
for quality in ("exact", "stock"):
    plain = render.Renderer(model, 64, quality)
    assert plain._culling is None
    expected = [plain.render(sample, "c") for sample in samples] + [plain.render(samples[-1], "c", 96)]
    plain.close()
    different = [int((a != b).sum()) for a, b in zip(pictures, expected)]
    assert not any(different), (quality, different)
assert len({picture.tobytes() for picture in expected}) > 20
print("same pictures")
"""
    )
    draws_the_same_pictures(code)


@pytest.mark.sim
def test_whole_geoms_outside_the_picture_are_left_out():
    """A scene without meshes: boxes, a cylinder and something invisible, which move in and out of the view."""
    code = """
kinds = [("box", "0.3 0.01 0.02"), ("box", "0.05 0.05 0.25"), ("cylinder", "0.02 0.3"), ("capsule", "0.03 0.1")]
bodies = "".join(
    f'<body pos="0 0 0.2"><freejoint/><geom type="{kind}" size="{size}" group="1"/>'
    f'<site type="cylinder" size="0.02 5" rgba="1 0 0 {-0.5 if number % 2 else 0.5}"/></body>'
    for number, (kind, size) in enumerate(kinds * 3)
)
model = mujoco.MjModel.from_xml_string(f'''
<mujoco>
  <worldbody>
    <light pos="1 1 3" castshadow="false"/>
    <camera name="c" pos="0 -1.2 0.7" xyaxes="1 0 0 0 0.5 0.87"/>
    <geom type="plane" size="3 3 0.1" rgba="0.4 0.4 0.5 1" group="1"/>
    {bodies}
  </worldbody>
</mujoco>''')
data = mujoco.MjData(model)
culled = render.Renderer(model, 64, "fast")
rng = np.random.default_rng(0)
samples, pictures, drawn = [], [], []
for _ in range(60):
    throw(data, 1.5, rng)
    samples.append(sample(model, data))
    pictures.append(culled.render(samples[-1], "c"))
    drawn.append(culled._scene.ngeom)
culled.close()
shortcuts.geom_records = lambda *_: None
plain = render.Renderer(model, 64, "fast")
expected = [plain.render(sample, "c") for sample in samples]
different = [int((a != b).sum()) for a, b in zip(pictures, expected)]
assert not any(different), different
assert np.mean(drawn) < 0.8 * plain._scene.ngeom, (np.mean(drawn), plain._scene.ngeom)
assert len({picture.tobytes() for picture in expected}) > 50
print("same pictures")
"""
    draws_the_same_pictures(code)


@pytest.mark.sim
def test_merged_boxes_of_a_body_look_like_separate_ones():
    """Two kinds of boxes turned every way on two bodies, some large or transparent: those stay as they are."""
    code = """
rng = np.random.default_rng(0)
def boxes(count, rgba, most=0.08):
    rows = zip(rng.uniform(-0.2, 0.2, (count, 3)), rng.uniform(0.02, most, (count, 3)), rng.normal(size=(count, 4)))
    return "".join(
        '<geom type="box" group="1" rgba="%s" pos="%s" size="%s" quat="%s"/>'
        % (rgba, *(" ".join(map(str, numbers)) for numbers in row)) for row in rows
    )
colors = ("0.8 0.2 0.1 1", "0.1 0.3 0.8 1")
body = "<body><freejoint/>" + "".join(boxes(10, c) for c in colors) + "%s</body>"
model = mujoco.MjModel.from_xml_string(f'''
<mujoco>
  <visual><headlight ambient="0.3 0.3 0.3" diffuse="0.5 0.5 0.5"/></visual>
  <worldbody>
    <light pos="1 1 3" castshadow="false"/>
    <camera name="c" pos="0 -1.2 0.7" xyaxes="1 0 0 0 0.5 0.87"/>
    <geom type="plane" size="3 3 1" rgba="0.4 0.4 0.5 1" group="1"/>
    {body % boxes(2, "0 1 0 0.5")}{body % boxes(2, colors[0], 0.6)}
  </worldbody>
</mujoco>''')
data = mujoco.MjData(model)
merged = render.Renderer(model, 128, "fast")
samples, pictures, drawn = [], [], []
for _ in range(20):
    throw(data, 0.5, rng)
    samples.append(sample(model, data))
    pictures.append(merged.render(samples[-1], "c"))
    drawn.append(merged._scene.ngeom)
merged.close()
shortcuts.geom_records = lambda *_: None
plain = render.Renderer(model, 128, "fast")
expected = [plain.render(sample, "c") for sample in samples]
assert plain._scene.ngeom == 1 + 2 * 22 and max(drawn) <= 1 + 4 + 2 + 2, drawn
assert len({picture.tobytes() for picture in expected}) == 20
difference = np.abs(np.array(pictures).astype(int) - np.array(expected)).max(axis=-1)
assert difference.mean() < 0.3 and (difference > 8).mean() < 1e-3, (difference.mean(), (difference > 8).mean())
print("same pictures", difference.mean(), (difference > 8).mean())
"""
    draws_the_same_pictures(code)
