"""Turn the catalog into a folder that LIBERO's unmodified loaders read like its own ``assets``."""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlt_gym.libero.assets.catalog import CATALOG
from rlt_gym.libero.assets.paints import PAINTS, TEXTURES
from rlt_gym.libero.assets.schema import Asset, Joint, Lamp, Paint, Part, Region, Scene
from rlt_gym.libero.assets.shapes import ORIGIN, UPRIGHT, Geom, Quat, Shape, Vec3
from rlt_gym.libero.assets.textures import render_texture
from rlt_gym.libero.suites.folders import cache_dir

# LIBERO's contact predicates count the geoms of group 0 only, its renderer draws those of group 1 only.
COLLISION, VISUAL, UNSEEN = "0", "1", "5"
# A contact closes within 8 ms: stiff enough to hold thin walls, soft enough that things that were put into each other
# are pushed apart and not shot across the room.
CONTACT = {"friction": "0.95 0.3 0.1", "solref": "0.008 1", "solimp": "0.98 0.998 0.001"}


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def _element(parent: ET.Element, tag: str, **attributes: str) -> ET.Element:
    return ET.SubElement(parent, tag, attributes)


def _place(pos: Vec3, quat: Quat) -> dict[str, str]:
    place = {}
    if pos != ORIGIN:
        place["pos"] = _numbers(pos)
    if quat != UPRIGHT:
        place["quat"] = _numbers(quat)
    return place


def _add_geom(body: ET.Element, geom: Geom, density: float | None, parts_collide: bool = True) -> None:
    common = {"type": geom.kind, "size": _numbers(geom.size), **_place(geom.pos, geom.quat)}
    if geom.solid:
        mass = {} if density is None else {"mass": f"{density * geom.volume:.6g}"}
        # Everything else in a scene has contype and conaffinity 1, the gripper's fingers contype 0.
        apart = {} if parts_collide else {"contype": "1", "conaffinity": "2"}
        # No color: renderers that show group 0 (to draw a robot cheaply) must not draw a thing twice.
        _element(body, "geom", **common, group=COLLISION, rgba="0 0 0 0", **CONTACT, **mass, **apart)
    if geom.shown:
        _element(
            body, "geom", **common, group=VISUAL, contype="0", conaffinity="0", mass="0", material=f"mat_{geom.paint}"
        )


def _add_shapes(body: ET.Element, shapes: Iterable[Shape], mass: float | None, parts_collide: bool = True) -> None:
    geoms = [geom for shape in shapes for geom in shape.geoms()]
    density = None if mass is None else mass / sum(geom.volume for geom in geoms if geom.solid)
    for geom in geoms:
        _add_geom(body, geom, density, parts_collide)


def _add_site(body: ET.Element, site: Region | Lamp) -> None:
    if isinstance(site, Lamp):
        # Starts visible: LIBERO hides it on the first step and shows it again when the appliance is on.
        _element(
            body,
            "site",
            name=site.name,
            type="cylinder",
            pos=_numbers(site.pos),
            size=_numbers((site.radius, 0.0005)),
            rgba=_numbers((*site.rgb, 1.0)),
        )
        return
    # pos and quat are always written: LIBERO parses both without a default.
    _element(
        body,
        "site",
        name=site.name,
        type="box",
        pos=_numbers(site.pos),
        quat=_numbers(site.quat),
        size=_numbers(site.half),
        rgba="0 0 0 0",
    )


def _add_joint(body: ET.Element, joint: Joint) -> None:
    _element(
        body,
        "joint",
        name=joint.name,
        type=joint.kind,
        axis=_numbers(joint.axis),
        limited="true",
        range=_numbers(joint.range),
        damping=_numbers((joint.damping,)),
    )


def _add_part(parent: ET.Element, part: Part, parts_collide: bool = True) -> None:
    body = _element(parent, "body", name=part.name, **_place(part.pos, part.quat))
    if part.inertia is not None:
        mass, diagonal = part.inertia
        _element(body, "inertial", pos="0 0 0", mass=_numbers((mass,)), diaginertia=_numbers(diagonal))
    if part.joint is not None:
        _add_joint(body, part.joint)
    for site in part.sites:
        _add_site(body, site)
    _add_shapes(body, part.shapes, None, parts_collide)
    for child in part.parts:
        _add_part(body, child, parts_collide)


def _all_shapes(asset: Asset | Part) -> Iterator[Shape]:
    yield from asset.shapes
    for part in asset.parts:
        yield from _all_shapes(part)


def _paints(assets: Iterable[Asset | Part]) -> list[str]:
    shapes = (shape for asset in assets for shape in _all_shapes(asset))
    return sorted({geom.paint for shape in shapes for geom in shape.geoms() if geom.shown})


def _add_paint(assets: ET.Element, name: str, folder: str, texture_type: str, texture_name: str, **extra: str) -> None:
    paint: Paint = PAINTS[name]
    attributes = {"specular": _numbers((paint.gloss,)), "shininess": _numbers((paint.gloss,)), "reflectance": "0"}
    if paint.texture is not None:
        file = posixpath.relpath(f"textures/{paint.texture}.png", folder)
        _element(assets, "texture", name=texture_name, type=texture_type, file=file)
        attributes["texture"] = texture_name
    _element(assets, "material", name=f"mat_{name}", rgba=_numbers((*paint.rgb, 1.0)), **attributes, **extra)


def _asset_tree(asset: Asset) -> ET.Element:
    root = ET.Element("mujoco", model=posixpath.splitext(posixpath.basename(asset.path))[0])
    _element(root, "compiler", angle="radian")
    assets = _element(root, "asset")
    for name in _paints((asset,)):
        _add_paint(assets, name, posixpath.dirname(asset.path), "cube", f"tex_{name}")
    outer = _element(_element(root, "worldbody"), "body")
    body = _element(outer, "body", name="object")
    for site in asset.sites:
        _add_site(body, site)
    _add_shapes(body, asset.shapes, asset.mass, asset.parts_collide)
    for part in asset.parts:
        _add_part(body, part, asset.parts_collide)
    for name, pos in (
        ("bottom_site", (0.0, 0.0, asset.bottom)),
        ("top_site", (0.0, 0.0, asset.top)),
        ("horizontal_radius_site", (asset.radius, asset.radius, 0.0)),
    ):
        _element(outer, "site", name=name, pos=_numbers(pos), size="0.005", rgba="0 0 0 0")
    return root


def _add_table(world: ET.Element, table: str, legs: str | None) -> None:
    # LIBERO's arena classes set position, size and friction; they look these names up.
    body = _element(world, "body", name="table", pos="0 0 0.4")
    _element(body, "geom", name="table_collision", type="box", size="0.4 0.4 0.4", group=COLLISION, rgba="0 0 0 0")
    drawn = {"group": VISUAL, "contype": "0", "conaffinity": "0"}
    _element(body, "geom", name="table_visual", type="box", size="0.4 0.4 0.4", material=f"mat_{table}", **drawn)
    _element(body, "site", name="table_top", pos="0 0 0.4", size="0.001", rgba="0 0 0 0")
    leg = {**drawn, "group": UNSEEN} if legs is None else {**drawn, "material": f"mat_{legs}"}
    for i in range(1, 5):
        _element(
            body,
            "geom",
            name=f"table_leg{i}_visual",
            type="cylinder",
            size="0.025 0.1",
            **leg,
        )


def _scene_tree(scene: Scene) -> ET.Element:
    root = ET.Element("mujoco", model=posixpath.splitext(posixpath.basename(scene.path))[0])
    assets = _element(root, "asset")
    sky = {"builtin": "gradient", "rgb1": "0.85 0.88 0.92", "rgb2": "0.55 0.6 0.68", "width": "32", "height": "32"}
    _element(assets, "texture", name="rlt_sky", type="skybox", **sky)
    folder = posixpath.dirname(scene.path)
    # "texplane" and "tex-wall" are the names whose file LIBERO's style code replaces.
    _add_paint(assets, scene.floor, folder, "2d", "texplane", texrepeat="3 3", texuniform="true")
    _add_paint(assets, scene.wall, folder, "2d", "tex-wall", texrepeat="2 2", texuniform="true")
    seen = {scene.floor, scene.wall}
    for name in (scene.table, scene.legs, *_paints((Part("", scene.walls), *scene.furniture))):
        if name is not None and name not in seen:
            _add_paint(assets, name, folder, "cube", f"tex_{name}")
            seen.add(name)
    world = _element(root, "worldbody")
    _element(
        _element(world, "body", name="floor") if scene.floor_body else world,
        "geom",
        name="floor",
        type="plane",
        size="3 3 0.125",
        group=VISUAL,
        material=f"mat_{scene.floor}",
        condim="3",
    )
    _add_shapes(world, scene.walls, mass=None)
    if scene.table is not None:
        _add_table(world, scene.table, scene.legs)
    for part in scene.furniture:
        _add_part(world, part)
    for name, pos, diffuse in (("light1", (1.5, 1.0, 4.0), 0.38), ("light2", (-1.0, -2.0, 4.0), 0.22)):
        _element(
            world,
            "light",
            name=name,
            pos=_numbers(pos),
            dir=_numbers((0.0, -0.15, -1.0)),
            directional="false",
            diffuse=_numbers((diffuse, diffuse, diffuse)),
            ambient="0.08 0.08 0.08",
            specular="0.2 0.2 0.2",
            exponent="1",
            cutoff="80",
            castshadow="false",
        )
    for camera in scene.cameras:
        _element(world, "camera", name=camera.name, mode="fixed", pos=_numbers(camera.pos), quat=_numbers(camera.quat))
    return root


def build_files(catalog: Iterable[Asset | Scene] = CATALOG) -> dict[str, bytes]:
    """
    Build all files of the assets in memory.

    :param catalog: What to build.
    :return: Contents of every file by its path below the asset folder.
    """
    files = {}
    for entry in catalog:
        tree = _scene_tree(entry) if isinstance(entry, Scene) else _asset_tree(entry)
        ET.indent(tree)
        files[entry.path] = ET.tostring(tree, encoding="utf-8") + b"\n"
    for name, texture in TEXTURES.items():
        files[f"textures/{name}.png"] = render_texture(name, texture)
    return files


@functools.cache
def _built() -> tuple[str, dict[str, bytes]]:
    files = build_files()
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + files[path] + b"\0")
    return digest.hexdigest()[:12], files


def embedded_assets() -> Path:
    """
    Build the embedded asset pack, if it is not built yet.

    The folder's name holds a hash of its contents, so versions never mix, and each file is put in place atomically, so
    many processes may call this at once.

    :return: Folder laid out like LIBERO's ``assets``, below :func:`rlt_gym.libero.suites.folders.cache_dir`.
    """
    digest, files = _built()
    folder = cache_dir() / f"assets-{digest}"
    for name, content in files.items():
        path = folder / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, path)
    return folder
